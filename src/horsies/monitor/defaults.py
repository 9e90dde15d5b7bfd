"""Defaults and limits of the queries, in a module that an application loads without the queries."""

LIMIT_DEFAULT = 100
LIMIT_MAX = 1_000
PING_TIMEOUT_SECONDS = 2.0
