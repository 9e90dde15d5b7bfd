"""Write every drawing into docs/images; `record` also records the demonstration."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.drawings.chart import chart
from tools.drawings.pictures import PICTURES
from tools.drawings.recording import record

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def main() -> None:
    """Write the drawings; with the argument `record`, also run the demonstration."""
    for name, picture in {**PICTURES, "benchmark": chart}.items():
        (IMAGES / f"{name}.svg").write_text(picture().svg(), "utf-8")
    if sys.argv[1:] == ["record"]:
        (IMAGES / "demo.svg").write_text(record(), "utf-8")


main()
