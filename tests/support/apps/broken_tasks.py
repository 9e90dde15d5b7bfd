"""An application with a task module that cannot be imported."""

from __future__ import annotations

from horsies import Horsies
from tests.support.apps.programs import read_config

app = Horsies(read_config())
app.discover_tasks(["tests.support.apps.failing_module"])
