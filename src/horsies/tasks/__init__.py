"""Tasks: definitions, requests, sending, results, outcomes and recovery."""
