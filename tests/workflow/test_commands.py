"""The operator's commands for workflows: text for people, JSON for programs, exit codes."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from horsies import (
    Horsies,
    MapNode,
    OnError,
    SignalNode,
    SleepNode,
    SubWorkflowNode,
    WorkflowDefinition,
    WorkflowHandle,
    WorkflowSpec,
    from_node,
    start_many,
)
from horsies.ids import new_id
from horsies.monitor import paging
from horsies.monitor.queries import RunFilters, list_runs
from horsies.result import Ok
from horsies.workflow.run import listing
from tests.support.command_line import Finished, Run, assert_unreachable
from tests.support.database import Database
from tests.support.rows import UNKNOWN_ID
from tests.support.turns import Hands, Tasks

UNREACHABLE = "postgresql://app:hunter2@127.0.0.1:1/shop"
COMMANDS = [
    ["workflows"],
    ["workflow", "show", UNKNOWN_ID],
    ["workflow", "pause", UNKNOWN_ID],
    ["workflow", "resume", UNKNOWN_ID],
    ["workflow", "cancel", UNKNOWN_ID],
    ["workflow", "retry", UNKNOWN_ID],
    ["workflow", "signal", UNKNOWN_ID, "go"],
    ["workflow", "audit"],
]

pytestmark = pytest.mark.usefixtures("connection")


def words(command: list[str]) -> str:
    return " ".join(command[:2])


def read(finished: Finished, code: int = 0) -> Any:
    assert finished.code == code, finished.err
    assert finished.err == ""
    return json.loads(finished.out)


def chain(app: Horsies, tasks: Tasks, name: str = "chain", **options: Any) -> WorkflowSpec[int]:
    first = tasks.number.node(node_id="first")()
    last = tasks.add.node(node_id="last")(first=from_node(first))
    key = f"operate.{name}"
    return app.workflow(name, [first, last], output=last, definition_key=key, **options)


@pytest.fixture
def handle(app: Horsies, tasks: Tasks) -> WorkflowHandle[int]:
    """A run to look at."""
    return chain(app, tasks).start(workflow_key="order-7").unwrap()


# Lists


def test_runs_are_listed_newest_first(
    horsies: Run, app: Horsies, tasks: Tasks, hands: Hands, handle: WorkflowHandle[int]
) -> None:
    failed = chain(app, tasks, "other").start().unwrap()
    hands.fail(failed.workflow_id, "first")
    finished = horsies("workflows")
    assert (finished.code, finished.err) == (0, "")
    lines = finished.out.splitlines()
    assert lines[0].split() == ["ID", "STATUS", "NODES", "AGE", "WORKFLOW"]
    assert lines[1].split()[:3] == [failed.workflow_id, "FAILED", "2/2"]
    assert lines[1].endswith("other")
    assert lines[2].strip() == "BOOM"
    assert lines[3].split()[:3] == [handle.workflow_id, "RUNNING", "0/2"]
    assert lines[4].strip() == "order-7"
    assert max(map(len, lines)) <= 80


def test_an_empty_list_is_a_sentence(horsies: Run) -> None:
    assert horsies("workflows").out == "No workflow matches.\n"
    assert read(horsies("workflows", "--json")) == {
        "workflows": [],
        "next_before": None,
        "looked_at_all": True,
    }


def listed(horsies: Run, *arguments: str) -> list[str]:
    return [run["id"] for run in read(horsies("workflows", "--json", *arguments))["workflows"]]


def test_every_filter_of_the_list_of_runs_counts(
    horsies: Run, app: Horsies, tasks: Tasks, hands: Hands, connection: Database
) -> None:
    running = chain(app, tasks).start(workflow_key="order-7").unwrap().workflow_id
    paused = chain(app, tasks).start().unwrap()
    paused.pause().unwrap()
    failed = chain(app, tasks, "other").start().unwrap().workflow_id
    hands.fail(failed, "first")
    connection.execute(
        "UPDATE horsies_workflows SET created_at = now() - interval '1 day' WHERE id = %s",
        (running,),
    )
    assert listed(horsies) == [failed, paused.workflow_id, running]
    assert listed(horsies, "--status", "failed") == [failed]
    assert listed(horsies, "--status", "RUNNING") == [running]
    both = ["--status", "running", "--status", "failed"]
    assert listed(horsies, *both) == [failed, running]
    opened = ["--status", "running", "--status", "paused"]
    assert listed(horsies, *opened) == [paused.workflow_id, running]
    assert listed(horsies, "--name", "chain") == [paused.workflow_id, running]
    assert listed(horsies, "--name", "chain", "--status", "paused") == [paused.workflow_id]
    assert listed(horsies, "--key", "order-7") == [running]
    assert listed(horsies, "--since", "1h") == [failed, paused.workflow_id]
    assert listed(horsies, "--since", "1h", *opened) == [paused.workflow_id]
    assert listed(horsies, "--before", failed) == [paused.workflow_id, running]
    assert listed(horsies, "--before", paused.workflow_id, *opened) == [running]


def test_runs_below_others_are_listed_when_asked_for(
    horsies: Run, app: Horsies, tasks: Tasks, hands: Hands
) -> None:
    parent, child_id = family(app, hands)
    assert listed(horsies) == [parent.workflow_id]
    assert listed(horsies, "--all") == [child_id, parent.workflow_id]
    assert horsies("workflows", "--all").out.splitlines()[2].strip() == "part of another"


def test_a_cut_list_of_runs_says_how_to_go_on(horsies: Run, app: Horsies, tasks: Tasks) -> None:
    start_many([chain(app, tasks)] * 5).unwrap()
    everything = listed(horsies)
    first = horsies("workflows", "--limit", "2")
    assert f"--before {everything[1]}" in first.err
    seen: list[str] = []
    arguments: list[str] = []
    while True:
        page = read(horsies("workflows", "--json", "--limit", "2", *arguments))
        seen += [run["id"] for run in page["workflows"]]
        if page["next_before"] is None:
            break
        arguments = ["--before", page["next_before"]]
    assert seen == everything
    missing = horsies("workflows", "--before", UNKNOWN_ID)
    assert (missing.code, missing.out) == (4, "")
    assert horsies("workflows", "--before", "nonsense").code == 4


def test_a_look_that_ended_early_says_where(
    app: Horsies, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_many([chain(app, tasks)] * 4).unwrap()
    rare = chain(app, tasks, "rare").start().unwrap().workflow_id
    start_many([chain(app, tasks)] * 4).unwrap()
    monkeypatch.setattr(paging, "LIST_WINDOW", 3)
    found: list[str] = []
    before = None
    for _ in range(4):
        page = list_runs(app.get_broker(), RunFilters(names=["rare"], after=before)).unwrap()
        assert page is not None
        found += [run.id for run in page.rows]
        before = page.next_cursor
        if page.looked_at_all:
            break
    assert found == [rare]
    assert before is None
    first = list_runs(app.get_broker(), RunFilters(names=["rare"])).unwrap()
    assert first is not None
    assert not first.looked_at_all


# Pictures


class Stable(WorkflowDefinition[int]):
    """A child that pauses when it fails."""

    name = "stable"
    definition_key = "operate.stable"

    @classmethod
    def build_with(cls, app: Any) -> WorkflowSpec[int]:
        inner = app.get_task("number").node(node_id="inner")()
        return WorkflowSpec(cls.name, [inner], output=inner, on_error=OnError.PAUSE)


def family(app: Horsies, hands: Hands) -> tuple[WorkflowHandle[Any], str]:
    node = SubWorkflowNode(Stable, node_id="stable")
    spec = app.workflow("farm", [node], output=node, definition_key="operate.farm")
    handle, child_id = spec.start().unwrap(), new_id()
    hands.expand(handle.workflow_id, "stable", Stable.build_with(app), child_id)
    return handle, child_id


def picture_of(out: str) -> list[str]:
    """Return the lines of the picture: what comes after the facts."""
    lines = out.splitlines()
    facts = [place for place, line in enumerate(lines) if line.startswith(("running for", "took"))]
    below = [place for place, line in enumerate(lines) if line.startswith("paused below")]
    return lines[max(facts + below) + 1 :]


def test_a_run_is_shown_with_its_facts_and_its_picture(
    horsies: Run, hands: Hands, handle: WorkflowHandle[int]
) -> None:
    hands.complete(handle.workflow_id, "first")
    hands.fail(handle.workflow_id, "last")
    finished = horsies("workflow", "show", handle.workflow_id)
    assert (finished.code, finished.err) == (0, "")
    facts = [line.split(maxsplit=1) for line in finished.out.splitlines()]
    assert ["workflow", "chain (operate.chain)"] in facts
    assert ["id", handle.workflow_id] in facts
    assert ["key", "order-7"] in facts
    assert ["status", "FAILED"] in facts
    assert ["error", "BOOM: last broke"] in facts
    assert ["nodes", "2: 1 completed, 1 failed"] in facts
    first, last = picture_of(finished.out)
    assert first.split()[:3] == ["✓", "first", "number"]
    assert first.endswith("ms")
    assert last.split()[:3] == ["✗", "last", "add"]
    assert last.endswith("BOOM")


def test_maps_sleeps_signals_and_sub_workflows_are_drawn_with_their_progress(
    horsies: Run, app: Horsies, tasks: Tasks, hands: Hands
) -> None:
    source = tasks.numbers.node(node_id="source")()
    squares = MapNode(tasks.square, over=source, node_id="squares", allow_failed_items=True)
    stable = SubWorkflowNode(Stable, node_id="stable", waits_for=[source])
    nap = SleepNode(3600, node_id="nap", waits_for=[source])
    go: SignalNode[Any] = SignalNode(
        "go", node_id="go", waits_for=[source], timeout=timedelta(hours=1)
    )
    end = tasks.add.node(node_id="end", waits_for=[squares, stable, nap, go])(
        first=from_node(stable)
    )
    spec = app.workflow(
        "zoo", [source, squares, stable, nap, go, end], definition_key="operate.zoo"
    )
    handle, child_id = spec.start().unwrap(), new_id()
    hands.complete(handle.workflow_id, "source", [1, 2, 3])
    hands.complete(handle.workflow_id, "squares", item=0)
    hands.fail(handle.workflow_id, "squares", item=1)
    hands.expand(handle.workflow_id, "stable", Stable.build_with(app), child_id)
    hands.fail(child_id, "inner")
    finished = horsies("workflow", "show", handle.workflow_id)
    lines = picture_of(finished.out)
    assert lines[0].startswith("✓ source  numbers")
    assert lines[1].startswith("├─ ▶ squares  map of square  2/3  1 failed")
    assert lines[2].startswith("├─ ‖ stable  workflow stable  paused")
    assert lines[3].startswith("│  ┊  ✗ inner  number")
    assert lines[3].endswith("BOOM")
    assert lines[4].startswith("├─ ◦ nap  sleep  until 20")
    assert lines[5].startswith("├─ ◦ go  signal go  until 20")
    assert lines[6] == "· end  add  ← 4 nodes"
    assert [child_id] == [
        line.split()[-1] for line in finished.out.splitlines() if "paused b" in line
    ]
    drawn = handle.draw().unwrap().splitlines()
    assert drawn[0].startswith(f"zoo  {handle.workflow_id}  RUNNING  1 of 6 nodes ended")
    assert [line.split("  ")[0] for line in drawn[1:]] == [line.split("  ")[0] for line in lines]


def test_a_time_that_has_passed_is_not_drawn(
    horsies: Run, app: Horsies, connection: Database
) -> None:
    go: SignalNode[Any] = SignalNode("go", node_id="go", timeout=timedelta(hours=1))
    nap = SleepNode(3600, node_id="nap")
    waiting = app.workflow("waits", [go, nap], definition_key="operate.waits").start().unwrap()

    def waits() -> list[str]:
        lines = picture_of(horsies("workflow", "show", waiting.workflow_id).out)
        return [line.split("  ")[0].split()[-1] for line in lines if "  until 20" in line]

    assert waits() == ["go", "nap"]
    waiting.signal("go").unwrap()
    assert waits() == ["nap"]
    connection.execute("UPDATE horsies_tasks SET enqueued_at = now() WHERE enqueued_at > now()")
    assert waits() == []


def test_what_is_held_is_drawn_as_paused(
    horsies: Run, hands: Hands, handle: WorkflowHandle[int]
) -> None:
    handle.pause().unwrap()
    out = horsies("workflow", "show", handle.workflow_id).out
    assert picture_of(out) == ["‖ first  number", "· last  add"]


def test_a_thousand_nodes_are_folded_unless_asked_for(
    horsies: Run, app: Horsies, tasks: Tasks
) -> None:
    nodes = [tasks.number.node(node_id=f"n{number}")() for number in range(1_000)]
    handle = app.workflow("wide", nodes, definition_key="operate.wide").start().unwrap()
    folded = picture_of(horsies("workflow", "show", handle.workflow_id).out)
    assert folded[2] == "├─ ⋮ 997 more branches: 997 ◦"
    assert len(folded) == 4
    every = picture_of(horsies("workflow", "show", handle.workflow_id, "--all").out)
    assert len(every) == 1_000


def test_a_terminal_without_unicode_gets_plain_marks(
    horsies: Run, handle: WorkflowHandle[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horsies.cli.workflows.output_encoding", lambda: "ascii")
    out = horsies("workflow", "show", handle.workflow_id).out
    assert out.isascii()
    assert picture_of(out) == ["o first  number", ". last  add"]


def test_stored_text_of_a_run_cannot_control_the_terminal(
    horsies: Run, app: Horsies, tasks: Tasks
) -> None:
    evil = "\x1b[2Jgone\nnew line"
    chain(app, tasks, evil).start(workflow_key="\x1b]0;x\x07").unwrap()
    for arguments in (["workflows"], ["workflow", "show", listed(horsies)[0]]):
        out = horsies(*arguments).out
        assert "\x1b" not in out
        assert "\x07" not in out


def test_programs_get_the_whole_tree(
    horsies: Run, app: Horsies, tasks: Tasks, hands: Hands
) -> None:
    parent, child_id = family(app, hands)
    hands.fail(child_id, "inner")
    shown = read(horsies("workflow", "show", parent.workflow_id, "--json"))
    assert (shown["id"], shown["status"], shown["is_whole"]) == (
        parent.workflow_id,
        "RUNNING",
        True,
    )
    assert [node["node_id"] for node in shown["nodes"]] == ["stable"]
    assert shown["nodes"][0]["sub_workflow_id"] == child_id
    (below,) = shown["below"]
    assert (below["id"], below["status"], below["depth"]) == (child_id, "PAUSED", 1)
    assert (below["error_code"], below["error_message"]) == ("BOOM", "inner broke")
    assert below["nodes"][0]["error_code"] == "BOOM"
    assert below["paused_at"].endswith("Z")
    assert list(below) == [name for name in shown if name not in ("below", "is_whole")]


def test_a_large_family_is_cut_and_says_so(
    horsies: Run, app: Horsies, tasks: Tasks, hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, _ = family(app, hands)
    monkeypatch.setattr(listing, "FAMILY_MAX", 1)
    shown = read(horsies("workflow", "show", parent.workflow_id, "--json"))
    assert (shown["below"], shown["is_whole"]) == ([], False)
    assert "Only the first 0 runs" in horsies("workflow", "show", parent.workflow_id).out


# A hand on runs


def test_runs_are_paused_and_resumed(
    horsies: Run, hands: Hands, handle: WorkflowHandle[int]
) -> None:
    run_id = handle.workflow_id
    assert horsies("workflow", "pause", run_id).out == f"Workflow {run_id} is paused.\n"
    again = horsies("workflow", "pause", run_id)
    assert (again.code, again.out) == (1, "")
    assert again.err == f"error: Workflow {run_id} is PAUSED; nothing was changed.\n"
    assert read(horsies("workflow", "pause", run_id, "--json"), 1) == {
        "workflow_id": run_id,
        "status": "PAUSED",
        "changed": False,
    }
    assert horsies("workflow", "resume", run_id).out == f"Workflow {run_id} is resumed.\n"
    assert read(horsies("workflow", "pause", run_id, "--json"))["status"] == "PAUSED"
    assert read(horsies("workflow", "resume", run_id, "--json"))["changed"] is True
    assert horsies("workflow", "resume", run_id).code == 1
    assert hands.status(run_id) == "RUNNING"


def test_a_failed_run_is_restarted_from_its_failures(
    horsies: Run, hands: Hands, handle: WorkflowHandle[int]
) -> None:
    run_id = handle.workflow_id
    nothing = horsies("workflow", "retry", run_id)
    assert (nothing.code, nothing.out) == (1, "")
    hands.fail(run_id, "first")
    assert horsies("workflow", "resume", run_id).code == 1
    assert horsies("workflow", "resume", run_id, "--retry-failed").code == 0
    hands.fail(run_id, "first")
    done = horsies("workflow", "retry", run_id)
    assert done.out == f"Workflow {run_id} retries its failed nodes.\n"
    hands.fail(run_id, "first")
    one = read(horsies("workflow", "retry", run_id, "--node", "first", "--json"))
    assert one == {"workflow_id": run_id, "status": "RUNNING", "changed": True}
    assert horsies("workflow", "retry", run_id, "--node", "nobody").code == 4
    assert hands.statuses(run_id) == {"first": "ENQUEUED", "last": "PENDING"}


def test_a_run_is_cancelled_with_a_reason(
    horsies: Run, hands: Hands, connection: Database, handle: WorkflowHandle[int]
) -> None:
    run_id = handle.workflow_id
    task_id, _ = hands.take(run_id, "first")
    done = horsies("workflow", "cancel", run_id, "--interrupt", "--reason", "no more oats")
    assert done.out == f"Workflow {run_id} is cancelled.\n"
    assert "no more oats" in horsies("workflow", "show", run_id).out
    asked = connection.execute(
        "SELECT cancel_requested_at IS NOT NULL FROM horsies_tasks WHERE id = %s", (task_id,)
    ).fetchone()
    assert asked == (True,)
    again = horsies("workflow", "cancel", run_id)
    assert (again.code, again.out) == (1, "")
    assert read(horsies("workflow", "cancel", run_id, "--json"), 1)["changed"] is False


def test_signals_are_sent_as_json(horsies: Run, app: Horsies, tasks: Tasks, hands: Hands) -> None:
    go: SignalNode[Any] = SignalNode("go", node_id="go")
    handle = app.workflow("gate", [go], output=go, definition_key="operate.gate").start().unwrap()
    run_id = handle.workflow_id
    assert (
        horsies("workflow", "signal", run_id, "go", '{"by":"Ada"}').out
        == "Signal go is delivered.\n"
    )
    stored = hands.connection.execute("SELECT kwargs FROM horsies_tasks").fetchone()
    assert stored == ('{"value":{"by":"Ada"}}',)
    told = read(horsies("workflow", "signal", run_id, "go", "--json"))
    assert told == {"workflow_id": run_id, "signal": "go", "delivery": "stored"}
    nonsense = horsies("workflow", "signal", run_id, "go", "yes")
    assert (nonsense.code, nonsense.out) == (2, "")
    assert horsies("workflow", "signal", run_id, "stop").code == 4
    handle.cancel().unwrap()
    assert horsies("workflow", "signal", run_id, "go").code == 1


# The audit


def test_runs_that_add_up_pass_the_audit(
    horsies: Run, hands: Hands, handle: WorkflowHandle[int]
) -> None:
    hands.complete(handle.workflow_id, "first")
    assert horsies("workflow", "audit").out == "All open runs are consistent.\n"
    assert read(horsies("workflow", "audit", "--json")) == {"found": []}


def test_a_run_that_was_edited_by_hand_is_reported_until_it_is_cancelled(
    horsies: Run, connection: Database, handle: WorkflowHandle[int]
) -> None:
    run_id = handle.workflow_id
    connection.execute("DELETE FROM horsies_tasks")
    found = horsies("workflow", "audit")
    assert found.code == 1
    said = " ".join(found.out.split())
    assert said.startswith(f"ID PROBLEM {run_id} node first waits for a task that is no longer")
    assert said.endswith("1 run(s) are inconsistent or blocked.")
    told = read(horsies("workflow", "audit", "--json"), 1)
    assert [one["workflow_id"] for one in told["found"]] == [run_id]
    assert horsies("workflow", "cancel", run_id).code == 0
    assert horsies("workflow", "audit").code == 0


# Every command


@pytest.mark.parametrize("command", COMMANDS, ids=words)
def test_a_run_that_does_not_exist_ends_in_4(horsies: Run, command: list[str]) -> None:
    finished = horsies(*command)
    if UNKNOWN_ID in command:
        assert (finished.code, finished.out) == (4, "")
        assert finished.err == f"error: There is no workflow run {UNKNOWN_ID}.\n"
    else:
        assert finished.code == 0


@pytest.mark.parametrize("command", COMMANDS, ids=words)
def test_an_unreachable_database_is_reported_without_a_password(
    horsies: Run, command: list[str]
) -> None:
    assert_unreachable(horsies(*command, "--database-url", UNREACHABLE))


@pytest.mark.parametrize("command", COMMANDS, ids=words)
def test_a_database_without_our_tables_is_refused(
    horsies: Run, database_url: str, command: list[str]
) -> None:
    finished = horsies(*command, "--database-url", database_url)
    assert (finished.code, finished.out) == (1, "")
    assert "horsies migrate" in finished.err


@pytest.mark.parametrize("command", COMMANDS, ids=words)
def test_help_of_workflow_commands_explains_the_exit_codes(
    horsies: Run, command: list[str]
) -> None:
    name = command[:2] if command[0] == "workflow" else command[:1]
    assert "Exit codes: 0" in " ".join(horsies(*name, "--help").out.split())


def test_reading_a_run_takes_any_spelling_of_its_id_and_refuses_other_text(
    app: Horsies, handle: WorkflowHandle[int]
) -> None:
    assert listing.read_run(app.get_broker(), "nonsense") == Ok(None)
    report = listing.read_run(app.get_broker(), handle.workflow_id.upper()).unwrap()
    assert report is not None
    assert report.run.id == handle.workflow_id
