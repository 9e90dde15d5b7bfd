"""Lists the files that a task enters between `send` and its result, found by tracing real tasks.

A producer, a worker and its child run with the tracer of `tools/trace`. A few tasks warm them up; then
several are recorded one at a time. A file counts only if every recording entered it, so that heartbeats
and other timers do not matter. Traced files have a called function; the SQL files of the statements are
added by name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "src" / "horsies"
TRACER = REPOSITORY / "tools" / "trace"
STATIONS = REPOSITORY / "docs" / "internals" / "one-task.md"
RECORDINGS = 25
# The maximum number of files on the main line that a reader follows. This number must only
# decrease.
MAIN_LINE_MAX = 14
# Catalogues contain no functions, so the tracer cannot see them.
SQL = (
    *("db/statements/tasks.py", "db/statements/tasks.sql"),
    *("db/statements/turn.py", "db/statements/turn.sql"),
    *("db/functions/10_notify.sql", "db/functions/20_claim.sql"),
)


@lru_cache
def main_line() -> frozenset[str]:
    """Return the files that docs/internals/one-task.md lists as the main line."""
    page = STATIONS.read_text("utf-8")
    section = page.partition("## The main line")[2].partition("\n## ")[0]
    files = [row.split("|")[3] for row in section.splitlines() if re.match(r"\| *\d", row)]
    found = frozenset(re.findall(r"src/horsies/([\w/.]+)", " ".join(files)))
    strangers = found - files_on_the_way()
    if not found or strangers:
        raise SystemExit(f"{STATIONS.name} lists files that no task enters: {sorted(strangers)}")
    return found


@lru_cache
def files_on_the_way() -> frozenset[str]:
    """Return every file of the package on a task's path, relative to the package."""
    with tempfile.TemporaryDirectory(prefix="horsies-way-") as directory:
        # If this user is root, the embedded server runs as another user.
        Path(directory).chmod(0o711)
        switch, files = Path(directory, "switch"), Path(directory, "files")
        switch.write_bytes(b"\0")
        files.touch()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (TRACER, REPOSITORY, PACKAGE.parent))),
            "HORSIES_TRACE_SWITCH": str(switch),
            "HORSIES_TRACE_FILES": str(files),
            "HORSIES_TRACE_PACKAGE": f"{PACKAGE}{os.sep}",
            "HORSIES_TRACE_DATABASE": f"embedded://{directory}/data",
        }
        command = [sys.executable, "-m", "tools.trace.drive"]
        subprocess.run(command, env=environment, check=True, cwd=REPOSITORY, timeout=240)
        recorded: dict[int, set[str]] = {}
        for line in files.read_text("utf-8").splitlines():
            number, _, name = line.partition(" ")
            recorded.setdefault(int(number), set()).add(str(Path(name).relative_to(PACKAGE)))
    assert len(recorded) == RECORDINGS, f"only {len(recorded)} of {RECORDINGS} tasks were recorded"
    return frozenset.intersection(*map(frozenset, recorded.values())) | set(SQL)
