"""Builds a plan from nodes: checks the graph, freezes it, and writes it as JSON."""
