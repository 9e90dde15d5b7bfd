"""The module that a worker imports."""

from __future__ import annotations

import os

import django

from tests.support.apps.django_site.background import app as app

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.support.apps.django_site.settings"
django.setup()

from tests.support.apps.django_site import tasks as tasks  # noqa: E402 - Django must be set up
