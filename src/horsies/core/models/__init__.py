"""Leads to `horsies.core.models.queues`; import everything else from `horsies`."""
