"""Workflows. Assertions outside test modules explain themselves too."""

import pytest

pytest.register_assert_rewrite("tests.support.oracle.compare", "tests.support.oracle.pictures")
