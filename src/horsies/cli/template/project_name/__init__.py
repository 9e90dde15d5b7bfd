"""The background tasks of project_name."""
