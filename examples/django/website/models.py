"""The table of orders."""

from __future__ import annotations

from django.db import models


class Order(models.Model):  # type: ignore[misc]
    """An order, with the id of the task that confirms it."""

    article = models.CharField(max_length=100)
    pieces = models.IntegerField()
    task_id = models.CharField(max_length=36, null=True)
