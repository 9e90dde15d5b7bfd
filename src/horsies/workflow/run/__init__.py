"""Starts, awaits, controls, lists and draws workflow runs."""
