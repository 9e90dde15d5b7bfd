"""Equal values in another internal order, in this interpreter and in others."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from random import Random
from typing import Any

from pydantic import BaseModel

HASH_SEEDS = ("1", "2", "3")


def reordered(value: Any, random: Random) -> Any:
    """Return an equal value whose dicts and sets were filled in another order; lists keep their order."""
    if isinstance(value, dict):
        names = random.sample(list(value), len(value))
        return {name: reordered(value[name], random) for name in names}
    if isinstance(value, set | frozenset):
        elements = [reordered(one, random) for one in value]
        return type(value)(_refilled(elements, random))
    if type(value) in (list, tuple):
        return type(value)(reordered(one, random) for one in value)
    if isinstance(value, BaseModel):
        return value.model_copy(update=reordered(dict(value), random))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return dataclasses.replace(value, **reordered(fields, random))
    return value


def _refilled(elements: list[Any], random: Random) -> set[Any]:
    # Return a set that was larger before: it keeps its larger table, in which elements have another
    # order.
    passing = [object() for _ in range(random.choice([0, 100]))]
    filled = {*passing, *random.sample(elements, len(elements))}
    filled.difference_update(passing)
    return filled


def printed_under_hash_seeds(script: str) -> set[str]:
    """Run the script in interpreters that hash text differently and return their output."""
    return {_printed(script, seed) for seed in HASH_SEEDS}


def _printed(script: str, seed: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    return finished.stdout
