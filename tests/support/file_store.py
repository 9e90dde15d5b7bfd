"""A store for large payload outside the database: a directory."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


class FileStore:
    """Keeps each object in a file. Without the directory, the store does not respond."""

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


class Directory:
    """The directory of a file store, which a test can move away and back."""

    def __init__(self, path: Path) -> None:
        self._path, self._away = path, path.with_name("away")
        path.mkdir()

    @property
    def place(self) -> str:
        """The store's value for the environment of ``apps.confidential``."""
        return str(self._path)

    def close(self) -> None:
        """Put it away."""
        self._path.rename(self._away)

    def open(self) -> None:
        """Put it back."""
        self._away.rename(self._path)

    def names(self) -> set[str]:
        """Return the names of all objects."""
        return {one.name for one in self._path.iterdir()}

    def delete(self, name: str) -> None:
        """Lose an object."""
        (self._path / name).unlink()
