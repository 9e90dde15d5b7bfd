"""A built documentation site in Chromium, for a reader who answers questions from it page by page.

A reader, a person or a program, sees one screen at a time and uses what a browser offers: the site's own
search, its links, its menu, scrolling, and finding words on the page. NOTES is a directory; `log.jsonl` in it
gets a line per step. Each question begins on the home page.

    python -m tests.support.reader NOTES start SITE      serve the built site and open Chromium on it
    python -m tests.support.reader NOTES question 1      begin a question; its clock starts
    python -m tests.support.reader NOTES search WORDS    the site's own search; lists its hits
    python -m tests.support.reader NOTES links           list the links on the screen
    python -m tests.support.reader NOTES menu            list the site's menu
    python -m tests.support.reader NOTES contents        list the headings of the page
    python -m tests.support.reader NOTES follow 3        click number 3 of the last list
    python -m tests.support.reader NOTES more            one screen further down; `up` is one screen back
    python -m tests.support.reader NOTES find WORDS      go to the next place of these words on the page
    python -m tests.support.reader NOTES back            the page before
    python -m tests.support.reader NOTES answer TEXT     end the question with this answer
    python -m tests.support.reader NOTES report          a line per question: pages, steps, seconds
    python -m tests.support.reader NOTES stop            close Chromium and the server
"""

from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing.connection import Client
from pathlib import Path

from tests.support.wait import wait_until


def report(log: Path) -> str:
    """Return the effort for each question: pages opened after the home page, searches, steps, seconds."""
    steps = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    lines = ["question | pages | searches | steps | seconds | answer"]
    for end in [one for one in steps if one["step"] == "answer"]:
        own = [one for one in steps if one["question"] == end["question"]]
        pages = dict.fromkeys(one["page"] for one in own if one["page"] != "index.html")
        searches = sum(one["step"] == "search" for one in own)
        figures = (end["question"], len(pages), searches, len(own) - 2, f"{end['seconds']:.0f}")
        lines.append(" | ".join([*map(str, figures), end["words"]]))
    return "\n".join(lines)


def start(notes: Path, site: str) -> subprocess.Popen[bytes]:
    """Start the server of a reader, and wait until it accepts steps; it ends with `stop`."""
    notes.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (notes / "errors").open("w") as errors:
        command = [sys.executable, "-m", "tests.support.reader_tab", str(notes), site]
        process = subprocess.Popen(command, stderr=errors, start_new_session=True)
    wait_until(lambda: (notes / "socket").exists() or process.poll() is not None, 60, "Chromium")
    assert process.poll() is None, (notes / "errors").read_text()
    return process


def step(notes: Path, command: str, words: str) -> str:
    """Send one step to the server of a reader and return the resulting screen."""
    with Client(str(notes / "socket"), "AF_UNIX") as connection:
        connection.send((command, words))
        shown: str = connection.recv()
    return shown


def main(arguments: list[str]) -> None:
    """Take one step, start the server, or report from the notes."""
    if len(arguments) < 2:
        print(__doc__)
        return
    notes, command, words = Path(arguments[0]), arguments[1], " ".join(arguments[2:])
    if command == "start":
        process = start(notes, words)
        print(f"Process {process.pid} serves {words}. Begin with: question 1")
    elif command == "report":
        print(report(notes / "log.jsonl"))
    else:
        print(step(notes, command, words))


if __name__ == "__main__":
    main(sys.argv[1:])
