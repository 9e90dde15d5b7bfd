"""The copy of the server's programs: made once, complete, and out of reach of other users."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from horsies.db import server_programs
from horsies.db.server_programs import usable_programs
from horsies.errors import ConfigurationError

WEEK_SECONDS = 7 * 24 * 3600
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory away")


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="horsies-programs-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def homes(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found = [place / "first", place / "second"]
    monkeypatch.setattr(server_programs, "_homes", lambda: found)
    return found


@pytest.fixture
def installed(place: Path) -> Path:
    """An installation at a path that the shells of PostgreSQL's programs do not take."""
    programs = place / "$HOME" / "server" / "pginstall18" / "bin"
    for name, text in {
        "bin/postgres": "#!/bin/sh\necho 18\n",
        "share/zones": "CET",
        "lib/x.a": "",
    }.items():
        path = programs.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (programs / "postgres").chmod(0o700)
    return programs


def copies(home: Path) -> set[str]:
    return {path.name for path in home.iterdir()} - {".lock"}


def test_a_copy_is_readable_for_all_and_writable_for_nobody_else(
    installed: Path, homes: list[Path]
) -> None:
    copied = usable_programs(installed)
    assert copied.parents[2].parent == homes[0]
    assert subprocess.check_output([copied / "postgres"]) == b"18\n"
    assert stat.S_IMODE((copied / "postgres").stat().st_mode) == 0o755
    assert stat.S_IMODE((copied.parent / "share" / "zones").stat().st_mode) == 0o644
    assert not (copied.parent / "lib").exists(), "nothing there is for the server"
    assert stat.S_IMODE((installed / "postgres").stat().st_mode) == 0o700
    before = copied.parents[2].stat().st_ino
    usable_programs.cache_clear()
    assert usable_programs(installed) == copied
    assert copied.parents[2].stat().st_ino == before


def test_processes_that_start_at_once_share_one_copy(installed: Path, homes: list[Path]) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(usable_programs.__wrapped__, [installed] * 8))
    assert len(found) == 1
    assert len(copies(homes[0])) == 1


def test_remains_of_a_killed_process_are_replaced(installed: Path, homes: list[Path]) -> None:
    copied = usable_programs(installed)
    (copied / "postgres").unlink()
    (homes[0] / ".partial-of-a-killed-process").mkdir()
    usable_programs.cache_clear()
    assert usable_programs(installed) == copied
    assert (copied / "postgres").exists()
    assert copies(homes[0]) == {copied.parents[2].name}


def test_another_version_is_copied_beside_and_one_without_use_is_deleted(
    installed: Path, homes: list[Path]
) -> None:
    first = usable_programs(installed).parents[2]
    (installed / "postgres").write_text("#!/bin/sh\necho 19\n")
    usable_programs.cache_clear()
    second = usable_programs(installed).parents[2]
    assert copies(homes[0]) == {first.name, second.name}
    old = first.stat().st_mtime - WEEK_SECONDS - 60
    os.utime(first, (old, old))
    os.utime(second, (old, old))
    (installed / "postgres").write_text("#!/bin/sh\necho 20\n")
    usable_programs.cache_clear()
    program = shutil.copy2(shutil.which("sleep") or "", second / "sleep")
    with subprocess.Popen([program, "60"]) as running:
        third = usable_programs(installed).parents[2]
        running.kill()
    assert copies(homes[0]) == {second.name, third.name}


@needs_root
@pytest.mark.parametrize("fault", ["owner", "writable", "link", "closed"])
def test_a_place_that_others_can_change_or_the_server_cannot_enter_is_not_used(
    installed: Path, homes: list[Path], fault: str
) -> None:
    first, second = homes
    if fault == "link":
        (first.parent / "elsewhere").mkdir()
        first.symlink_to(first.parent / "elsewhere")
    else:
        first.mkdir()
        first.chmod({"writable": 0o1777, "closed": 0o700}.get(fault, 0o755))
    if fault == "owner":
        os.chown(first, 65534, 65534)
    assert usable_programs(installed).parents[2].parent == second
    assert list(first.iterdir()) == []


def test_programs_that_change_meanwhile_are_not_kept(
    installed: Path, homes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes() + b"more")

    monkeypatch.setattr(shutil, "copyfile", change)
    with pytest.raises(ConfigurationError, match="changed while they were copied"):
        usable_programs(installed)
    assert [copies(home) for home in homes] == [set(), set()]


def test_where_no_copy_can_be_kept_the_sentence_names_the_places(
    installed: Path, homes: list[Path]
) -> None:
    for home in homes:
        home.touch()
    with pytest.raises(ConfigurationError) as refused:
        usable_programs(installed)
    assert all(str(home) in refused.value.message for home in homes)
    assert refused.value.help_text is not None


@needs_root
def test_a_link_that_appears_during_the_creation_of_a_home_is_not_followed(place: Path) -> None:
    private, link = place / "private", place / "home"
    private.mkdir(mode=0o700)
    link.symlink_to(private)
    server_programs._make_directory(link)
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
