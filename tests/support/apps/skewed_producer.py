"""A producer with a possibly wrong clock: it sends the tasks that the test needs and prints their ids."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime

from tests.support.apps.programs import app, fail_then_work, noop, sleep_again


def main(good_until: str) -> None:
    """Send one task of each time-dependent kind."""
    deadline = datetime.fromisoformat(good_until)
    sent = {
        "delayed": noop.schedule(2).unwrap().task_id,
        "retried": fail_then_work.send().unwrap().task_id,
        "in_time": noop.with_options(good_until=deadline).send().unwrap().task_id,
        "plain": sleep_again.send(0.0).unwrap().task_id,
    }
    print(json.dumps(sent))
    print(datetime.now(UTC).isoformat())
    app.close()


if __name__ == "__main__":
    main(sys.argv[1])
