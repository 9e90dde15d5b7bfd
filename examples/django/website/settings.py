"""Settings of the site; its database is the one of its tasks."""

from __future__ import annotations

import os

from psycopg.conninfo import conninfo_to_dict

from website.background import app

SECRET_KEY = os.environ.get("WEBSITE_SECRET_KEY", "only for development")
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
INSTALLED_APPS = ["website"]
ROOT_URLCONF = "website.urls"
WSGI_APPLICATION = "website.wsgi.application"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

_database = conninfo_to_dict(app.database_url)
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _database["dbname"],
        "USER": _database.get("user", ""),
        "PASSWORD": _database.get("password", ""),
        "HOST": _database.get("host", ""),
        "PORT": _database.get("port", ""),
        "CONN_MAX_AGE": 60,
    }
}
