"""An application whose import prints and opens files. Depending on the environment, the import also
hangs in child processes, or sets another signal for the worker's exit.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import time
from pathlib import Path

from horsies import Horsies, TaskError, TaskResult
from tests.support.apps.programs import read_config
from tests.support.workers import JOURNAL_VARIABLE

PRINTED = "the awkward application is imported"
LINGER_VARIABLE = "HORSIES_E2E_LINGERS"
LATE_SIGNAL_VARIABLE = "HORSIES_E2E_LATE_SIGNAL"
DIRECTORY = Path(os.environ[JOURNAL_VARIABLE]).parent

app = Horsies(read_config())
print(PRINTED)
logger = logging.getLogger("awkward")
logger.setLevel(logging.INFO)
logger.addHandler(logging.FileHandler(DIRECTORY / "awkward.log"))
source = open(__file__)  # noqa: SIM115


@app.on_child_process_start
def linger() -> None:
    if LINGER_VARIABLE in os.environ:
        (DIRECTORY / "lingers").touch()
        time.sleep(600)


if "HORSIES_CHILD_PROCESS" in os.environ:
    linger()
if LATE_SIGNAL_VARIABLE in os.environ:
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)


@app.task("read_and_log")
def read_and_log(text: str) -> TaskResult[str, TaskError]:
    logger.info(text)
    source.seek(0)
    return TaskResult(ok=source.readline())
