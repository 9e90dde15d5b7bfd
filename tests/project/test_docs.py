"""The documentation matches the code: generated tables, codes, links, examples."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import prometheus_client
import pytest
import typer.main
from pydantic import BaseModel

import horsies
from horsies import FernetCodec
from horsies.cli.main import command_line
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.errors import HorsiesError
from horsies.tasks.request import TaskSendErrorCode
from horsies.worker.loop import ExitCode
from tests.support import doc_pages, generated_docs
from tests.support.code_remedies import REMEDIES
from tests.support.doc_pages import PAGES, code_of, page, rows, section
from tests.support.every_command import CONTEXTS, parsed
from tests.support.followed_pages import sessions
from tests.support.transitions import TaskVerb

URL = "postgresql://localhost/unused"
EXAMPLE_PAGES = sorted((doc_pages.REPOSITORY / "examples").rglob("*.md"))


@pytest.mark.parametrize("path", generated_docs.PAGES, ids=doc_pages.title)
def test_generated_parts_are_up_to_date(path: Path) -> None:
    text = path.read_text("utf-8")
    assert generated_docs.rewritten(text) == text, "run `make docs`"


def test_every_generated_part_is_on_a_page() -> None:
    shown = [
        name
        for path in generated_docs.PAGES
        for name in generated_docs.names_of_parts(path.read_text("utf-8"))
    ]
    assert sorted(shown) == sorted(generated_docs.PARTS)


@pytest.mark.parametrize(
    ("model", "name", "smallest", "largest"),
    [(*field, *limits) for field, limits in generated_docs.LIMITS.items()],
)
def test_the_limits_written_by_hand_are_the_real_ones(
    model: type[BaseModel], name: str, smallest: int, largest: int | None
) -> None:
    broker = PostgresConfig(database_url=URL)
    others: dict[str, object] = {"broker": broker} if model is AppConfig else {"database_url": URL}
    outside = {smallest: smallest - 1} | ({} if largest is None else {largest: largest + 1})
    for inside, beyond in outside.items():
        assert getattr(model(**others, **{name: inside}), name) == inside
        with pytest.raises(HorsiesError):
            model(**others, **{name: beyond})


def test_every_code_has_an_entry_with_the_first_step() -> None:
    listed = re.findall("^### (.+)$", page("codes.md"), re.MULTILINE)
    codes = {code.value for family in generated_docs.CODE_FAMILIES for code in family}
    assert listed == sorted(codes)
    assert set(REMEDIES) == codes


def test_every_family_of_codes_is_explained() -> None:
    explained = [re.findall(r"\[(\w+)\]", cells[0]) for cells in rows(page("codes.md"))]
    families = [family.__name__ for family in generated_docs.CODE_FAMILIES]
    assert sorted(name for names in explained for name in names) == sorted(families)


def test_the_table_of_failed_sends_has_every_code() -> None:
    explained = [
        code_of(cells[0]) for cells in rows(section(page("sending.md"), "Errors are values"))
    ]
    assert explained == [code.value for code in TaskSendErrorCode]


def test_every_command_has_its_flags_and_a_guide() -> None:
    listed = re.findall("^### horsies (.+)$", page("cli.md"), re.MULTILINE)
    assert listed == sorted(generated_docs.COMMAND_GUIDES)


TARGETS = set(
    re.findall("^([a-z-]+):", (doc_pages.REPOSITORY / "Makefile").read_text("utf-8"), re.MULTILINE)
)
# The operators between the commands of a line, of which shlex makes words.
OPERATOR = re.compile(r"[;&|<>()]+")


def commands(line: str) -> Iterator[list[str]]:
    """The commands of a line for a shell, each as its words, without comments and variables."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    for is_operator, group in groupby(words, lambda word: bool(OPERATOR.fullmatch(word))):
        if not is_operator:
            command = list(group)
            while command and re.match(r"[A-Z_]+=", command[0]):
                del command[0]
            yield command


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLE_PAGES], ids=doc_pages.title)
def test_every_shown_command_is_accepted(path: Path) -> None:
    """A command of horsies parses, and a target of make exists."""
    shown = [line for line, _ in sessions(path.read_text("utf-8"))]
    for program, *words in (one for line in shown for one in commands(line) if one):
        if program == "horsies" and not words[0].startswith("-"):
            parsed(words)
        elif program == "horsies":
            assert words[0] in options(typer.main.get_command(command_line(completes=True)))
        elif program == "make":
            assert {word for word in words if re.match("[a-z]", word)} <= TARGETS


def options(command: Any) -> set[str]:
    return {name for param in command.params for name in param.opts}


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLE_PAGES], ids=doc_pages.title)
def test_every_command_in_a_sentence_exists_with_its_options(path: Path) -> None:
    spans = re.findall(r"`(horsies [a-z][^`]*)`", path.read_text("utf-8"))
    for words in map(str.split, spans):
        command = max(
            (name for name in CONTEXTS if words[: len(name.split())] == name.split()), key=len
        )
        assert command != "horsies", words
        flags = {flag for word in words for flag in re.findall(r"^--[a-z-]+", word)}
        assert flags <= options(CONTEXTS[command].command), words


def test_flags_are_listed_in_the_reference_only() -> None:
    """A table of flags that is copied into a guide is soon out of date."""
    copies = [
        doc_pages.title(path)
        for path in PAGES
        if path.name != "cli.md" and "| Flag | Default |" in path.read_text("utf-8")
    ]
    assert copies == []


def test_every_exit_code_of_a_worker_is_explained() -> None:
    numbers = [
        int(cells[0])
        for cells in rows(section(page("stopping.md"), "Stopping"))
        if cells[0].isdigit()
    ]
    assert set(numbers) == {code.value for code in ExitCode} | {2}


