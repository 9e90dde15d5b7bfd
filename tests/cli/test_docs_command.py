"""`horsies docs`: topics, pages, typos, folders, and the pager of a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tools.site.pages import OUTSIDE

from horsies.cli import docs as command
from horsies.cli.docs import docs
from horsies.findings import CATALOGUE
from horsies.monitor.diagnose.doctor import CHECKS
from tests.support import site_map
from tests.support.generated_docs import CODE_FAMILIES

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
    listed = [line.split(maxsplit=1) for line in lines if line.startswith("  ")]
    pages = {page.relative_to(PAGES).with_suffix("").as_posix() for page in PAGES.rglob("*.md")}
    assert {topic for topic, _ in listed} == pages
    assert ["coming-from-celery", "Coming from Celery"] in listed


def test_the_topics_stand_below_the_headings_of_the_site(
    capsys: pytest.CaptureFixture[str],
) -> None:
    docs()
    parts = capsys.readouterr().out.split("\n\n")[1:]
    shown = {
        part.splitlines()[0]: [line.split()[0] for line in part.splitlines()[1:]] for part in parts
    }
    inside = [entry for entry in site_map.entries() if entry.name not in OUTSIDE]
    expected: dict[str, list[str]] = {}
    for entry in inside:
        expected.setdefault(entry.tab, []).append(entry.name.removesuffix(".md"))
    assert shown == expected


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


def printed(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    docs(code)
    text = capsys.readouterr().out
    assert text.startswith(f"{code.upper()}\n")
    assert "###" not in text
    return text


def test_every_code_prints_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    codes = [str(code.value) for family in CODE_FAMILIES for code in family]
    for code in (*codes, "worker_crashed"):
        assert "**Remedy:**" in printed(code, capsys)


def test_every_reason_and_every_check_prints_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    for code in CATALOGUE:
        assert "`horsies explain`, " in printed(code, capsys)
    for check in CHECKS:
        assert "`horsies doctor` checks: " in printed(check.id.upper().replace("-", "_"), capsys)


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


def test_every_code_of_durable_functions_has_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    page = (PAGES / "durable-functions.md").read_text("utf-8")
    sources = [
        one.read_text("utf-8")
        for one in (Path(command.__file__).parents[1] / "durable").glob("*.py")
    ]
    raised = {code for text in sources for code in re.findall(r"\w+Code\.([A-Z_]{5,})", text)}
    shown = set(re.findall(r'[`"]([A-Z]+_[A-Z_]+)[`"]', page))
    assert {"DURABLE_MISMATCH", "STEP_TIMEOUT", "STEP_NOT_FOUND"} <= raised
    own = {"CARD_REFUSED", "NOT_CHARGED"}  # of the examples
    for code in sorted((raised | shown) - own - {"CLEANUP_FAILED"}):
        docs(code)
        assert capsys.readouterr().out.startswith(code)
