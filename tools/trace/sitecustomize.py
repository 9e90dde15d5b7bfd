"""Records the files of the package that a process enters while the tracer's switch is on. Python imports
this module at start-up if its folder is on PYTHONPATH. The switch is the first byte of the file
HORSIES_TRACE_SWITCH: zero is off, any other number is the number of a recording. Each new file of a
recording is appended to HORSIES_TRACE_FILES. Forked children inherit the tracer.
"""

import mmap
import os
import sys
import threading


def _install() -> None:
    with open(os.environ["HORSIES_TRACE_SWITCH"], "rb") as file:
        switch = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    log = os.open(os.environ["HORSIES_TRACE_FILES"], os.O_WRONLY | os.O_APPEND)
    package = os.environ["HORSIES_TRACE_PACKAGE"]
    seen: set[tuple[int, str]] = set()

    def trace(frame, event, argument):  # type: ignore[no-untyped-def]
        number = switch[0]
        if not number or event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith(package) and (number, name) not in seen:
            seen.add((number, name))
            os.write(log, f"{number} {name}\n".encode())

    sys.setprofile(trace)
    threading.setprofile(trace)


if "HORSIES_TRACE_SWITCH" in os.environ:
    _install()
