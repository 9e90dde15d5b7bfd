"""Workflows. Assertions outside test modules explain themselves too."""

import pytest

pytest.register_assert_rewrite("tests.workflow.duet", "tests.workflow.pictures")
