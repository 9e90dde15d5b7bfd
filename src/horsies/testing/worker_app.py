"""The application that a test's worker loads; it uses the test's database."""

from __future__ import annotations

import os

from horsies.locate import load_app
from horsies.testing.database import point_at
from horsies.testing.worker import APP_VARIABLE, DATABASE_VARIABLE

app = load_app(os.environ[APP_VARIABLE])
point_at(app, os.environ[DATABASE_VARIABLE])
