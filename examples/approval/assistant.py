"""Answers that a language model drafts and a person approves.

`complete` stands for the call of a model's API. It is async: with `--async-children` one process has many
such calls open at a time.
"""

import asyncio
from datetime import timedelta

from horsies import (
    Horsies,
    MapNode,
    RetryLater,
    RetryPolicy,
    SignalNode,
    TaskFailed,
    WorkflowDefinition,
    WorkflowSpec,
    current_task,
    from_node,
)

app = Horsies()


class RateLimited(Exception):
    """The model asks for patience."""

    retry_after_seconds = 0.2


async def complete(prompt: str, attempt: int) -> str:
    """Return the model's answer; the first call of each prompt meets the rate limit."""
    await asyncio.sleep(0.05)
    if attempt == 1:
        raise RateLimited
    return f"[{prompt}]"


@app.task
def plan(question: str) -> list[str]:
    """Split the answer into sections; one task drafts each of them."""
    return [f"{part} of {question}" for part in ("the summary", "the details", "the risks")]


@app.task(
    timeout_ms=120_000,
    retry_policy=RetryPolicy.exponential(
        0.5, max_retries=8, max_delay_seconds=60, auto_retry_for=[ConnectionError, "TASK_TIMEOUT"]
    ),
)
async def draft(section: str) -> str:
    """Let the model write one section; wait as long as its rate limit asks for."""
    try:
        return await complete(f"Write {section}", current_task().attempt)
    except RateLimited as limit:
        raise RetryLater(limit.retry_after_seconds, "the model's rate limit") from limit


@app.task
def combine(sections: list[str]) -> str:
    """Join the sections."""
    return "\n".join(sections)


@app.task
def publish(text: str, approved: bool) -> str:
    """Publish an approved answer; this is the step that cannot be taken back."""
    if not approved:
        raise TaskFailed("REJECTED", "A person has rejected the answer.")
    return f"published {len(text.splitlines())} sections"


class Answer(WorkflowDefinition[str]):
    """Plan, draft two sections at a time, combine, wait for a person, publish."""

    name = "answer"
    definition_key = "assistant.answer"

    @classmethod
    def build_with(cls, app: Horsies, question: str) -> WorkflowSpec[str]:
        """Build the graph for one question."""
        sections = plan.node(node_id="plan")(question=question)
        drafts = MapNode(draft, over=sections, max_parallel=2, node_id="drafts")
        text = combine.node(node_id="text")(sections=from_node(drafts))
        approval = SignalNode(
            "approve",
            value_type=bool,
            timeout=timedelta(days=2),
            waits_for=[text],
            node_id="approval",
        )
        published = publish.node(node_id="published")(
            text=from_node(text), approved=from_node(approval)
        )
        return app.workflow(
            "answer", [sections, drafts, text, approval, published], output=published
        )
