"""Runs of workflows: start, wait for, control, list and draw them."""
