"""Count the words of text files in the background; this one file is the application and the script."""

import sys
from pathlib import Path

from horsies import Horsies, RetryPolicy, TaskFailed

WAIT_MS = 30_000

app = Horsies()


@app.task(
    exception_mapper={FileNotFoundError: "NO_SUCH_FILE"},
    retry_policy=RetryPolicy.exponential(1, max_retries=3, auto_retry_for=[BlockingIOError]),
)
def count_words(path: Path) -> int:
    """Count the words of one file."""
    return len(path.read_text().split())


def main(paths: list[Path]) -> int:
    """Send one task per file, all in one transaction, and print the results in order."""
    calls = [count_words.bind(path.resolve()) for path in paths]
    handles = count_words.send_many(calls).unwrap()
    failures = 0
    for path, handle in zip(paths, handles, strict=True):
        try:
            print(f"{handle.result(WAIT_MS):>6}  {path}")
        except TaskFailed as failure:
            failures += 1
            print(f"{failure.code:>6}  {path}")
    app.close()
    return failures


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
