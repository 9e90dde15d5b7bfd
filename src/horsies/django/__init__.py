"""A backend for Django's task framework (``django.tasks``, Django 6): its tasks run in Horsies workers.

This package is imported only through ``BACKEND`` in Django's setting ``TASKS``; no other Horsies module
imports it.

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
