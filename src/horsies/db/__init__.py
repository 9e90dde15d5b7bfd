"""Database access: the only package that contains SQL."""

try:
    import psycopg as _psycopg  # noqa: F401
except ImportError as error:
    raise ImportError(
        "psycopg cannot find libpq: install horsies[binary], or your system's libpq package."
    ) from error