def test_every_verb_has_its_statement_and_its_doer() -> None:
    verbs = [
        code_of(cells[0])
        for cells in rows(section(page("internals/state-machine.md"), "Who does it"))
    ]
    assert verbs == list(get_args(TaskVerb))


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLE_PAGES], ids=doc_pages.title)
def test_links_lead_somewhere(path: Path) -> None:
    broken = [
        link.target
        for link in doc_pages.links(path.read_text("utf-8"))
        if not link.target.startswith("https://") and not _resolves(path, link.target)
    ]
    assert broken == []


def _resolves(path: Path, target: str) -> bool:
    file_name, _, anchor = target.partition("#")
    found = path.parent / file_name if file_name else path
    return found.exists() and (not anchor or anchor in doc_pages.anchors(found.read_text("utf-8")))


@pytest.mark.parametrize("path", PAGES, ids=doc_pages.title)
def test_a_name_that_links_into_the_code_is_found_there(path: Path) -> None:
    missing = [
        link.text
        for link in doc_pages.links(path.read_text("utf-8"))
        if link.is_code
        and link.text.isidentifier()
        and not link.target.startswith("#")
        and not _names(path.parent / link.target.partition("#")[0], link.text)
    ]
    assert missing == []


def _names(path: Path, word: str) -> bool:
    definition = (
        rf"(?:def|class|FUNCTION|name:) {word}\b"
        if path.suffix in (".py", ".sql")
        else rf"\b{word}\b"
    )
    return re.search(definition, path.read_text("utf-8")) is not None


@pytest.mark.parametrize("path", PAGES, ids=doc_pages.title)
def test_python_blocks_compile_and_use_public_names(path: Path) -> None:
    for block in doc_pages.blocks(path.read_text("utf-8")):
        if block.is_python:
            text = _in_a_coroutine(block.text) if block.mark else block.text
            tree = ast.parse(text, doc_pages.title(path))
            assert _imported_from_horsies(tree) <= set(horsies.__all__)


def _imported_from_horsies(tree: ast.Module) -> set[str]:
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "horsies"
        for alias in node.names
    }


def _in_a_coroutine(text: str) -> str:
    indented = "".join(f"    {line}\n" for line in text.splitlines())
    return f"async def example():\n{indented}"


# Pages whose blocks share one application, named `app`.
WITH_AN_APPLICATION = (
    *("sending.md", "results.md", "retries.md", "configuration.md", "scheduling.md"),
    "schedules-at-run-time.md",
    *("monitoring-from-python.md", "inside-a-task.md", "tracing.md", "dashboard-access.md"),
    *("hooks.md", "child-processes.md", "webhooks.md", "developing.md", "explain.md"),
    *("encryption.md", "large-payload.md"),
    "coming-from-celery.md",
    *("workflows.md", "workflows-steering.md"),
    *("index.md", "transactions.md", "idempotency.md", "time-limits.md", "queues.md"),
    "keys.md",
    *("coming-from-dramatiq.md", "coming-from-rq.md", "coming-from-arq.md"),
    *("coming-from-procrastinate.md", "coming-from-horsies-0-5.md"),
)


def _can_run(path: Path) -> bool:
    """Whether a page has blocks to run here; one with files is run by a test of its own."""
    blocks = doc_pages.blocks(path.read_text("utf-8"))
    if path.name in ("README.md", "cookbook.md"):
        return False
    return any(block.is_run for block in blocks) and not any(block.file_name for block in blocks)


OTHERS_WITH_BLOCKS = [
    name
    for path in PAGES
    if _can_run(path)
    and (name := doc_pages.title(path).removeprefix("docs/")) not in WITH_AN_APPLICATION
]


@pytest.mark.parametrize("name", WITH_AN_APPLICATION)
def test_the_examples_of_a_page_run_in_order(
    name: str, process_url: str, connection: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORSIES_DATABASE_URL", process_url)
    monkeypatch.setenv("PAYLOAD_KEYS", FernetCodec.new_key())
    doc_pages.run_page(name)["app"].close()


@pytest.mark.parametrize("name", OTHERS_WITH_BLOCKS)
def test_the_other_examples_run_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    doc_pages.execute(name)


def test_the_filter_for_alembic_leaves_out_the_tables_of_horsies_alone() -> None:
    include_object = doc_pages.execute("deployment.md")["include_object"]
    assert not include_object(None, "horsies_tasks", "table", True, None)
    assert include_object(None, "orders", "table", True, None)


def test_the_dump_without_tasks_keeps_the_record_of_migrations() -> None:
    (pattern,) = re.findall(r"--exclude-table-data '\*\.(\S+)'", page("deployment.md"))
    left_out = re.compile(pattern.replace("*", ".*"))
    assert left_out.fullmatch("horsies_tasks")
    assert not left_out.fullmatch("horsies_migrations")


def test_the_table_of_bad_input_quotes_what_is_really_said(
    process_url: str, connection: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORSIES_DATABASE_URL", process_url)
    namespace = doc_pages.run_page("sending.md")
    table = list(rows(section(page("sending.md"), "What can be sent")))
    assert len(table) > 10
    for call, message in table:
        refused = eval(code_of(call), namespace)
        assert refused.unwrap_err().message == message
    namespace["app"].close()


def test_the_project_does_not_talk_about_how_it_was_made() -> None:
    words = re.compile(r"\b(issue \d|R-[A-Z]+-\d|DESIGN\.md|/work/|session \d)")
    assert [doc_pages.title(one) for one in PAGES if words.search(one.read_text("utf-8"))] == []
