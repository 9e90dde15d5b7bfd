"""Put the pages of the documentation into the wheel, where `horsies docs` finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DocumentationHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds docs/**/*.md and their list as horsies/documentation; an editable installation reads docs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the pages to include."""
        pages = Path(self.root, "docs")
        if version != "editable":
            build_data["force_include"] |= {
                str(page): f"horsies/documentation/{page.relative_to(pages).as_posix()}"
                for page in [*pages.rglob("*.md"), pages / "llms.txt"]
            }
