"""Start a worker, send tasks to it, and record the files that each task enters; see `tools.way`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from horsies.db.embedded import start_or_join
from tools.way import RECORDINGS

WARM_UP = 5
TIMEOUT_MS = 100_000


def main() -> None:
    """Warm everything up, then record one task at a time."""
    os.environ["HORSIES_TRACE_DATABASE"] = start_or_join(
        os.environ["HORSIES_TRACE_DATABASE"], keep_data=False
    )
    from tools.trace.app import add, app

    command = [sys.executable, "-m", "horsies", "worker", "tools.trace.app:app", "--processes", "1"]
    worker = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        switch = Path(os.environ["HORSIES_TRACE_SWITCH"])
        for number in range(-WARM_UP, RECORDINGS):
            with switch.open("r+b") as file:
                file.write(bytes([max(number + 1, 0)]))
            handle = add.send(1, number).unwrap()
            assert handle.get(timeout_ms=TIMEOUT_MS).ok_value == 1 + number
            with switch.open("r+b") as file:
                file.write(b"\0")
    finally:
        app.close()
        worker.send_signal(signal.SIGTERM)
        worker.wait(timeout=30)


if __name__ == "__main__":
    main()
