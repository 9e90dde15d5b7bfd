"""The alert rules of the documentation, and the alerts that a finding triggers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tests.support.workers import REPOSITORY

RULES = REPOSITORY / "docs" / "prometheus" / "rules.yaml"
_ANY_FINDING = re.compile(r"horsies_findings\{([^}]*)\} > 0")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def rules() -> list[dict[str, Any]]:
    """Return the alert rules of the documentation."""
    document = yaml.safe_load(RULES.read_text("utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def reached_by(code: str, level: str) -> list[str]:
    """Return the names of the alerts that fire for a finding with this code and level."""
    labels = {"code": code, "level": level}
    return [
        rule["alert"]
        for rule in rules()
        if (found := _ANY_FINDING.fullmatch(rule["expr"])) and _selects(found[1], labels)
    ]


def _selects(matchers: str, labels: Mapping[str, str]) -> bool:
    return all(
        _holds(labels[name], sign, value) for name, sign, value in _MATCHER.findall(matchers)
    )


def _holds(label: str, sign: str, value: str) -> bool:
    is_equal = re.fullmatch(value, label) is not None if "~" in sign else label == value
    return is_equal != sign.startswith("!")
