"""The Horsies application of this site."""

from __future__ import annotations

from collections.abc import Iterator

from django.db import close_old_connections

from horsies import CurrentTask, Horsies

app = Horsies()


@app.around_task
def fresh_connections(task: CurrentTask) -> Iterator[None]:
    """Drop connections that have broken or grown too old, as Django does around requests."""
    close_old_connections()
    yield
    close_old_connections()
