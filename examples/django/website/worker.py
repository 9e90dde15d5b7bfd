"""The module that a worker imports: it sets up Django, then finds the tasks of all installed applications."""

import os

import django
from django.utils.module_loading import autodiscover_modules

from website.background import app as app

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "website.settings")
django.setup()
autodiscover_modules("tasks")
