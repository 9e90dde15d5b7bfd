"""Decides when a schedule is due: patterns, and the pure arithmetic from one slot to the next."""
