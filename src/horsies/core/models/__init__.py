"""The package of `horsies.core.models.queues`; import everything else from `horsies`."""
