"""A server whose clock a test sets."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.private_server import PrivateServer
from tests.support.workers import faketime_library


@contextmanager
def settable_clock(server: PrivateServer) -> Iterator[Path]:
    """Restart the server with a clock that follows an offset stored in a file."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("a server with a wrong clock needs root and setpriv")
    library = faketime_library()
    with tempfile.TemporaryDirectory() as directory:
        # The server runs as another user, who must have access to the directory.
        Path(directory).chmod(0o755)
        offset = Path(directory) / "offset"
        offset.write_text("+0")
        clock = [f"LD_PRELOAD={library}", f"FAKETIME_TIMESTAMP_FILE={offset}"]
        options = ["FAKETIME_NO_CACHE=1", "DONT_FAKE_MONOTONIC=1"]
        server.stop()
        server.start_through([], 5432, as_owner=["env", *clock, *options], addresses="")
        yield offset
        server.stop()
