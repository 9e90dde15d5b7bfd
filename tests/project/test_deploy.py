"""The files in deploy/ parse, their commands exist, and their times and queries fit the product."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import every_command
from tests.support.database import Database
from tests.support.helm import Chart
from tests.support.keys import add_keyed, limit
from tests.support.query_plans import nodes
from tests.support.rows import add_task, ago
from tests.support.workers import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
# A stop interrupts tasks at the end of the grace period and kills them five seconds later.
BEYOND_GRACE_SECONDS = 10


def parsed(words: list[str]) -> dict[str, Any]:
    """Parse a command line of the application."""
    found = every_command.parsed(words)
    named = found.get("locators") or [found.get("locator")]
    assert list(named) == ["shop.background:app"]
    return found


def documents() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text("utf-8"))


def pods() -> dict[str, dict[str, Any]]:
    """The pod of every workload, by the first word of its command."""
    found = [one["spec"]["template"]["spec"] for one in documents() if "template" in one["spec"]]
    return {pod["containers"][0]["args"][0]: pod for pod in found}


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text("utf-8"))
    return parser


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_runs_a_command_that_exists(path: Path) -> None:
    service = unit(path)["Service"]
    program, *words = shlex.split(service["ExecStart"].replace("%", ""))
    params = parsed(words)
    assert program.endswith("/bin/horsies")
    if grace := params.get("shutdown_grace"):
        assert int(service["TimeoutStopSec"]) >= grace + BEYOND_GRACE_SECONDS
        assert (service["KillMode"], service["OOMPolicy"]) == ("mixed", "continue")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_systemd_knows_every_setting_of_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        text = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", path.read_text("utf-8"))
        (tmp_path / path.name).write_text(re.sub(r"User=\S+", "User=root", text))
    names = [str(tmp_path / path.name) for path in UNITS]
    run = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names],
        capture_output=True,
        text=True,
        timeout=60,
    )
    # It also tries to reach the system's bus, which a container does not have.
    complaints = [line for line in run.stderr.splitlines() if str(tmp_path) in line]
    assert complaints == []


def test_the_environment_file_names_variables_of_the_documentation() -> None:
    lines = (DEPLOY / "systemd" / "shop.env").read_text("utf-8").splitlines()
    names = [line.partition("=")[0] for line in lines if not line.startswith("#")]
    page = (REPOSITORY / "docs" / "configuration.md").read_text("utf-8")
    assert names
    assert [name for name in names if f"`{name}" not in page] == []


def test_the_dockerfile_starts_a_worker_as_an_unprivileged_user() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    steps = [line.split(None, 1) for line in text.splitlines() if line and line[0] != "#"]
    assert steps[0][0] == "FROM"
    last = dict(steps)
    assert (last["STOPSIGNAL"], json.loads(last["ENTRYPOINT"])) == ("SIGTERM", ["horsies"])
    assert int(last["USER"]) > 0
    params = parsed(json.loads(last["CMD"]))
    assert str(params["metrics_port"]) == last["EXPOSE"]
    probe = json.loads(last["HEALTHCHECK"].partition("CMD")[2])
    compile(probe[-1], "probe", "exec")
    assert f":{last['EXPOSE']}/livez" in probe[-1]


def test_every_manifest_has_a_kind_and_runs_a_command_that_exists() -> None:
    for document in documents():
        assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys()
    found = pods()
    assert found.keys() == {"migrate", "worker", "scheduler", "web"}
    for pod in found.values():
        (container,) = pod["containers"]
        parsed(container["args"])
        names = {variable["name"] for variable in container["env"]}
        assert {"HORSIES_DATABASE_URL", "HORSIES_SCHEMA"} <= names


def test_a_pod_of_workers_has_time_to_stop_probes_and_enough_memory() -> None:
    pod = pods()["worker"]
    (container,) = pod["containers"]
    params = parsed(container["args"])
    assert pod["terminationGracePeriodSeconds"] >= params["shutdown_grace"] + BEYOND_GRACE_SECONDS
    assert container["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    (port,) = container["ports"]
    assert port["containerPort"] == params["metrics_port"]
    megabytes = 1024 * int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert (params["max_memory_per_child_mb"] + 40) * params["processes"] + 80 <= megabytes


def is_restricted(pod: dict[str, Any]) -> bool:
    """Whether a namespace with the Pod Security Standard "restricted" accepts the pod."""
    shared = pod["securityContext"]
    return (
        shared["runAsNonRoot"] is True
        and shared["runAsUser"] > 0
        and shared["seccompProfile"] == {"type": "RuntimeDefault"}
        and not {"volumes", "hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        and all(
            one["securityContext"]
            == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            for one in pod["containers"]
        )
    )


def test_every_pod_is_restricted_and_asks_for_processor_time_and_memory() -> None:
    charted = pods_of(CHART.documents("shop", workers={"mail": SCALED}))
    for pod in (*pods().values(), *charted):
        assert is_restricted(pod), pod
        (container,) = pod["containers"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["resources"]["limits"].keys() == {"memory"}


def test_the_disruption_budget_and_the_scaler_name_the_deployment_of_workers() -> None:
    named = {one["kind"]: one for one in documents() if one["metadata"]["name"] == "shop-worker"}
    labels = named["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert named["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert named["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == "shop-worker"
    assert "replicas" not in named["Deployment"]["spec"]


def test_the_scaler_counts_due_and_running_tasks(connection: Database) -> None:
    (scaler,) = [one for one in documents() if one["kind"] == "ScaledObject"]
    query = scaler["spec"]["triggers"][0]["metadata"]["query"].replace("horsies.", "public.")
    for columns in (
        {},
        {"status": "RUNNING"},
        {"status": "CLAIMED"},
        {"status": "COMPLETED"},
        {"enqueued_at": ago(-600)},
        {"held": True},
        {"queue_name": "other"},
    ):
        add_task(connection, **columns)
    assert connection.execute(query.encode()).fetchone() == (3,)


CHART = Chart(DEPLOY / "helm" / "horsies")
SCALED = {"queues": ["mail", "reports"], "autoscaling": {"enabled": True}}


def by_name(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == kind}


def pods_of(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one["spec"]["template"]["spec"] for one in objects if "template" in one["spec"]]


def test_the_chart_runs_the_same_containers_as_the_manifests() -> None:
    found = {pod["containers"][0]["args"][0]: pod for pod in pods_of(CHART.documents("shop"))}
    for name, pod in pods().items():
        (container,), (charted,) = pod["containers"], found[name]["containers"]
        # The chart has its own Job for migrations, so no other process migrates.
        env = [one for one in charted.pop("env") if one["name"] != "HORSIES_MIGRATE"]
        assert charted.pop("imagePullPolicy") == "IfNotPresent"
        assert sorted(env, key=str) == sorted(container.pop("env"), key=str)
        assert charted.pop("args") == [str(one) for one in container.pop("args")]
        assert charted == container


def test_every_set_of_workers_of_the_chart_has_time_to_stop_and_a_budget() -> None:
    objects = CHART.documents("shop", workers={"mail": {**SCALED, "shutdownGraceSeconds": 600}})
    deployments, budgets = by_name(objects, "Deployment"), by_name(objects, "PodDisruptionBudget")
    for name in ("shop-worker-default", "shop-worker-mail"):
        spec = deployments[name]
        pod = spec["template"]["spec"]
        params = parsed(pod["containers"][0]["args"])
        least = params["shutdown_grace"] + BEYOND_GRACE_SECONDS
        assert pod["terminationGracePeriodSeconds"] >= least
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        assert budgets[name]["selector"] == spec["selector"]
    assert "replicas" not in deployments["shop-worker-mail"]  # KEDA sets it
    assert deployments["shop-worker-default"]["replicas"] == 2
    served = deployments["shop-worker-mail"]["template"]["spec"]["containers"][0]["args"]
    assert list(parsed(served)["queues"]) == ["mail,reports"]


def test_the_chart_refers_to_secrets_and_contains_none() -> None:
    for pod in pods_of(CHART.documents("shop", workers={"mail": SCALED}, web={"actions": True})):
        for variable in pod["containers"][0]["env"]:
            is_secret = variable["name"].endswith(("_URL", "_TOKEN"))
            assert ("secretKeyRef" in variable.get("valueFrom", {})) == is_secret
    kinds = [one["kind"] for one in CHART.documents("shop", web={"enabled": False})]
    assert sorted(kinds) == ["Deployment", "Deployment", "Job", "PodDisruptionBudget"]


def test_the_chart_scales_by_unfinished_tasks_and_by_the_oldest_due(connection: Database) -> None:
    objects = CHART.documents("shop", schema="public", workers={"mail": SCALED})
    (scaler,) = by_name(objects, "ScaledObject").values()
    assert scaler["scaleTargetRef"]["name"] == "shop-worker-mail"
    unfinished, oldest = (one["metadata"]["query"] for one in scaler["triggers"])

    def answers() -> list[int]:
        return [connection.execute(one.encode()).fetchone()[0] for one in (unfinished, oldest)]  # type: ignore[index]

    assert answers() == [0, 0]
    for columns in (
        {"queue_name": "mail", "enqueued_at": ago(300)},
        {"queue_name": "reports"},
        {"queue_name": "reports", "status": "RUNNING"},
        {"queue_name": "mail", "enqueued_at": ago(-600)},
        {"queue_name": "mail", "held": True},
        {"queue_name": "other", "enqueued_at": ago(900)},
    ):
        add_task(connection, **columns)
    count, seconds = answers()
    assert count == 3
    assert 300 <= seconds < 600
    add_keyed(connection, "acme", queue="reports", enqueued_at=ago(700))
    count, seconds = answers()
    assert (count, seconds >= 700) == (4, True)
    limit(connection, "acme", "reports", paused_at="2026-01-01")
    count, seconds = answers()
    assert (count, seconds < 600) == (3, True)
    connection.execute("INSERT INTO horsies_queues VALUES ('mail', now())")
    assert answers()[0] == 2
    everything = CHART.documents(
        "shop", schema="public", workerDefaults={"autoscaling": {"enabled": True}}
    )
    (scaler,) = by_name(everything, "ScaledObject").values()
    assert connection.execute(scaler["triggers"][0]["metadata"]["query"].encode()).fetchone() == (
        3,
    )


def queries_of_scalers() -> list[str]:
    """Both triggers of the chart, for two queues, and those of the manifest, in the schema of the tests."""
    objects = CHART.documents("shop", schema="public", workers={"mail": SCALED})
    (scaler,) = by_name(objects, "ScaledObject").values()
    queries = [one["metadata"]["query"] for one in scaler["triggers"]]
    (manifest,) = [one for one in documents() if one["kind"] == "ScaledObject"]
    texts = [one["metadata"]["query"] for one in manifest["spec"]["triggers"]]
    return [*queries, *(text.replace("horsies.", "public.") for text in texts)]


def test_the_queries_of_scalers_read_no_ended_task(connection: Database) -> None:
    """Every part of them is answered by a partial index, whatever the planner thinks of a small table."""
    for query in queries_of_scalers():
        with connection.transaction():
            connection.execute("SET LOCAL enable_seqscan = off")
            found = connection.execute(f"EXPLAIN (FORMAT JSON) {query}".encode()).fetchone()
        assert found is not None
        assert [
            one
            for one in nodes(found[0])
            if one["Node Type"] == "Seq Scan" and one["Relation Name"] == "horsies_tasks"
        ] == []


def test_a_delayed_task_with_a_key_starts_the_first_worker_at_its_time(
    connection: Database,
) -> None:
    queries = queries_of_scalers()

    def answers() -> list[int]:
        return [connection.execute(one.encode()).fetchone()[0] for one in queries]  # type: ignore[index]

    for queue in ("mail", "default"):
        add_keyed(connection, "acme", queue=queue, enqueued_at=ago(-600))
        # The first task of a fifo lane keeps its place while it waits for its retry.
        add_keyed(connection, "acme", queue=queue, enqueued_at=ago(900), next_retry_at=ago(-600))
    assert answers() == [0, 0, 0, 0]
    # No worker has moved them to their lanes.
    for queue in ("mail", "default"):
        add_keyed(connection, "acme", queue=queue, enqueued_at=ago(800), updated_at=ago(900))
    unfinished, oldest, unfinished_by_default, oldest_by_default = answers()
    assert (unfinished, unfinished_by_default) == (1, 1)
    assert 800 <= oldest < 900
    assert 800 <= oldest_by_default < 900


def test_the_schema_of_the_chart_names_every_value_of_a_worker() -> None:
    schema = json.loads((DEPLOY / "helm" / "horsies" / "values.schema.json").read_text("utf-8"))
    worker = schema["definitions"]["worker"]["properties"]
    assert worker.keys() == CHART.values["workerDefaults"].keys()
    assert (
        worker["autoscaling"]["properties"].keys()
        == CHART.values["workerDefaults"]["autoscaling"].keys()
    )
    (queue,) = [worker["queues"]["items"]["pattern"]]
    assert re.search(queue, "mail")
    assert not re.search(queue, "it's")
