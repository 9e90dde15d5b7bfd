"""A task module that cannot be imported."""

raise RuntimeError("the shop is closed")
