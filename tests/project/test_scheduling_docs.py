"""The pages about schedules: their table of clock changes is what the code does."""

from __future__ import annotations

from datetime import UTC, datetime, time
from typing import Any

import horsies
from tests.support.doc_pages import code_of, page, rows, section


def test_the_slots_in_the_table_of_clock_changes_are_the_real_ones() -> None:
    names: dict[str, Any] = {name: getattr(horsies, name) for name in horsies.__all__}
    table = list(rows(section(page("schedule-patterns.md"), "When the clock changes")))
    assert len(table) == 9
    for text, gap, after, shown in table:
        pattern = eval(code_of(text), names | {"time": time})
        moment = datetime.strptime(f"2026-{after}", "%Y-%m-%d %H:%M").replace(tzinfo=UTC)
        for slot in shown.split(", "):
            moment = horsies.calculate_next_run(pattern, moment, "Europe/Berlin", gap)  # type: ignore[arg-type]
            assert moment.strftime("%m-%d %H:%M") == slot, text


def test_every_pattern_and_every_term_is_explained() -> None:
    text = page("scheduling.md") + page("schedule-patterns.md")
    for name in horsies.__all__:
        if name.startswith("Cron") or name.endswith(("Schedule", "Day", "Days", "Weekday")):
            assert f"`{name}" in text, name
