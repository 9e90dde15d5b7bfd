"""Database access: the only package that contains SQL."""
