"""Files the type checker reads; every ``type: ignore`` in them marks an error that must be found."""
