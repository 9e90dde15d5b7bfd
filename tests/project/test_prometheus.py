"""The alert rules and the Grafana dashboard: every expression uses metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from horsies.findings import CATALOGUE as FINDINGS
from horsies.findings import Level
from horsies.monitor.diagnose.doctor import CHECKS
from horsies.monitor.metrics import CATALOGUE, NOT_CHECKED
from tests.support.alerts import RULES, reached_by, rules
from tests.support.workers import REPOSITORY

DASHBOARD = REPOSITORY / "docs" / "prometheus" / "grafana.json"
PAGE = REPOSITORY / "docs" / "metrics.md"

TOKEN = re.compile(
    r"""\s+ | (?P<text>"(?:[^"\\]|\\.)*") | (?P<range>\[(?:\d+[smhd]|\$__rate_interval)\])
    | (?P<number>\d+(?:\.\d+)?) | (?P<name>[a-zA-Z_][a-zA-Z0-9_]*) | (?P<sign>=~|!~|!=|>=|<=|==|[-+*/<>=])
    | (?P<open>[({]) | (?P<close>[)}]) | ,""",
    re.VERBOSE,
)
FUNCTIONS = {
    *("sum", "max", "topk", "rate", "increase", "absent", "histogram_quantile", "clamp_max"),
}
KEYWORDS = {"by", "on", "and", "or", "unless", "without"}
OF_PROMETHEUS = {"instance", "job", "le"}


def series() -> dict[str, set[str]]:
    """The labels of every time series that the metrics of the catalogue have."""
    found: dict[str, set[str]] = {}
    for metric in CATALOGUE:
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {metric.name + suffix: {*metric.labels, *OF_PROMETHEUS} for suffix in suffixes}
    return found


def tokens(expression: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(expression):
        found = TOKEN.match(expression, position)
        assert found is not None, f"{expression!r} from {expression[position:]!r}"
        position = found.end()
        if found.lastgroup:
            yield found.lastgroup, found[0]


def check(expression: str) -> None:
    """Tokenise the expression; brackets match, and every name is a function, a series or a label."""
    known, closing = series(), list[str]()
    used, labels = set[str](), set[str]()
    for kind, text in tokens(expression):
        if kind == "open":
            closing.append({"(": ")", "{": "}"}[text])
        elif kind == "close":
            assert closing, expression
            assert closing.pop() == text, expression
        elif kind == "name" and text not in FUNCTIONS | KEYWORDS:
            (used if text.startswith("horsies_") else labels).add(text)
    assert not closing, expression
    assert used, expression
    assert used <= set(known), f"{expression!r}: {used - set(known)}"
    assert labels <= set().union(*(known[name] for name in used)), expression
    for name, matchers in re.findall(r"(horsies_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*(?:=|!)", matchers)) <= known[name], expression


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return found


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_uses_metrics_and_labels_of_the_catalogue(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    summary = rule["annotations"]["summary"]
    known = {label for metric in CATALOGUE for label in metric.labels} | OF_PROMETHEUS
    assert set(re.findall(r"\$labels\.(\w+)", summary)) <= known


def test_alerts_cover_what_needs_attention() -> None:
    names = {rule["alert"] for rule in rules()}
    assert len(names) == len(rules())
    watched = " ".join(rule["expr"] for rule in rules())
    for metric in ("queue_oldest_due_seconds", "queue_children", "workers", "schedules_overdue"):
        assert f"horsies_{metric}" in watched


def test_every_red_finding_reaches_a_rule() -> None:
    reds = {code for code, entry in FINDINGS.items() if entry.level is Level.RED}
    reds |= {check.code for check in CHECKS if check.red}
    assert reds >= {
        "TASK_UNKNOWN",
        "PAYLOAD_UNREADABLE",
        "BLOCKED",
        "HELD_BY_RECORD",
        "LOCKS",
        "CRASHES",
    }
    assert {code for code in reds if reached_by(code, "red") != ["HorsiesFindingRed"]} == set()
    assert reached_by(*NOT_CHECKED) == ["HorsiesFindingRed"]


def test_a_lost_worker_is_alerted_at_once_while_another_worker_recovers_its_tasks() -> None:
    """The gauge of lost workers is 0 again as soon as another worker has seen the loss."""
    (rule,) = [one for one in rules() if one["alert"] == "HorsiesWorkerLost"]
    assert re.search(r"(^|or )increase\(horsies_workers_lost_total\[\d+m\]\) > 0", rule["expr"])
    assert "for" not in rule


def test_a_yellow_finding_reaches_one_rule_and_a_storm_of_retries_its_own() -> None:
    yellows = {code for code, entry in FINDINGS.items() if entry.level is Level.YELLOW}
    reached = {code: reached_by(code, "yellow") for code in yellows}
    assert reached.pop("TASK_RETRYING") == ["HorsiesTasksRetried"]
    assert {code for code, names in reached.items() if names != ["HorsiesFindingYellow"]} == set()
    assert reached_by("QUEUE_UNSERVED", "green") == []


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_uses_metrics_and_labels_of_the_catalogue(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        check(target["expr"])
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= 24


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels())
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_expressions_of_the_page_use_the_catalogue() -> None:
    queries = re.findall(r"query: (.+)", PAGE.read_text("utf-8"))
    assert queries
    for query in queries:
        check(query)


@pytest.mark.parametrize(
    "expression",
    [
        "horsies_nothing > 1",
        'horsies_up{queue="mail"} == 0',
        "sum by (host) (horsies_workers)",
        "sum(horsies_workers",
        "horsies_attempt_duration_seconds > 1",
        "horsies_up # 1",
    ],
)
def test_a_wrong_expression_is_found(expression: str) -> None:
    with pytest.raises(AssertionError):
        check(expression)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
