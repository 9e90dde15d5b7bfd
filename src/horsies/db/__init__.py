"""The database floor: the only place that talks SQL."""
