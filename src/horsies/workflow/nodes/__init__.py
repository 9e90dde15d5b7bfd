"""The nodes, policies and contexts that users write."""
