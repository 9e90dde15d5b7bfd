"""Every code block of the documentation runs: on its page, in a setting, or as a part of an example."""

from __future__ import annotations

import builtins
import json
import re
import symtable
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from horsies import (
    ConfigurationError,
    FernetCodec,
    Horsies,
    RetryLater,
    TaskFailed,
    TaskResult,
    WorkflowContext,
)
from horsies.testing import clock_of, run_pending
from tests.support import doc_pages
from tests.support.api_setting import Names, everything_runs, examples, run_example, setting
from tests.support.commands import EXAMPLES
from tests.support.doc_pages import MARKS, PAGES, REPOSITORY, Block, blocks, page
from tests.support.snippet_settings import SETTINGS, orders_table

GUIDES = [path for path in PAGES if path.parent.name != "api"]
CODE = ("python", "sql")


def code_blocks(path: Path, mark: str) -> list[Block]:
    found = blocks(path.read_text("utf-8"))
    return [one for one in found if one.language.partition(" ")[0] in CODE and one.mark == mark]


def test_every_mark_says_how_its_block_is_run() -> None:
    every = [one for path in PAGES for one in blocks(path.read_text("utf-8"))]
    marks = {one.mark for one in every if one.language.partition(" ")[0] in CODE}
    assert marks == {"", *MARKS}
    other = {path.name for path in GUIDES if code_blocks(path, "other-system")}
    assert {name.rpartition("-from-")[0] for name in other} == {"coming"}


def test_a_block_that_is_run_as_a_file_is_one_of_a_page_that_tests_follow() -> None:
    found = {path.name: code_blocks(path, "as-file") for path in GUIDES}
    marked = {name: [one.file_name for one in some] for name, some in found.items() if some}
    # tests/web/test_mounting.py and tests/project/test_sending_from_sql.py make and run them.
    assert marked == {"dashboard-access.md": ["asgi.py"], "sending-from-sql.md": ["tasks.py"]}


def test_sql_without_a_mark_is_on_pages_that_tests_run_as_a_whole() -> None:
    pages = {path.name: code_blocks(path, "") for path in GUIDES}
    found = {name for name, some in pages.items() if any(one.language == "sql" for one in some)}
    # tests/project/test_schema_docs.py, tests/e2e/test_roles.py, tests/project/test_sending_from_sql.py
    assert found == {"schema.md", "security.md", "sending-from-sql.md"}


