"""Horsies compared with other task queues: the same workloads, one adapter per peer."""
