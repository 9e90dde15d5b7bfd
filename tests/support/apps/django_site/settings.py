"""Settings of the site."""

from __future__ import annotations

from psycopg.conninfo import conninfo_to_dict

from tests.support.apps.django_site.background import app

_parts = conninfo_to_dict(app.database_url)
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _parts["dbname"],
        "USER": _parts.get("user") or "",
        "PASSWORD": _parts.get("password") or "",
        "HOST": _parts.get("host") or "",
        "PORT": _parts.get("port") or "",
    }
}
USE_TZ = True
TASKS = {
    "default": {
        "BACKEND": "horsies.django.HorsiesBackend",
        "QUEUES": ["default", "mail", "unknown"],
        "OPTIONS": {"app": "tests.support.apps.django_site.background.app", "database": "default"},
    },
    "plain": {
        "BACKEND": "horsies.django.HorsiesBackend",
        "OPTIONS": {"app": "tests.support.apps.django_site.background.plain"},
    },
    "wrong": {"BACKEND": "horsies.django.HorsiesBackend", "OPTIONS": {"app": "no.such.app"}},
    "misspelt": {"BACKEND": "horsies.django.HorsiesBackend", "OPTIONS": {"databse": "default"}},
}
