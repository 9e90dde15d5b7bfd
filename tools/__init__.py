"""Checks of this repository that `make check` runs and that are not tests: structure and prose."""
