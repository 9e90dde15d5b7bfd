"""Leads to `horsies.core.models.queues`; everything public imports from `horsies`."""
