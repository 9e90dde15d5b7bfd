"""The user of root's server: processes that start at the same time create it once."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from horsies.db import server_user
from horsies.db.server_user import ensure_server_user, find_closed_parent, switch_options
from horsies.errors import ConfigurationError

# Like useradd while another one is at work: it fails until it has been called often enough.
LOCKED = """#!/bin/sh
echo call >> "{calls}"
if [ "$(wc -l < "{calls}")" -lt {needed} ]; then
    echo "useradd: cannot lock /etc/passwd; try again later." >&2
    exit 1
fi
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a useradd that replaces the real one; the user exists after the third."""
    found = tmp_path / "calls"
    found.touch()

    def find(name: str) -> str:
        if len(found.read_text().split()) < 3:
            raise KeyError(name)
        return name

    monkeypatch.setattr(pwd, "getpwnam", find)
    monkeypatch.setattr(server_user, "_CREATION_PAUSE_SECONDS", 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return found


def replace_useradd(calls: Path, needed: int) -> None:
    program = calls.with_name("useradd")
    program.write_text(LOCKED.format(calls=calls, needed=needed))
    program.chmod(0o755)


def test_a_locked_list_of_users_is_waited_for(calls: Path) -> None:
    replace_useradd(calls, 3)
    ensure_server_user("somebody")
    assert len(calls.read_text().split()) == 3


def test_a_lock_that_stays_is_reported(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_useradd(calls, 99)
    monkeypatch.setattr(server_user, "_CREATION_ATTEMPTS", 2)
    with pytest.raises(ConfigurationError, match="cannot lock /etc/passwd"):
        ensure_server_user("somebody")
    assert len(calls.read_text().split()) == 2


def test_the_server_gets_neither_secrets_of_root_nor_variables_of_libpq(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HORSIES_DATABASE_URL", "postgresql://app:hunter2@db/shop")
    monkeypatch.setenv("PGPORT", "6000")
    monkeypatch.setenv("LC_TIME", "C")
    own, others = switch_options(None), switch_options("root")
    assert "PGPORT" not in own["env"]
    assert "HORSIES_DATABASE_URL" in own["env"]
    assert others["env"].keys().isdisjoint({"PGPORT", "HORSIES_DATABASE_URL"})
    assert others["env"]["LC_TIME"] == "C"
    assert others["extra_groups"] == []


def test_only_directories_above_a_path_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_user, "is_root", lambda: True)
    monkeypatch.setattr(
        server_user, "SERVER_USER", "root" if tmp_path.owner() != "root" else "nobody"
    )
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    assert find_closed_parent(closed / "x") == closed
    assert find_closed_parent(Path("/usr/bin")) is None