def test_every_page_with_marked_blocks_has_a_setting() -> None:
    marked = {doc_pages.title(path) for path in GUIDES if code_blocks(path, "with-setting")}
    assert marked == {f"docs/{name}" for name in SETTINGS}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_blocks_of_a_page_run_in_their_setting(
    name: str,
    process_url: str,
    connection: object,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HORSIES_DATABASE_URL", process_url)
    monkeypatch.chdir(REPOSITORY)  # and back to it, wherever the setting goes
    found = code_blocks(REPOSITORY / "docs" / name, "with-setting")
    SETTINGS[name]([block.text for block in found], process_url, tmp_path)


# What a page may leave out of the file that it quotes.
_LEFT_OUT = re.compile(r"\s|# type: ignore\[[^\]]*\]|if __name__ == \"__main__\":")


@pytest.mark.parametrize("name", ["README.md", "fastapi.md", "django.md"])
def test_a_quoted_block_is_part_of_an_example_that_tests_run(name: str) -> None:
    files = [*EXAMPLES.rglob("*.py"), REPOSITORY / "src" / "horsies" / "django" / "__init__.py"]
    contents = [_LEFT_OUT.sub("", path.read_text("utf-8")) for path in files]
    shown = [block.text for block in blocks(page(name)) if block.mark == "quoted"]
    assert shown
    missing = [
        text for text in shown if not any(_LEFT_OUT.sub("", text) in one for one in contents)
    ]
    assert missing == []


def test_only_pages_of_examples_quote() -> None:
    quoting = {path.name for path in GUIDES if code_blocks(path, "quoted")}
    assert quoting == {"README.md", "fastapi.md", "django.md"}


# Examples that end with an exception, which is what they show.
RAISED = {
    "durable-functions: StepFailed": TaskFailed,
    "inside-a-task: RetryLater": RetryLater,
    "tasks: TaskFailed": TaskFailed,
    "values-and-mistakes: HorsiesError": ConfigurationError,
}
# Examples that wait for a result, and need a worker.
WITH_A_WORKER = {
    "tasks: TaskFunction",
    "tasks: TaskHandle",
    "values-and-mistakes: Ok",
    "workflow-runs: WorkflowHandle",
}


def value_of(names: Names, task: str, *args: Any) -> Any:
    """Run a task of the example and return its value."""
    sent = names[task].enqueue(*args)
    run_pending(names["app"])
    return sent.result(timeout_ms=0)


def end_of_durable(names: Names) -> Any:
    """Run the durable function of the example to its end, over its sleep of three days."""
    sent = names["onboard"].enqueue(7)
    run_pending(names["app"])
    clock_of(names["app"]).advance(timedelta(days=3))
    run_pending(names["app"])
    return sent.result(timeout_ms=0)


def stored_and_deleted(store: Any) -> bool:
    store.put("one", b"data")
    kept = store.get("one")
    store.delete(["one"])
    return (kept, store.get("one")) == (b"data", None)


def reported_total(names: Names) -> str:
    results: Names = {names["total_node"].node_id: TaskResult(ok=3)}
    return str(names["report"](WorkflowContext("run", 0, "report", results=results)))


CHECKS: dict[str, Callable[[Names], object]] = {
    "application: Horsies": lambda names: names["add"](1, 2) == 3,
    "configuration: PayloadCodec": lambda names: (
        names["Reversed"]().decode("r1", names["Reversed"]().encode(b"abc")) == b"abc"
    ),
    "configuration: PayloadStore": lambda names: stored_and_deleted(names["Files"]()),
    "dashboard: create_app": lambda names: names["api"].routes[-1].path == "/ops/horsies",
    "durable-functions: Durable": lambda names: end_of_durable(names) == "account-7",
    "durable-functions: AsyncDurable": lambda names: end_of_durable(names) == "account-7",
    "durable-functions: DurableHandle": lambda names: run_pending(names["app"]).completed == 1,
    "inside-a-task: current_batch": lambda names: (
        value_of(names, "insert_rows", names["Row"](number=1)) is None
    ),
    "inside-a-task: current_task": lambda names: value_of(names, "import_orders", "a") is None,
    "inside-a-task: TaskTransaction": lambda names: value_of(names, "book_payment", 7) == 40,
    "inside-a-task: AsyncTaskTransaction": lambda names: value_of(names, "book_payment", 7) is None,
    "outcomes: TaskResult": lambda names: value_of(names, "add", 1, 2) == 3,
    "outcomes: TaskError": lambda names: names["returned"].is_err(),
    "sending: Batch": lambda names: value_of(names, "insert_rows", names["Row"](number=1)) is None,
    "sending: Debounce": lambda names: len(names["app"].tasks_where().unwrap().rows) == 1,
    "testing: capture_sends": lambda names: not names["app"].tasks_where().unwrap().rows,
    "testing: check_replay": lambda names: names["test_old_runs_fit_the_code"]() is None,
    "workflow-runs: start_many": lambda names: len(names["handles"]) == 2,
    "workflow-runs: WorkflowHandle": lambda names: names["result"].ok_value == "2026-01-01",
    "workflows: WorkflowContext": lambda names: reported_total(names) == "3 orders",
}


def prepare_record(names: Names, directory: Path) -> None:
    """Export the record of a run that waits for its signal, and name the run `task_id`."""
    sent = names["onboard"].enqueue(7)
    run_pending(names["app"])
    names["task_id"] = sent.task_id
    record = names["app"].durable_handle(sent.task_id).export().unwrap()
    for folder in (directory / "records", directory / "tests" / "records"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "onboard.json").write_text(json.dumps(record))


def prepare_step(names: Names, _: Path) -> None:
    """A context whose step fails."""

    class Context:
        def step(self, function: Callable[[int], object], order_id: int) -> object:
            return function(order_id)

    def charge(order_id: int) -> None:
        raise names["StepFailed"]("charge", "CARD_REFUSED", f"order {order_id}")

    names |= {"ctx": Context(), "charge": charge, "release_stock": str, "order_id": 7}


def prepare_context(names: Names, _: Path) -> None:
    names["ctx"] = WorkflowContext("run", 0, "report", results={"fetch": TaskResult(ok="a page")})


def prepare_schedules(names: Names, _: Path) -> None:
    """The two schedules that are the examples of their classes."""
    for variable, entry in (("nightly_report", "Task"), ("nightly_books", "Workflow")):
        names[variable] = eval(examples()[f"schedules: {entry}Schedule"], names)


def prepare_orders(names: Names, _: Path) -> None:
    names["held"] = orders_table(names["app"].database_url)


PREPARED: dict[str, Callable[[Names, Path], None]] = {
    "durable-functions: DurableHandle": prepare_record,
    "durable-functions: StepFailed": prepare_step,
    "schedules: ScheduleConfig": prepare_schedules,
    "workflows: NodeKey": prepare_context,
    "testing: replay": prepare_record,
    "testing: check_replay": prepare_record,
    "inside-a-task: TaskTransaction": prepare_orders,
    "inside-a-task: AsyncTaskTransaction": prepare_orders,
}


@pytest.fixture
def names(
    process_url: str, connection: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Any:
    """The names of the setting, its application on this process's database."""
    monkeypatch.setenv("HORSIES_DATABASE_URL", process_url)
    monkeypatch.setenv("PAYLOAD_KEYS", FernetCodec.new_key())
    monkeypatch.setenv("HORSIES_WEBHOOK_SECRET", "a long secret of the receiver, 32 bytes")
    monkeypatch.chdir(tmp_path)
    app = Horsies(process_url)
    found = setting(app, tmp_path)
    yield found
    app.close()
    if "held" in found:
        found["held"].execute("DROP TABLE orders, refunds")
        found["held"].close()


@pytest.mark.parametrize("entry", examples())
def test_the_example_of_an_entry_runs(entry: str, names: Names, tmp_path: Path) -> None:
    text = examples()[entry]
    if entry in PREPARED:
        PREPARED[entry](names, tmp_path)
    if entry in RAISED:
        with pytest.raises(RAISED[entry]):
            run_example(text, names)
    elif entry in WITH_A_WORKER:
        with everything_runs(names["app"]):
            run_example(text, names)
    else:
        run_example(text, names)
    assert entry not in CHECKS or CHECKS[entry](names)


def test_the_lists_name_examples_that_exist() -> None:
    assert (CHECKS | RAISED | PREPARED).keys() | WITH_A_WORKER <= examples().keys()


def names_from_above(text: str) -> set[str]:
    """The names that a block uses and neither defines, imports nor finds among the built-in ones."""
    module = symtable.symtable(text, "a block", "exec")
    own = {
        one.get_name()
        for one in module.get_symbols()
        if one.is_assigned() or one.is_imported() or one.is_namespace()
    }
    return {name for name in names_read(module) if not hasattr(builtins, name)} - own


def names_read(table: symtable.SymbolTable) -> Iterator[str]:
    is_module = table.get_type() == "module"
    for one in table.get_symbols():
        if one.is_referenced() and (is_module or one.is_global()):
            yield one.get_name()
    for below in table.get_children():
        yield from names_read(below)


@pytest.mark.parametrize("path", GUIDES, ids=doc_pages.title)
def test_a_page_whose_examples_need_each_other_says_so(path: Path) -> None:
    text = path.read_text("utf-8")
    needy = [block for block in blocks(text) if block.is_run and names_from_above(block.text)]
    said = re.search("share one (application|workflow)|are one program|share this beginning", text)
    assert not needy or said
