"""Database access: the only package that contains SQL."""

try:
    import psycopg as _psycopg  # noqa: F401
except ImportError as error:
    raise ImportError(
        "psycopg finds no libpq: install the extra 'binary' of horsies, or the libpq of your system."
    ) from error
