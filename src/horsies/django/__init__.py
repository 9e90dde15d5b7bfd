"""A backend for Django's task framework (``django.tasks``, Django 6): its tasks run in Horsies workers.

Only ``BACKEND`` in Django's setting ``TASKS`` imports this package; no other module of Horsies does.

Example:
    TASKS = {
        "default": {
            "BACKEND": "horsies.django.HorsiesBackend",
            "OPTIONS": {"app": "website.background.app", "database": "default"},
        }
    }
"""

from horsies.django.backend import HorsiesBackend

__all__ = ["HorsiesBackend"]
