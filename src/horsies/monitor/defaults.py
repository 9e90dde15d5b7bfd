"""Defaults and limits for queries and checks; separate, so that an application need not load the queries."""

LIMIT_DEFAULT = 100
LIMIT_MAX = 1_000
PING_TIMEOUT_SECONDS = 2.0
# A schedule is overdue this long after its slot.
OVERDUE_SECONDS = 15.0
# How far back lost workers are searched for: further than any relevant pause between two checks.
LOSSES_SECONDS = 3600.0
LOSSES_MOST = 10_000
