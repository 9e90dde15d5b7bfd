"""Words that readers search for but that the page does not contain: the site's search finds the page by
them.

Each word counts for the whole page, more than a title does. So only words that lead nowhere else belong
here: "human" stands for "human in the loop", because "loop" belongs to event loops.
"""

from __future__ import annotations

WORDS = {
    "async-tasks.md": ["gevent", "eventlet", "coroutine", "coroutines"],
    "cli.md": ["locator", "target"],
    "cookbook.md": ["dead", "letter", "dlq", "poison", "llm", "openai"],
    "deployment.md": ["docker", "container"],
    "how-it-works.md": ["broker", "architecture", "dies"],
    "idempotency.md": ["double", "click", "clicks", "duplicate", "deduplicate", "deduplication"],
    "keys.md": ["tenant", "fairness", "starvation"],
    "large-payload.md": ["s3", "blob", "upload", "bucket", "attachment"],
    "logs.md": ["logging"],
    "personal-data.md": ["gdpr", "privacy", "erasure", "anonymize"],
    "queues.md": ["throttle", "throttling", "semaphore", "mutex"],
    "recovery.md": ["crash", "retention", "cleanup"],
    "results.md": ["traceback", "tracebacks", "stacktrace"],
    "retries.md": ["backoff", "jitter", "exponential"],
    "scheduling.md": ["recurring", "periodic", "hourly", "daylight", "dst", "beat", "night"],
    "sending.md": ["eta", "countdown", "defer"],
    "stopping.md": ["sigterm", "graceful"],
    "testing.md": ["mock", "fake", "stub"],
    "time-limits.md": ["revoke", "abort"],
    "troubleshooting.md": ["stuck", "hangs", "waits"],
    "workflow-tutorial.md": ["human"],
    "workflows-steering.md": ["human"],
    "workflows.md": ["dag", "chord", "chain", "pipeline", "element"],
}
