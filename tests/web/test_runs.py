"""Pages of workflow runs, asked without a browser: facts, folding, paging, bad addresses."""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import urljoin

import pytest

from horsies import MapNode, SignalNode, SubWorkflowNode, WorkflowDefinition
from horsies.app import Horsies
from horsies.web.folding import FOLD_ABOVE, fold
from horsies.web.layout import lay_out
from tests.support import runs
from tests.support.database import Database
from tests.support.web_server import Ask

BIG = "00000000-0000-7000-8000-000000000001"
# A run of 5,000 nodes: one that splits, 2,498 chains of two, and three at the end.
BIG_RUN = """
INSERT INTO horsies_workflows (id, name, status, on_error, definition_key, fingerprint, root_workflow_id,
    total_nodes, open_nodes, failed_nodes)
VALUES ('00000000-0000-7000-8000-000000000001', 'close the books', 'RUNNING', 'fail', 'books', 'same',
    '00000000-0000-7000-8000-000000000001', 5000, 2000, 3);
INSERT INTO horsies_workflow_tasks (workflow_id, task_index, node_id, kind, status, propagated,
    dependencies, dependents, context_dependents, join_type, allow_failed_deps, pauses, deps_open,
    task_name, task_kwargs, queue_name, priority, task_options, max_retries, enqueued_at)
SELECT '00000000-0000-7000-8000-000000000001', n, 'node-' || n, 'task',
    CASE WHEN n % 1500 = 7 THEN 'FAILED' WHEN n < 3000 THEN 'COMPLETED' ELSE 'PENDING' END, n < 3000,
    CASE WHEN n = 0 THEN '{}' WHEN n < 2499 THEN '{0}' WHEN n < 4997 THEN ARRAY[n - 2498]
         WHEN n < 4999 THEN '{0}' ELSE '{4997,4998}' END::int[], '{}', '{}', 'all', false, false, 0,
    CASE WHEN n = 0 THEN 'split' WHEN n < 2499 THEN 'fetch' WHEN n < 4997 THEN 'store' ELSE 'report' END,
    '{}', 'default', 100, '{}', 0, now()
FROM generate_series(0, 4999) AS n;
"""


def address(link: re.Match[str], path: str) -> str:
    """The address of a relative link on the page at this path."""
    return urljoin(path, str(link[1]).replace("&amp;", "&"))


@pytest.fixture
def shop(app: Horsies, connection: Database) -> dict[str, Any]:
    """An application with a workflow of every kind of node, and the id of a run that no worker runs."""

    @app.task("fetch")
    def fetch() -> list[int]:
        return [1]

    @app.task("resize")
    def resize(size: int) -> int:
        return size

    class Invoices(WorkflowDefinition[list[int]]):
        name = "invoices"
        definition_key = "web.invoices"
        pages = fetch.node()()

        class Meta:
            output = "pages"

    first = fetch.node(node_id="first")()
    sizes = MapNode(resize, over=first, node_id="sizes")
    approval = SignalNode("approve", waits_for=[first], node_id="approval")
    child = SubWorkflowNode(Invoices, waits_for=[first], node_id="child")
    last = fetch.node(node_id="last", waits_for=[sizes, approval, child], join="any")()
    spec = app.workflow(
        "import <shop>", [first, sizes, approval, child, last], definition_key="web.shop"
    )
    (run_id,) = runs.start(connection, spec)
    return {"id": run_id}


def test_a_run_is_drawn_with_all_its_nodes_and_told_as_text(ask: Ask, shop: dict[str, Any]) -> None:
    page = ask(f"/workflows/{shop['id']}").text
    assert page.count('<g class="node') == 5
    assert page.count('class="edge') == 6
    assert "any of 3" in page
    assert "map of resize" in page
    assert "signal approve" in page
    assert "import &lt;shop&gt;" in page
    assert 'id="as-text"' in page
    assert "any of sizes, approval, child" in page


