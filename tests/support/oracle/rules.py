"""The rules of workflows in plain Python, which compute the expected state of a tree of runs. The rules
follow the specification. They keep whole graphs in memory and derive every decision from the
neighbouring nodes, without counters or sets of changed rows. Outcomes recorded together are counted
together, before their consequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.support.oracle.shapes import RunShape
from tests.support.oracle.tree import NOTHING_YET, End, Node, Place, Run, Work, failure

UNSTARTED = frozenset({"PENDING", "CLAIMED"})


class Oracle:
    """Any number of trees of runs, which workers and operators change. ``step`` is the number of map
    items that become tasks at a time.
    """

    def __init__(self, step: int = 1_000) -> None:
        self.step = step
        self.runs: dict[str, Run] = {}
        # The tasks created since the last check, one list per moment.
        self.enqueued: list[list[Place]] = []

    # What people do.

    def start(self, run_id: str, shape: RunShape, parent: Node | None = None) -> Run:
        run = Run(run_id, shape, parent)
        run.nodes = [Node(run, index, node) for index, node in enumerate(shape.nodes)]
        self.runs[run_id] = run
        if parent is not None:
            parent.run.children.append(run)
        self._enqueue([node for node in run.nodes if not node.shape.after])
        return run

    def pause(self, run_id: str) -> str:
        run = self.runs[run_id]
        met = run.status
        if met == "RUNNING":
            self._hold(run)
        return met

    def resume(self, run_id: str) -> str:
        run = self.runs[run_id]
        met = run.status
        if met == "PAUSED":
            self._let_go(run.tree())
        return met

    def cancel(self, run_id: str, reason: dict[str, Any]) -> str:
        run = self.runs[run_id]
        met = run.status
        if run.is_open:
            self._stop(run.family(), "CANCELLED", reason)
        return met

    def expire(self, run_id: str, reason: dict[str, Any]) -> bool:
        run = self.runs[run_id]
        if run.status != "PAUSED":
            return False
        self._stop([run], "EXPIRED", reason)
        return True

    def retry(self, run_id: str, indexes: Sequence[int] | None = None) -> str:
        run = self.runs[run_id]
        met = run.status
        if met not in {"FAILED", "PAUSED", "RUNNING"}:
            return met
        if met == "FAILED" and run.parent is not None:
            return "PARENT_ENDED"
        failed = self._set_back(run, indexes)
        if not failed:
            return "NO_FAILED_NODE"
        in_part = [node for node in failed if node.status == "RUNNING"]
        if met == "PAUSED":
            self._let_go(run.unfailed_tree())
        self._retry_children(in_part)
        self._catch_up([run])
        return "retried"

    def resume_retrying(self, run_id: str) -> str:
        run = self.runs[run_id]
        met = run.status
        if met not in {"PAUSED", "FAILED"}:
            return met
        for one in reversed(run.tree()[1:]):
            if one.status == "PAUSED":
                self.retry(one.id)
        if self.retry(run_id) == "retried" or self.resume(run_id) == "PAUSED":
            return "resumed"
        return met

    def signal(self, run_id: str, name: str, value: Any) -> str:
        run = self.runs[run_id]
        if not run.is_open:
            return run.status
        if not any(node.shape.signal == name for node in run.nodes):
            return "UNKNOWN_SIGNAL"
        for node in run.nodes:
            work = node.work
            if (
                node.shape.signal == name
                and node.status == "ENQUEUED"
                and work is not None
                and work.state == "PENDING"
                and work.value is NOTHING_YET
            ):
                work.value = value
                return "delivered"
        run.stored_signals.append((name, value))
        return "stored"

    # What workers do.

    def work(self, place: Place) -> Work:
        run_id, index, item = place
        node = self.runs[run_id].nodes[index]
        found = node.work if item is None else node.items[item]
        assert found is not None
        return found

    def claim(self, places: Iterable[Place], state: str) -> None:
        for place in places:
            self.work(place).state = state

    def give_back(self, places: Iterable[Place]) -> None:
        """Retry these running tasks later."""
        for place in places:
            self.work(place).state = "PENDING"

    def finish(self, ends: Sequence[End]) -> None:
        """Record simultaneous outcomes with all their consequences."""
        maps: list[Node] = []
        ended: list[Node] = []
        for end in ends:
            work = self.work(end.place)
            work.state, work.result = end.state, end.result
            node = self.runs[end.place[0]].nodes[end.place[1]]
            if end.place[2] is not None:
                if node not in maps:
                    maps.append(node)
                self._next_item(node, was_parked=work.parked)
            elif node.shape.kind == "workflow" and end.state == "COMPLETED":
                self._expand(node, end.child_id)
            else:
                node.end("COMPLETED" if end.state == "COMPLETED" else "FAILED", work.outcome())
                ended.append(node)
        ended += [node for node in maps if self._end_map(node)]
        for node in maps:
            is_short = sum(work.is_open for work in node.items) < 2 * self.step
            if node.run.is_open and node.waiting and is_short:
                self._add_items(node)
        self._count_ends(ended)

    # What follows.

    def _hold(self, run: Run) -> None:
        for one in run.tree():
            if one.status == "RUNNING":
                one.status = "PAUSED"
                for work in one.works():
                    if work.state == "CLAIMED":
                        work.state = "PENDING"

    def _let_go(self, runs: Sequence[Run]) -> None:
        resumed = [one for one in runs if one.status == "PAUSED"]
        for one in resumed:
            one.status = "RUNNING"
        self._catch_up(resumed)

    def _catch_up(self, runs: Sequence[Run]) -> None:
        """Update these runs: first count outcomes, then start nodes, then end runs."""
        ended = [node for run in runs for node in run.uncounted() if node.has_ended]
        self._count_ends(ended, fresh=False)
        skipped, ready = self._decisions(node for run in runs for node in run.nodes)
        self._count_ends([*skipped, *self._enqueue(ready)])
        self._count_ends([node for run in runs for node in self._finish_run(run)])

    def _count_ends(self, ended: Sequence[Node], *, fresh: bool = True) -> None:
        """Count these outcomes in RUNNING runs, then apply their consequences."""
        while ended:
            if fresh:
                self._pause_where_required(ended)
            counted = [n for n in ended if n.run.status == "RUNNING" and not n.counted]
            for node in counted:
                node.counted = True
            self._note_errors(counted)
            runs = list(dict.fromkeys(node.run for node in ended))
            skipped, ready = self._decisions(_dependents(counted))
            at_once = self._enqueue(ready)
            parents = [node for run in runs for node in self._finish_run(run)]
            ended = [*skipped, *at_once, *parents]
            fresh = True

    def _pause_where_required(self, ended: Sequence[Node]) -> None:
        failed = [
            node
            for node in sorted(ended, key=lambda one: one.index, reverse=True)
            if node.status == "FAILED"
            and node.run.status == "RUNNING"
            and node.run.shape.pauses(node.index)
        ]
        for node in failed:
            assert node.result is not None
            node.run.error = node.result["err"]
        for node in failed:
            self._hold(node.run)

    def _note_errors(self, counted: Sequence[Node]) -> None:
        for run in {node.run.id: node.run for node in counted if node.status == "FAILED"}.values():
            if run.error is None:
                run.error = _blame([node for node in run.nodes if node.status == "FAILED"])

    def _decisions(self, nodes: Iterable[Node]) -> tuple[list[Node], list[Node]]:
        moving = [node for node in nodes if node.run.status == "RUNNING"]
        waiting = [node for node in moving if node.status in {"PENDING", "READY"}]
        decided = [(node, join(node)) for node in waiting]
        skipped = [node for node, status in decided if status == "SKIPPED"]
        ready = [node for node, status in decided if status == "READY"]
        for node in skipped:
            node.end("SKIPPED", None)
        return skipped, ready

    def _enqueue(self, nodes: Sequence[Node]) -> list[Node]:
        """Create tasks for these nodes; return the nodes that ended immediately."""
        ended = []
        moment: list[Place] = []
        for node in nodes:
            if node.shape.kind == "map":
                if self._expand_map(node):
                    ended.append(node)
                continue
            node.status, node.work = "ENQUEUED", Work()
            moment.append((node.run.id, node.index, None))
            if node.shape.kind == "signal":
                _take_stored_signal(node)
        if moment:
            self.enqueued.append(moment)
        return ended

    def _expand_map(self, node: Node) -> bool:
        assert node.shape.over is not None
        if node.items:
            places = [at for at, work in enumerate(node.items) if work.state != "COMPLETED"]
            self._begin_items(node, places)
            return False
        source = node.run.nodes[node.shape.over].shown_result()
        elements = None if source is None else source.get("ok")
        if not isinstance(elements, list):
            node.end("FAILED", failure("WORKFLOW_ENQUEUE_FAILED"))
            return True
        if not elements:
            node.end("COMPLETED", {"ok": []})
            return True
        node.total = len(elements)
        self._begin_items(node, range(node.total))
        return False

    def _begin_items(self, node: Node, places: Iterable[int]) -> None:
        node.status, node.waiting = "RUNNING", list(places)
        self._add_items(node)

    def _add_items(self, node: Node) -> None:
        """Create tasks for the next items; as many may run immediately as there are free places."""
        chosen, node.waiting = node.waiting[: self.step], node.waiting[self.step :]
        for place in chosen:
            busy = sum(work.is_open and not work.parked for work in node.items)
            work = Work(parked=busy >= (node.shape.max_parallel or node.total))
            node.items[place : place + 1] = [work]
        self.enqueued.append([(node.run.id, node.index, place) for place in chosen])

    def _next_item(self, node: Node, *, was_parked: bool) -> None:
        """Give a free place of ``max_parallel`` to the first waiting item."""
        if was_parked:
            return
        for work in node.items:
            if work.parked and work.state == "PENDING":
                work.parked = False
                return

    def _end_map(self, node: Node) -> bool:
        is_running = node.shape.kind == "map" and node.status == "RUNNING"
        if not is_running or node.waiting or any(work.is_open for work in node.items):
            return False
        failed = [place for place, work in enumerate(node.items) if work.state != "COMPLETED"]
        if failed and not node.shape.allow_failed_items:
            node.end("FAILED", failure("MAP_ITEMS_FAILED", data={"failed_items": failed}))
        else:
            node.end("COMPLETED", {"ok": [work.outcome() for work in node.items]})
        return True

    def _expand(self, node: Node, child_id: str | None) -> None:
        """Start a sub-workflow with its new plan, below a run that continues."""
        assert child_id is not None
        assert node.shape.child is not None
        if not node.run.is_open:
            node.end("SKIPPED", None)
            return
        node.status = "RUNNING"
        node.child = self.start(child_id, node.shape.child, node)
        node.child.status = node.run.status

    def _finish_run(self, run: Run) -> list[Node]:
        """End a run without open nodes; return the parent node if it ended too."""
        if run.status != "RUNNING" or run.uncounted():
            return []
        failed = [node for node in run.nodes if node.status == "FAILED"]
        cases = run.shape.cases
        if cases is None:
            succeeded = not failed
        else:
            run.matched_case = _first_case(run, cases)
            succeeded = run.matched_case is not None
            failed = [node for node in failed if any(node.index in case for case in cases)]
        run.status = "COMPLETED" if succeeded else "FAILED"
        run.error = None if succeeded else _blame(failed)
        return self._end_parent(run)

    def _end_parent(self, run: Run) -> list[Node]:
        node = run.parent
        if node is None or node.status != "RUNNING" or node.child is not run:
            return []
        node.summary = run.summary()
        if run.status == "COMPLETED":
            node.end("COMPLETED", run.result() if run.shape.output is not None else {"ok": None})
        else:
            extra = {"sub_workflow_id": run.id, "sub_workflow_summary": node.summary}
            node.end("FAILED", failure("SUBWORKFLOW_FAILED", **extra))
        return [node]

    def _stop(self, runs: Sequence[Run], status: str, reason: dict[str, Any]) -> None:
        """Cancel or expire a run: skip nodes that have not started, and let running tasks finish."""
        stopped = [run for run in runs if run.is_open]
        for run in stopped:
            run.status, run.error = status, reason
            for work in run.works():
                if work.state in UNSTARTED:
                    work.state = "CANCELLED"
            for node in run.nodes:
                cancelled = node.work is not None and node.work.state == "CANCELLED"
                if node.status == "PENDING" or (node.status == "ENQUEUED" and cancelled):
                    node.end("SKIPPED", None)
                if (
                    not self._end_map(node)
                    and node.shape.kind == "map"
                    and node.status == "RUNNING"
                ):
                    node.end("FAILED", failure(f"WORKFLOW_{status}"))
                    node.waiting = []
        parents = [node for run in reversed(stopped) for node in self._end_parent(run)]
        self._count_ends(parents)

    def _set_back(self, run: Run, indexes: Sequence[int] | None) -> list[Node]:
        """Reset the failed nodes and the nodes skipped because of them; return the failed nodes."""
        failed = [
            node
            for node in run.nodes
            if node.status == "FAILED" and (indexes is None or node.index in indexes)
        ]
        if not failed:
            return []
        if run.status == "FAILED":
            run.status = "RUNNING"
        run.error = run.matched_case = None
        skipped = _skipped_below(run, failed)
        for node in skipped:
            node.status, node.counted, node.result, node.work = "PENDING", False, None, None
        for node in failed:
            waits = any(run.nodes[index] in (*failed, *skipped) for index in node.shape.after)
            has_failed_child = node.child is not None and node.child.status == "FAILED"
            if has_failed_child and not waits:
                node.status = "RUNNING"
            else:
                node.status = "PENDING" if node.shape.after else "READY"
            node.counted, node.result, node.summary, node.work = False, None, None, None
        self._take_back(run, [*failed, *skipped])
        return failed

    def _take_back(self, run: Run, nodes: Sequence[Node]) -> None:
        """Make tasks that the failure had started wait again for the retried node."""
        for node in run.nodes:
            follows = any(run.nodes[index] in nodes for index in node.shape.after)
            in_queue = node.work is not None and node.work.state in UNSTARTED
            is_plain = node.shape.kind in {"task", "workflow"} and node.shape.join == "all"
            if node.status == "ENQUEUED" and follows and in_queue and is_plain:
                node.status, node.work = "PENDING", None

    def _retry_children(self, nodes: Sequence[Node]) -> None:
        """Retry only the failed nodes of the child runs of these nodes."""
        for node in nodes:
            assert node.child is not None
            self._retry_child(node.child)
            if node.run.status == "PAUSED":
                self._hold(node.child)

    def _retry_child(self, child: Run) -> None:
        failed = self._set_back(child, None)
        self._retry_children([node for node in failed if node.status == "RUNNING"])
        self._catch_up([child])


def join(node: Node) -> str:
    """Return the next status of a waiting node from the nodes that it depends on."""
    if node.status != "PENDING":
        return node.status
    ends = [node.run.nodes[index] for index in node.shape.after]
    good = sum(end.counted and end.status == "COMPLETED" for end in ends)
    bad = sum(end.counted and end.status != "COMPLETED" for end in ends)
    still_open = len(ends) - good - bad
    if node.shape.join == "all":
        if still_open:
            return "PENDING"
        return "READY" if not bad or node.shape.allow_failed_deps else "SKIPPED"
    needed = 1 if node.shape.join == "any" else node.shape.min_success
    assert needed is not None
    if good >= needed:
        seen = all(node.run.nodes[index].counted for index in node.shape.context)
        return "READY" if seen else "PENDING"
    return "SKIPPED" if good + still_open < needed else "PENDING"


def _dependents(ended: Sequence[Node]) -> list[Node]:
    """Return the nodes that depend on these nodes, run by run in index order."""
    after = {(node.run, index) for node in ended for index in node.run.shape.dependents[node.index]}
    runs = list(dict.fromkeys(node.run for node in ended))
    return [node for run in runs for node in run.nodes if (run, node.index) in after]


def _take_stored_signal(node: Node) -> None:
    stored = node.run.stored_signals
    for signal in stored:
        if signal[0] == node.shape.signal:
            assert node.work is not None
            node.work.value = signal[1]
            stored.remove(signal)
            return


def _first_case(run: Run, cases: Sequence[Sequence[int]]) -> int | None:
    for place, case in enumerate(cases):
        if all(run.nodes[index].status == "COMPLETED" for index in case):
            return place
    return None


def _blame(failed: Sequence[Node]) -> dict[str, Any]:
    if not failed:
        error: dict[str, Any] = failure("WORKFLOW_SUCCESS_CASE_NOT_MET")["err"]
        return error
    first = min(failed, key=lambda node: node.index)
    assert first.result is not None
    found: dict[str, Any] = first.result["err"]
    return found


def _skipped_below(run: Run, nodes: Sequence[Node]) -> list[Node]:
    found: list[Node] = []
    level = list(nodes)
    while level:
        below = {index for node in level for index in run.shape.dependents[node.index]}
        level = [run.nodes[i] for i in sorted(below) if run.nodes[i].status == "SKIPPED"]
        level = [node for node in level if node not in found]
        found += level
    return found
