"""Search words for pages that do not contain them. Each word weighs more than a title, so this list has
only words that lead to no other page: "human" stands for "human in the loop", because "loop" should lead
to event loops.
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
    "results.md": ["traceback", "tracebacks", "stacktrace", "value"],
    "retries.md": ["backoff", "jitter", "exponential"],
    "schedule-patterns.md": ["cron", "crontab", "hourly", "daylight", "dst"],
    "scheduling.md": ["recurring", "periodic", "beat", "night"],
    "sending.md": ["eta", "countdown", "defer"],
    "stopping.md": ["sigterm", "graceful"],
    "testing.md": ["mock", "fake", "stub"],
    "time-limits.md": ["revoke", "abort", "timeout", "longer"],
    "troubleshooting.md": ["stuck", "hangs"],
    "workflow-tutorial.md": ["human"],
    "workflows-steering.md": ["human"],
    "workflows.md": ["dag", "chord", "chain", "pipeline", "element"],
}
