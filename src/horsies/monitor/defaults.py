"""Defaults and limits for queries and checks, in a module that an application loads without the queries."""

LIMIT_DEFAULT = 100
LIMIT_MAX = 1_000
PING_TIMEOUT_SECONDS = 2.0
# A schedule is overdue this long after its slot.
OVERDUE_SECONDS = 15.0
