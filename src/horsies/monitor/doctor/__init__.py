"""Doctor: checks of the schema, the server and the work, each finding with a remedy."""
