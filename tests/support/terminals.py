"""Commands in their own terminal: a pseudo-terminal with a session, job control and Ctrl-C."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.wait import wait_until

CTRL_C = "\x03"
# A session leader without a terminal gets the first terminal that it opens.
TAKE_TERMINAL = 'exec "$@" <"$0"'


class Terminal:
    """A command in the foreground of a terminal; ``destroy`` ends all processes that it started."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self.shown = ""
        try:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", TAKE_TERMINAL, os.ttyname(slave), *command],
                cwd=directory,
                env={**os.environ, "NO_COLOR": "1", **environment},
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
                pass_fds=descriptors,
            )
        finally:
            os.close(slave)
        self._seen: dict[int, psutil.Process] = {}

    def read(self) -> str:
        """Return the terminal's output so far."""
        # There is no new output, or every process has closed the terminal.
        with suppress(OSError):
            while data := os.read(self._master, 1 << 16):
                self.shown += data.decode(errors="replace")
        return self.shown

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Wait until the terminal has shown this text this many times."""
        wait_until(
            lambda: self.read().count(text) >= times, 60.0, lambda: f"{text!r} in {self.shown}"
        )
        self.family()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        """Close the terminal, so that the kernel sends SIGHUP to the foreground processes."""
        os.close(self._master)
        self._master = os.open(os.devnull, os.O_RDWR)

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        # Read the terminal, because its writers would block otherwise.
        wait_until(lambda: self.read() is None or self.process.poll() is not None, 60.0, self.read)
        self.read()
        return self.process.wait()

    def family(self) -> list[psutil.Process]:
        """Return the live processes that the command started."""
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[one.pid] = one
        return [one for one in self._seen.values() if one.is_running()]

    def destroy(self) -> None:
        family = self.family()
        self.process.kill()
        self.process.wait()
        for one in family:
            # Identify processes by start time as well as by process id.
            with suppress(psutil.NoSuchProcess):
                one.kill()
        os.close(self._master)
