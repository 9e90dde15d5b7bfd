"""The user that runs the embedded PostgreSQL. For root it is another user, because PostgreSQL refuses to
run as root.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from horsies.errors import ConfigurationError, ErrorCode

if sys.platform != "win32":
    import pwd

# The user that the package creates for a server that root starts.
SERVER_USER = "pgserver"
_CREATION_ATTEMPTS = 20
_CREATION_PAUSE_SECONDS = 0.25
# The variables of root's environment that are passed to the server's processes. Other variables may contain
# secrets, and the server's user can read the environment of its own processes.
_SHARED_VARIABLES = ("PATH", "TMPDIR", "TZ", "TZDIR", "LANG", "LANGUAGE", "LD_LIBRARY_PATH")


def is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0


def user_name() -> str:
    """Return the name of this process's user; PostgreSQL identifies users by name."""
    if sys.platform == "win32":
        return ""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise ConfigurationError(
            f"PostgreSQL runs only for a user with a name, and the user {os.geteuid()} has none on this "
            "machine.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text="add the user to /etc/passwd, work as another user, "
            "or name a server: postgresql://user@host/database",
        ) from None


def switch_options(user: str | None) -> dict[str, Any]:
    """Return the ``subprocess`` options for running one of the server's programs, without root's groups."""
    # PGPORT, for example, would become the port of the server.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PG")}
    if user is None or sys.platform == "win32":
        return {"env": environment}
    shared = {
        name: text
        for name, text in environment.items()
        if name in _SHARED_VARIABLES or name.startswith("LC_")
    }
    group = pwd.getpwnam(user).pw_gid
    return {"env": shared, "user": user, "group": group, "extra_groups": []}


def find_closed_parent(path: Path) -> Path | None:
    """Return the nearest directory above this path that the server's user cannot enter, if any."""
    if not is_root() or sys.platform == "win32":
        return None
    server_user = pwd.getpwnam(SERVER_USER)
    for parent in path.resolve().parents:
        found = parent.stat()
        bits = stat.S_IXOTH | (stat.S_IXUSR if found.st_uid == server_user.pw_uid else 0)
        if not found.st_mode & bits:
            return parent
    return None


def ensure_server_user(name: str) -> None:
    """Create the user that runs the server for root; ``useradd`` may not be on PATH."""
    if sys.platform == "win32":
        return
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    program = shutil.which("useradd", path=path) or "useradd"
    command = [program, "--system", "--no-create-home", name]
    for attempt in range(1, _CREATION_ATTEMPTS + 1):
        with suppress(KeyError):
            pwd.getpwnam(name)
            return
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
        except (OSError, subprocess.CalledProcessError) as error:
            reason = error.strerror if isinstance(error, OSError) else error.stderr.strip()
            # Another process may be creating the user.
            if "lock" not in str(reason) or attempt == _CREATION_ATTEMPTS:
                raise _creation_failed(name, f"{program}: {reason}") from error
            time.sleep(_CREATION_PAUSE_SECONDS)


def _creation_failed(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"PostgreSQL does not run as root, and the user {name} that runs it for root could not be "
        f"created: {reason}.",
        code=ErrorCode.BROKER_INVALID_URL,
        help_text=f"work as another user, create the user {name}, "
        "or name a server: postgresql://user@host/database",
    )
