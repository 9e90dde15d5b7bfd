"""Ask a question, show the draft, and wait until a person has approved or rejected it."""

import sys
import time

from assistant import Answer, app

from horsies import TaskFailed, WorkflowHandle, WorkflowTaskStatus


def wait_for_draft(run: WorkflowHandle[str]) -> str:
    """Wait until the run has reached its approval; return the text to approve."""
    while True:
        nodes = {node.node_id: node for node in run.tasks().unwrap()}
        if nodes["approval"].status is not WorkflowTaskStatus.PENDING:
            text = nodes["text"].result
            return str(text.ok) if text else ""
        time.sleep(0.1)


run = Answer.build_with(app, " ".join(sys.argv[1:]) or "life").start().unwrap()
print(wait_for_draft(run))
print("\nApprove it with this command, or on the page of the run in the dashboard:")
print(f"  horsies workflow signal {run.workflow_id} approve true", flush=True)
try:
    print(run.result())
except TaskFailed as failure:
    print(failure.message)
app.close()
