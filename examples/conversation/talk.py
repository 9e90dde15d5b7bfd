"""Start a text, show each draft, and wait until a person has approved one."""

import sys
import time

from writer import app, write

from horsies import DurableHandle, DurableStep, TaskFailed, TaskHandle


def wait_for_draft(run: DurableHandle, known: int) -> list[str]:
    """Wait until the run waits for an answer to a new draft, or has ended; return its drafts."""
    while True:
        info = run.info().unwrap()
        drafts = [str(step.result) for step in info.steps if is_draft(step)]
        if (len(drafts) > known and info.signals) or info.status.is_terminal:
            return drafts
        time.sleep(0.1)


def is_draft(step: DurableStep) -> bool:
    """Whether the step is one of the drafts: draft, draft#2 and so on, without failed tries."""
    return step.kind == "step" and step.name.partition("#")[0] == "draft"


def talk(sent: TaskHandle[str]) -> None:
    """Show every draft with the commands that answer it."""
    run, known = app.durable_handle(sent.task_id), 0
    while len(drafts := wait_for_draft(run, known)) > known:
        known = len(drafts)
        print(drafts[-1])
        print("\nAnswer in another terminal, with a wish or with your approval:")
        signal = f"horsies durable signal {sent.task_id} feedback"
        print(f"""  {signal} '{{"approved": false, "wish": "shorter"}}' writer.py""")
        print(f"""  {signal} '{{"approved": true}}' writer.py""", flush=True)


sent = write.enqueue(" ".join(sys.argv[1:]) or "life")
talk(sent)
try:
    print(sent.result())
except TaskFailed as failure:
    print(failure.message)
app.close()
