"""The scheduler: what is due becomes tasks, once for every slot, whoever else is at it."""
