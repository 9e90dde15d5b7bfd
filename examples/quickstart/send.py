"""Send one task and wait for its result."""

from tasks import add

handle = add.send(1, 2).unwrap()
result = handle.get(timeout_ms=10_000)
print(result.unwrap())
