"""Defaults and limits for queries and checks, in their own module so that applications need not import
the queries.
"""

LIMIT_DEFAULT = 100
LIMIT_MAX = 1_000
PING_TIMEOUT_SECONDS = 2.0
# The delay after its slot at which a schedule is overdue.
OVERDUE_SECONDS = 15.0
# The age limit of the lost workers to search for: longer than any pause between two checks.
LOSSES_SECONDS = 3600.0
LOSSES_MOST = 10_000
