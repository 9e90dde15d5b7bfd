"""Database access: the only package that contains SQL."""

try:
    import psycopg as psycopg  # the first import of it
except ImportError as error:
    raise ImportError(
        "psycopg finds no libpq: install 'horsies[binary]', or the libpq of your system."
    ) from error