def test_a_selected_node_has_a_panel_and_every_tab_keeps_it(ask: Ask, shop: dict[str, Any]) -> None:
    for tab in ("graph", "timeline", "nodes"):
        page = ask(f"/workflows/{shop['id']}?tab={tab}&node=1").text
        assert "<h2><bdi>sizes</bdi>" in page
        assert "No item has been created yet" in page
        assert f"/workflows/{shop['id']}/nodes/sizes/explain" in page


def test_buttons_are_there_for_those_who_may_use_them(ask: Ask, shop: dict[str, Any]) -> None:
    path = f"/workflows/{shop['id']}"
    assert "<form" not in ask(path).text.split('id="content"')[1]
    page = ask(path, actions=True).text
    for verb in ("pause", "signal", "cancel"):
        assert f'action="{path}/{verb}"' in page
    assert "<option>approve</option>" in page
    assert f'action="{path}/resume"' not in page
    assert f'action="{path}/retry"' not in page


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/workflows/nothing", 404, "There is no workflow run nothing."),
        (f"/workflows/{BIG}", 404, "There is no workflow run"),
        ("/workflows?status=red", 400, "status must be one of"),
        ("/workflows?since=3y", 400, "since: "),
        ("/workflows?after=x", 400, "after must be the next_cursor"),
        ("/schedules/nothing", 404, "There is no schedule"),
    ],
)
def test_a_bad_address_gets_a_sentence(
    ask: Ask, connection: Database, path: str, status: int, words: str
) -> None:
    answer = ask(path)
    assert answer.status_code == status
    assert words in answer.text


@pytest.mark.parametrize("query", ["tab=x", "node=x", "node=99", "page=-1", "items=x-y"])
def test_a_bad_query_of_a_run_is_refused(ask: Ask, shop: dict[str, Any], query: str) -> None:
    tab = "" if query.startswith("tab") else "tab=nodes&node=1&"
    assert ask(f"/workflows/{shop['id']}?{tab}{query}").status_code in (400, 404)


def test_five_thousand_nodes_open_folded(ask: Ask, connection: Database) -> None:
    connection.execute(BIG_RUN)
    taken = []
    for _ in range(3):  # the cheapest counts; about 0.3 s of processor time
        fold.cache_clear()
        lay_out.cache_clear()
        begin = time.process_time()
        page = ask(f"/workflows/{BIG}").text
        taken.append(time.process_time() - begin)
    assert min(taken) < 2
    assert len(page) < 60_000
    assert 3 <= page.count('<g class="node') <= FOLD_ABOVE
    assert "2,498 × fetch" in page  # noqa: RUF001
    assert "5,000 nodes in" in page
    assert "Show every node" not in page


def test_a_graph_of_middle_size_can_be_unfolded_and_a_small_one_folded(
    ask: Ask, connection: Database
) -> None:
    connection.execute(BIG_RUN)
    for size, query, boxes in ((400, "", 2), (400, "?boxes=all", 400), (100, "?boxes=folded", 2)):
        connection.execute("DELETE FROM horsies_workflow_tasks WHERE task_index >= %s", (size,))
        connection.execute("UPDATE horsies_workflows SET total_nodes = %s", (size,))
        page = ask(f"/workflows/{BIG}{query}").text
        assert page.count('<g class="node') == boxes, (size, query)
        assert ("Show every node" in page) == (boxes == 2)


def test_the_nodes_of_a_box_are_listed_failures_first_in_pages(
    ask: Ask, connection: Database
) -> None:
    connection.execute(BIG_RUN)
    page = ask(f"/workflows/{BIG}").text
    link = re.search(r'href="([^"]*box=[^"]*)"><title>2,498 nodes, fetch', page)
    assert link is not None
    rows = ask(address(link, f"/workflows/{BIG}")).text
    listed = re.findall(r'<tr data-key="(\d+)"', rows)
    assert listed[:3] == ["7", "1507", "1"]
    assert len(listed) == 100
    following = re.search(r'rel="next" href="([^"]*)"', rows)
    assert following is not None
    more = ask(address(following, f"/workflows/{BIG}")).text
    assert re.findall(r'<tr data-key="(\d+)"', more)[0] == "100"


