"""Create the virtual environment of the peers: ``python -m benchmarks.peers.environment DIRECTORY``.

Uses the standard library only. If the index lacks a package, a line reports it and the tables omit its
peer. An overlay has packages for one peer that conflict with other peers.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

OVERLAYS = "overlays"
_HERE = Path(__file__).parent
_PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")


def main(directory: str) -> None:
    """Create the environment and install all available packages."""
    place = Path(directory).absolute()
    venv.create(place, with_pip=True)
    _install_all(place, _HERE / "requirements.txt")
    for overlay in _HERE.glob("requirements-*.txt"):
        peer = overlay.stem.removeprefix("requirements-")
        _install(place, "--target", str(place / OVERLAYS / peer), "--requirement", str(overlay))
    if not _install(place, "--editable", str(_HERE.parents[1])):
        sys.exit("Horsies itself could not be installed.")


def _install_all(place: Path, requirements: Path) -> None:
    if _install(place, "--requirement", str(requirements)):
        return
    for line in requirements.read_text("utf-8").splitlines():
        if line and not line.startswith("#") and not _install(place, line):
            print(f"The package index does not have {line}; its peer is left out.")


def _install(place: Path, *arguments: str) -> bool:
    command = [str(place / "bin" / "python"), *_PIP, *arguments]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    main(sys.argv[1])
