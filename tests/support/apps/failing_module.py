"""A task module that does not import."""

raise RuntimeError("the shop is closed")
