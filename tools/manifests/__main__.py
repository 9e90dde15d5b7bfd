"""Validate the manifests and the rendered chart in deploy/ against the schemas of Kubernetes.

Every object must fit the oldest and the newest version of Kubernetes whose schemas are installed, without an
unknown field, and the values of the chart must fit its `values.schema.json`. Objects of KEDA have no schema
here. First, both validators must reject a misspelt field.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate.utils import all_versions
from tests.support.helm import Chart, merged

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "horsies"
KEDA = "keda.sh/"
# The changes to the chart's values that reach every branch of its templates.
RELEASES: Mapping[str, dict[str, Any]] = {
    "default values": {},
    "everything on": {
        "imagePullSecrets": [{"name": "registry"}],
        "env": [{"name": "SHOP_REGION", "value": "eu"}],
        "workers": {
            "mail": {
                "queues": ["mail", "reports"],
                "extraArgs": ["--loglevel=INFO"],
                "maxUnavailable": "50%",
                "autoscaling": {"enabled": True, "minReplicas": 0},
            }
        },
        "web": {"actions": True},
    },
    "everything off": {
        "scheduler": {"enabled": False},
        "web": {"enabled": False},
        "migrate": {"enabled": False},
    },
}


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of the plain manifests and of the chart, each with its source."""
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for one in yaml.safe_load_all(path.read_text("utf-8")):
            yield path.name, one
    chart = Chart(CHART)
    for name, changes in RELEASES.items():
        for one in chart.documents("shop", **changes):
            yield f"the chart with {name}", one


def refusals(objects: list[tuple[str, dict[str, Any]]], version: str) -> Iterator[str]:
    """Yield the errors that this version of Kubernetes reports."""
    for place, one in objects:
        if one["apiVersion"].startswith(KEDA):
            continue
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(map(str, error.path))
            name = f"{one['kind']} {one['metadata']['name']}"
            yield f"{place}: {name}: {path}: {error.message} (Kubernetes {version})"


def refused_values() -> Iterator[str]:
    """Yield the values that the chart's schema rejects."""
    for name, changes in RELEASES.items():
        yield from (f"values with {name}: {message}" for message in _value_errors(changes))


def _value_errors(changes: dict[str, Any]) -> list[str]:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    values = merged(Chart(CHART).values, changes)
    return [
        f"{'.'.join(map(str, error.path))}: {error.message}"
        for error in jsonschema.Draft7Validator(schema).iter_errors(values)
    ]


def check_the_validators(objects: list[tuple[str, dict[str, Any]]], versions: list[str]) -> None:
    """Misspell a field of every object and a value of the chart; each must be rejected."""
    misspelt = [(place, {**one, "spec": {**one["spec"], "replcas": 1}}) for place, one in objects]
    known = [one for _, one in misspelt if not one["apiVersion"].startswith(KEDA)]
    for version in versions:
        found = len(list(refusals(misspelt, version)))
        assert found == len(known) > 0, f"only {found} of {len(known)} misspelt objects are refused"
    assert _value_errors({"workers": {"mail": {"proceses": 1}}}), "a misspelt value is accepted"


def main() -> int:
    """Print all errors; return 1 if there is any."""
    objects = list(manifests())
    versions = [all_versions()[0], all_versions()[-1]]
    check_the_validators(objects, versions)
    found = [*(text for one in versions for text in refusals(objects, one)), *refused_values()]
    for text in found:
        print(text)
    print(f"{len(objects)} objects, Kubernetes {' and '.join(versions)}: {len(found)} refused")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
