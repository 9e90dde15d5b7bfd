"""Texts that a language model writes and a person improves, as one durable function.

`PretendModel` stands for the client of a model; put your provider behind the same interface.
"""

import asyncio
from datetime import timedelta
from typing import Protocol

from pydantic import BaseModel

from horsies import AsyncDurable, Horsies, RetryPolicy, TaskFailed

app = Horsies()
ROUNDS_MAX = 5
AGAIN = RetryPolicy.exponential(0.1, max_retries=8, auto_retry_for=[ConnectionError])


class Model(Protocol):
    """What this program needs of a language model."""

    async def complete(self, prompt: str) -> str:
        """Return the answer to a prompt."""


class PretendModel:
    """Answers without a network; every second call loses its connection."""

    def __init__(self) -> None:
        self._calls = 0

    async def complete(self, prompt: str) -> str:
        """Return the prompt in brackets."""
        await asyncio.sleep(0.05)
        self._calls += 1
        if self._calls % 2:
            raise ConnectionError("the provider is busy")
        return f"[{prompt}]"


model: Model = PretendModel()


class Feedback(BaseModel):
    """The decision of a person about a draft."""

    approved: bool
    wish: str = ""


async def complete(prompt: str) -> str:
    """One call of the model: recorded, so that no crash pays for it twice once it has answered."""
    return await model.complete(prompt)


async def publish(text: str) -> str:
    """Publish the text."""
    return f"published {text}"


async def withdraw(topic: str) -> None:
    """Tell the readers of the drafts that none will be published."""
    print(f"no text about {topic}", flush=True)


@app.durable("write", signals={"feedback": Feedback})
async def write(ctx: AsyncDurable, topic: str) -> str:
    """Write a text about a topic, and again while a person has wishes."""
    await ctx.on_cancel(withdraw, topic)
    ask = ctx.with_options(name="ask", retry=AGAIN)
    facts, risks = await ctx.gather(
        ask.call(complete, f"facts about {topic}"), ask.call(complete, f"risks of {topic}")
    )
    prompt = f"{topic} with {facts} and {risks}"
    for _ in range(ROUNDS_MAX):
        text = await ctx.with_options(name="draft", retry=AGAIN).step(complete, prompt)
        feedback = await ctx.wait_signal("feedback", Feedback, timeout=timedelta(days=2))
        if feedback.approved:
            return await ctx.step(publish, text)
        prompt = f"{topic}, {feedback.wish}"
    raise TaskFailed("NEVER_APPROVED", f"No draft about {topic} was approved.")
