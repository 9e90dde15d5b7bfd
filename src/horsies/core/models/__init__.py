"""The package that contains `horsies.core.models.queues`; import everything else from `horsies`."""
