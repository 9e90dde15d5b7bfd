"""The first step after each code that a running system may show; the page of codes prints them."""

# ruff: noqa: E501
from __future__ import annotations

REMEDIES = {
    "BROKER_ERROR": "Check that the database answers, then read the result again; the task is not affected.",
    "BROKER_NOT_CONFIGURED": "Build the workflow with `app.workflow`, or get the handle from the application.",
    "DB_OPERATION_FAILED": "Try again if `error.retryable` is true; `horsies doctor` checks the server.",
    "ENQUEUE_FAILED": "Pass the error to `retry_send` or `retry_start` if `error.retryable` is true: it stores at "
    "most once.",
    "EVENT_LOOP_RUNNING": "Await `get_async` or `result_async` instead.",
    "INTERNAL_FAILED": "Report it with the message; see [getting help](getting-help.md).",
    "LOOP_RUNNER_FAILED": "Await `wait_async` instead.",
    "MAP_ITEMS_FAILED": "Read the failed items in `data`, fix the cause, then `horsies workflow retry ID`.",
    "MEMORY_LIMIT": "Raise [`memory_limit_mb`](time-limits.md#limit-the-memory), or make the task use less; `horsies show ID` "
    "has both figures.",
    "NODE_NOT_FOUND": "Compare the id with `horsies workflow show ID`.",
    "NOTHING_TO_RETRY": "Look at the run with `horsies workflow show ID`; no node has failed.",
    "PAYLOAD_MISMATCH": "Use a key that identifies the request, or send the same arguments again.",
    "PAYLOAD_TOO_LARGE": "[Pass large data by reference](cookbook.md#pass-large-files-by-reference).",
    "PYDANTIC_HYDRATION_ERROR": "Read the result with a release that has the old type, or as JSON: "
    "`app.get_result(id)`.",
    "RESULT_DESERIALIZATION_ERROR": "Look for a program that writes to the tables; send the task again.",
    "RESULT_NOT_AVAILABLE": "Read it with a handle from the application; `horsies show ID` has the outcome.",
    "RESULT_NOT_READY": "Wait: pass a `timeout_ms` above 0.",
    "RESULT_TOO_LARGE": "Read the items of the map one by one, by the ids of their tasks.",
    "RETRY_LATER": "Raise `max_retries`, or find out why the other side keeps asking for patience.",
    "RETURN_TYPE_MISMATCH": "Correct the annotation or the value; your type checker shows the place.",
    "SEND_SUPPRESSED": "Send from a function, not while a module is imported.",
    "SIGNAL_NOT_FOUND": "Use one of the names in the message.",
    "SIGNAL_TIMEOUT": "Start a new run, or retry the node with `horsies workflow retry ID`.",
    "STEP_NOT_FOUND": "Use the name of a recorded step; `horsies durable --help` has the commands that list them.",
    "STEP_TIMEOUT": "Raise the [`timeout_ms`](durable-functions.md#what-replays) of the step, or list the code in its policy to "
    "try again.",
    "SUBWORKFLOW_FAILED": "Look at the child run: its id is in the error.",
    "SUBWORKFLOW_LOAD_FAILED": "Add the module of the definition to `discover_tasks`, deploy, then "
    "`horsies workflow retry ID`.",
    "TASK_CANCELLED": "Nothing; `horsies history` shows who cancelled it.",
    "TASK_ENDED": "Nothing can be changed any more; send the task again.",
    "TASK_EXCEPTION": "Return the type that the function declares; `horsies show ID` has the message.",
    "TASK_EXPIRED": "More workers, or a later `good_until`.",
    "TASK_IS_WORKFLOW_TASK": "Retry its run: `horsies workflow retry ID`.",
    "TASK_NOT_CANCELLABLE": "Nothing: it has ended. Pass `include_running=True` for one that runs.",
    "TASK_NOT_FOUND": "Compare the database and the schema of sender and reader; retention may have deleted it.",
    "TASK_NOT_DURABLE": "Name a task whose function is durable.",
    "TASK_NOT_HELD": "Nothing: the task is not held back.",
    "TASK_NOT_RETRYABLE": "Wait until it has ended.",
    "TASK_RUNNING": "Wait until the attempt has ended, or cancel the task.",
    "TASK_TIMEOUT": "Raise [`timeout_ms`](time-limits.md), make the task shorter, or list the code to retry it.",
    "TRANSACTION_CONFLICT": "List the code in `auto_retry_for`: nothing was stored, so a retry is safe.",
    "TRANSACTION_LOST": "List the code in `auto_retry_for`: nothing was stored, so a retry is safe.",
    "TRANSACTION_NOT_COMMITTED": "Leave COMMIT and ROLLBACK to Horsies; see [exactly once](exactly-once.md).",
    "UNHANDLED_EXCEPTION": "`horsies show ID --payload` has the traceback. Map the exception to your own code to "
    "tell it from others.",
    "UPSTREAM_SKIPPED": "Look for the failed node before this one.",
    "VALIDATION_FAILED": "Correct what the message names; nothing was stored.",
    "WAIT_TIMEOUT": "The task runs on. `horsies explain ID` says why it has not ended.",
    "WORKER_CRASHED": "`horsies show ID` has the signal or exit code: 9 often means out of memory. List the code in "
    "`auto_retry_for` if the task may run twice.",
    "WORKER_RESOLUTION_ERROR": "Add the module to `discover_tasks`, deploy the worker, then `horsies retry ID`.",
    "WORKER_SERIALIZATION_ERROR": "Deploy workers of the release that sent the call, then `horsies retry ID`.",
    "WORKER_STOPPED": 'A longer `--shutdown-grace`, or [`on_stop="requeue"`](stopping.md#interrupted-tasks).',
    "WORKFLOW_CANCELLED": "Nothing; the reason is in the message.",
    "WORKFLOW_CTX_MISSING_ID": "Ask for a node of this workflow, and list it in `workflow_ctx_from`.",
    "WORKFLOW_ENDED": "Start a new run.",
    "WORKFLOW_ENQUEUE_FAILED": "`horsies workflow show ID` has the message; fix it, then `horsies workflow retry ID`.",
    "WORKFLOW_EXPIRED": "Resume runs sooner, or raise `paused_workflow_auto_cancel_after`.",
    "WORKFLOW_FAILED": "`horsies workflow show ID` shows what happened.",
    "WORKFLOW_NOT_FOUND": "Compare the database and the schema; retention may have deleted the run.",
    "WORKFLOW_NOT_RETRYABLE": "Start a new run.",
    "WORKFLOW_PAUSED": "`horsies workflow resume ID`.",
    "WORKFLOW_SUCCESS_CASE_NOT_MET": "Look for the failed nodes of each case: `horsies workflow show ID`.",
}
# Mistakes that are found when an application starts: their message has the place and the fix.
AT_THE_START = "Correct what the message names: it has the file, the line and the fix. `horsies check` finds all of them."
