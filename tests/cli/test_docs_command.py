"""`horsies docs`: topics, pages, typos, folders, and the pager of a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from horsies.cli import docs as command
from horsies.cli.docs import docs

PAGES = Path(__file__).parents[2] / "docs"


def _refusal(topic: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(typer.Exit) as raised:
        docs(topic)
    assert raised.value.exit_code == 4
    return capsys.readouterr().err


def test_without_a_topic_all_pages_are_listed_with_their_titles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    docs()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Read a page with: horsies docs TOPIC"
    topics = [line.split()[0] for line in lines[2:]]
    pages = {page.relative_to(PAGES).with_suffix("").as_posix() for page in PAGES.rglob("*.md")}
    assert set(topics) == pages
    assert topics[0] == "index"
    assert all(len(line.split()) > 1 for line in lines[2:])


def test_a_page_is_printed_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    docs("index")
    assert capsys.readouterr().out == (PAGES / "index.md").read_text("utf-8")


def test_a_page_in_a_folder_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "DIRECTORIES", (tmp_path / "missing", tmp_path))
    for name in ("index", "guides/sending", "guides/index", "reference/states", "guides/states"):
        page = tmp_path / f"{name}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"# About {name}\n")
    docs("sending")
    docs("Guides/Sending.md")
    docs("index")
    docs()
    *pages, _ = capsys.readouterr().out.split("Read a page")
    assert pages == ["# About guides/sending\n" * 2 + "# About index\n"]
    assert _refusal("states", capsys) == (
        "error: There are several topics 'states'; write guides/states or reference/states.\n"
    )
    assert _refusal("sendign", capsys) == (
        "error: There is no topic 'sendign'; did you mean guides/sending?\n"
    )
    assert _refusal("zzz", capsys) == (
        "error: There is no topic 'zzz'; list all with: horsies docs\n"
    )


@pytest.mark.parametrize("code", ["WORKER_CRASHED", "HRS-203", "BROKER_ERROR"])
def test_a_code_prints_its_entry(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    docs(code)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{code}\n")
    assert printed.count("**What to do:**") == 1
    assert "###" not in printed


def test_a_terminal_gets_the_pager() -> None:
    ours, theirs = pty.openpty()  # the pager shows one line: more than 4 kB would wait for a reader
    try:
        shown = subprocess.run(
            [sys.executable, "-m", "horsies", "docs", "index"],
            env={**os.environ, "PAGER": "sed 's/^/paged:/;q'", "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            timeout=60,
            check=True,
        )
        assert not shown.stderr
        assert os.read(ours, 9) == b"paged:# H"
    finally:
        os.close(ours)
        os.close(theirs)
