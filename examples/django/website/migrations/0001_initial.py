"""Create the table of orders."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]
    """The table of orders."""

    initial = True
    operations = (
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("article", models.CharField(max_length=100)),
                ("pieces", models.IntegerField()),
                ("task_id", models.CharField(max_length=36, null=True)),
            ],
        ),
    )
