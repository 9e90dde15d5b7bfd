"""Send one task and wait for its result."""

from tasks import add

print(add.enqueue(1, 2).result(timeout_ms=10_000))
