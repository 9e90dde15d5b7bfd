"""A store of large payload outside the database: a directory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


class FileStore:
    """Each object is a file. Without the directory, the store does not answer."""

    store_id = "files"

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def put(self, name: str, data: bytes) -> None:
        part = self.directory / f"{name}.part"
        part.write_bytes(data)
        part.rename(self.directory / name)

    def get(self, name: str) -> bytes | None:
        if not self.directory.exists():
            raise ConnectionError("no such directory")
        path = self.directory / name
        return path.read_bytes() if path.exists() else None

    def delete(self, names: Collection[str]) -> None:
        if not self.directory.exists():
            raise ConnectionError("no such directory")
        for name in names:
            (self.directory / name).unlink(missing_ok=True)
