"""The application of `horsies demo`: tasks, a workflow and a schedule to read and to copy."""
