"""The embedded PostgreSQL's programs, in a directory where the server's user can run them.

If root starts the server, it runs as another user, which often cannot enter root's virtual environment,
because home directories are closed to other users. So the programs, which contain no secrets, are copied to a
directory that belongs to root and is named after the digest of its contents. Other users cannot write there,
and the mode of existing directories is not changed.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from horsies.db.server_user import find_closed_parent, is_root, switch_options
from horsies.errors import ConfigurationError, ErrorCode

if sys.platform != "win32":
    import fcntl

ROOT_HOME = Path("/var/lib/horsies")
# The package's own limit of 10 seconds is too short for a busy machine.
_TIMEOUT_SECONDS = 60
# initdb and pg_ctl put the paths of programs between double quotes, for a shell.
_NOT_FOR_SHELLS = re.compile(r'["$`\\\n]')
_PARTIAL_PREFIX = ".partial-"
_UNUSED_SECONDS = 7 * 24 * 3600
# The names of the files relative to their directory, and the files themselves.
Files = Mapping[str, Path]


def run_program(
    name: str,
    arguments: Sequence[str],
    bin_path: Path,
    *,
    user: str | None = None,
    variables: Mapping[str, str] | None = None,
    **_: Any,
) -> str:
    """Run one of the server's programs as the server's user, shielded from Ctrl-C, and return its output."""
    command = [str(bin_path / name), *arguments]
    options = switch_options(user)
    options["env"] |= variables or {}
    try:
        return _run(command, options)
    except subprocess.CalledProcessError as error:
        if "invalid locale settings" not in error.output:
            raise
        # The environment names a locale that this machine lacks, for example after ssh from another machine.
        options["env"] |= {"LC_ALL": "C"}
        return _run(command, options)


def _run(command: Sequence[str], options: Mapping[str, Any]) -> str:
    # The output does not go to a pipe, because a server that pg_ctl started would keep the pipe open. The
    # working directory is not used, because the server's user may not be able to enter it.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(  # noqa: S603
            command,
            cwd="/",
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=_TIMEOUT_SECONDS,
            start_new_session=True,
            **options,
        )
        output.seek(0)
        text = output.read().decode(errors="replace")
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, text)
    return text


@cache
def usable_programs(installed: Path) -> Path:
    """Return a directory with these programs for the server's user: the directory where they are
    installed, or a copy.
    """
    files = _program_files(installed)
    if _is_usable(installed, files):
        return installed
    name = f"{installed.parent.name}-{_digest(files)}"
    failures = []
    for home in _homes():
        try:
            return _copy(files, home, name) / installed.relative_to(_base(installed))
        except OSError as error:
            failures.append(f"{home}: {error.strerror or error}")
    raise ConfigurationError(
        f"The user of the embedded PostgreSQL cannot run its programs in {installed}, and they could not be "
        f"copied ({'; '.join(failures)}).",
        code=ErrorCode.BROKER_INIT_FAILED,
        help_text="make room in one of these directories, work as another user, "
        "or name a server: postgresql://user@host/database",
    )


def _base(installed: Path) -> Path:
    """Return the directory that contains the package and its libraries, which the programs find by
    relative paths.
    """
    return installed.parents[2]


def _program_files(installed: Path) -> Files:
    base, package = _base(installed), installed.parents[1]
    sources = [installed.parent / name for name in ("bin", "lib", "share")]
    sources += [package / ".dylibs", base / f"{package.name}.libs"]
    found = (
        Path(directory, name)
        for source in sources
        for directory, _, names in os.walk(source)
        for name in names
        if not name.endswith(".a")  # static libraries are only for compilers
    )
    return {str(path.relative_to(base)): path for path in sorted(found)}


def _is_usable(installed: Path, files: Files) -> bool:
    if _NOT_FOR_SHELLS.search(str(installed)):
        return False
    if not is_root():
        return True
    if find_closed_parent(installed) is not None:
        return False
    directories = {path.parent for path in files.values()}
    return all(_is_readable(path) for path in (*directories, *files.values()))


def _is_readable(path: Path) -> bool:
    """Return whether every user may read this file and, if its owner may run it, run it too."""
    mode = path.stat().st_mode
    wanted = stat.S_IROTH | (stat.S_IXOTH if mode & stat.S_IXUSR else 0)
    return mode & wanted == wanted


def _digest(files: Files) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for name, path in files.items():
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0{_copied_mode(path)}\0".encode("utf-8", "replace"))
        digest.update(content)
    return digest.hexdigest()


def _copied_mode(path: Path) -> int:
    return 0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644


def _homes() -> list[Path]:
    """Return the directories in which copies may be kept, the preferred directory first."""
    if is_root():
        first = ROOT_HOME
    else:
        cache_home = os.environ.get("XDG_CACHE_HOME", "")
        parent = cache_home if os.path.isabs(cache_home) else os.path.expanduser("~/.cache")
        first = Path(parent) / "horsies"
    user = 0 if sys.platform == "win32" else os.geteuid()
    last = [Path(place) / f"horsies-programs-{user}" for place in ("/var/tmp", "/tmp")]  # noqa: S108
    return [first / "programs", *last]


def _copy(files: Files, home: Path, name: str) -> Path:
    """Return the copy with this name. The first process that needs the copy creates it."""
    _make_home(home)
    copy = home / name
    if not _is_complete(copy, files):
        with _lock(home):
            _remove_remains(home)
            if not _is_complete(copy, files):
                _write(files, home, copy)
    os.utime(copy)  # mark the copy as in use
    return copy


def _make_home(home: Path) -> None:
    """Create the directory. Reject a directory that another user could write to, or where programs cannot
    run.
    """
    for directory in (*reversed(home.parents), home):
        if not directory.exists():
            _make_directory(directory)
    for directory in (home, *home.resolve().parents):
        if directory.is_symlink() or not _is_private(directory, is_last=directory == home):
            raise PermissionError(f"other users could write to {directory}")
    if (closed := find_closed_parent(home / "copy")) is not None:
        raise PermissionError(f"{closed} is closed to the server's user")
    if _NOT_FOR_SHELLS.search(str(home)):
        raise OSError("its name has a character that PostgreSQL's programs do not quote")
    if sys.platform != "win32" and os.statvfs(home).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OSError("programs cannot run there")


def _make_directory(directory: Path) -> None:
    """Create a directory that the server's user can enter. An existing directory is not changed, because
    it may be another user's link.
    """
    try:
        directory.mkdir()
    except FileExistsError:
        return
    if is_root():
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(descriptor, 0o711)
        finally:
            os.close(descriptor)


def _is_private(directory: Path, *, is_last: bool) -> bool:
    """Return whether only this user and root can replace the contents of this directory."""
    found = directory.stat()
    owners = {0} if sys.platform == "win32" else {0, os.geteuid()}
    is_closed = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid in owners and (
        is_closed or (not is_last and bool(found.st_mode & stat.S_ISVTX))
    )


@contextmanager
def _lock(home: Path) -> Iterator[None]:
    # The lock is not on the directory itself, because any user could open the directory and keep it locked.
    descriptor = os.open(home / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_complete(copy: Path, files: Files) -> bool:
    """Return whether all files exist; some may have been lost in a crash of the machine or a clean-up of
    /tmp.
    """
    try:
        return all(
            (copy / name).stat().st_size == path.stat().st_size for name, path in files.items()
        )
    except OSError:
        return False


def _write(files: Files, home: Path, copy: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL_PREFIX, dir=home))
    try:
        for name, path in files.items():
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            target.chmod(_copied_mode(path))
        for directory, _, _ in os.walk(partial):
            Path(directory).chmod(0o755)
        if not copy.name.endswith(_digest({name: partial / name for name in files})):
            raise OSError("the programs changed while they were copied")
        if copy.exists():  # the copy is incomplete
            copy.rename(partial / "replaced")
        partial.rename(copy)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(copy / "replaced", ignore_errors=True)


def _remove_remains(home: Path) -> None:
    """Delete unfinished copies left by killed processes, and copies that have not been used for a week."""
    for entry in home.iterdir():
        if entry.name.startswith(_PARTIAL_PREFIX) or (
            entry.is_dir()
            and time.time() - entry.stat().st_mtime > _UNUSED_SECONDS
            and not _is_running_from(entry)
        ):
            shutil.rmtree(entry, ignore_errors=True)


def _is_running_from(copy: Path) -> bool:
    programs = glob.glob("/proc/[0-9]*/exe")
    for program in programs:
        with suppress(OSError):
            if os.readlink(program).startswith(f"{copy}/"):
                return True
    return not programs  # macOS has no /proc