def test_items_of_a_map_are_paged_and_failures_come_first(
    ask: Ask, shop: dict[str, Any], connection: Database
) -> None:
    connection.execute("ALTER TABLE horsies_tasks DISABLE TRIGGER USER")
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, status, enqueue_sha, workflow_id, "
        "workflow_node_index, workflow_item_index) SELECT gen_random_uuid(), 'resize', 'default', "
        "CASE WHEN n %% 50 = 49 THEN 'FAILED' ELSE 'COMPLETED' END, 'sha', %s, 1, n "
        "FROM generate_series(0, 149) AS n",
        (shop["id"],),
    )
    connection.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER USER")
    page = ask(f"/workflows/{shop['id']}?node=1").text
    first = [int(one) for one in re.findall(r'<td class="number">(\d+)</td>\s*<td><span', page)]
    assert first == [49, 99, 149, *(n for n in range(98) if n != 49)]
    following = re.search(r'rel="next" href="([^"]*items=[^"]*)"', page)
    assert following is not None
    more = ask(address(following, f"/workflows/{shop['id']}")).text
    rest = [int(one) for one in re.findall(r'<td class="number">(\d+)</td>\s*<td><span', more)]
    assert sorted(first + rest) == list(range(150))


def test_rows_that_contradict_each_other_are_a_banner(
    ask: Ask, shop: dict[str, Any], connection: Database
) -> None:
    assert "contradict each other" not in ask(f"/workflows/{shop['id']}").text
    connection.execute("UPDATE horsies_workflows SET open_nodes = 1")
    page = ask(f"/workflows/{shop['id']}").text
    assert "contradict each other" in page
    assert "the run counts 1 open" in page


def test_the_list_filters_by_status_name_and_key(
    ask: Ask, shop: dict[str, Any], connection: Database
) -> None:
    connection.execute("UPDATE horsies_workflows SET workflow_key = 'books-11'")
    for query in ("", "?status=open", "?name=import+%3Cshop%3E", "?key=books-11", "?since=15m"):
        assert f'data-key="{shop["id"]}"' in ask(f"/workflows{query}").text, query
    for query in ("?status=FAILED", "?name=other", "?key=x"):
        assert "No run matches these filters" in ask(f"/workflows{query}").text, query
    connection.execute("DELETE FROM horsies_workflows")
    assert "No workflow has been started yet" in ask("/workflows").text


def test_the_list_has_pages(ask: Ask, connection: Database) -> None:
    connection.execute(
        "INSERT INTO horsies_workflows (id, name, status, on_error, definition_key, fingerprint, "
        "root_workflow_id, total_nodes, open_nodes) SELECT id, 'run', 'COMPLETED', 'fail', 'key', 'x', "
        "id, 1, 0 FROM (SELECT gen_random_uuid() AS id FROM generate_series(1, 70)) AS made"
    )
    page = ask("/workflows").text
    seen = set(re.findall(r'<tr data-key="([^"]+)"', page))
    following = re.search(r'rel="next" href="([^"]*)"', page)
    assert following is not None
    more = set(re.findall(r'<tr data-key="([^"]+)"', ask(address(following, "/workflows")).text))
    assert (len(seen), len(more), len(seen | more)) == (50, 20, 70)


def test_the_error_of_a_run_is_shown_as_text(
    ask: Ask, shop: dict[str, Any], connection: Database
) -> None:
    error = '{"error_code":"STOPPED","message":"<b>enough</b>","data":null,"exception":null}'
    connection.execute("UPDATE horsies_workflows SET error = %s", (error,))
    page = ask(f"/workflows/{shop['id']}").text
    assert "<bdi>STOPPED</bdi></b> <bdi>&lt;b&gt;enough&lt;/b&gt;</bdi>" in page
