"""Workflow runs: start, wait for, control, list and draw them."""
