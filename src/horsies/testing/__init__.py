"""Tools for testing applications: capture sends, run tasks in the test, or start a real worker.

The pytest plugin provides the fixtures ``horsies_app``, ``horsies_database``, ``horsies_clock`` and
``horsies_worker``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horsies.testing.database import HorsiesDatabase
    from horsies.testing.execution import Attempt, Attempts
    from horsies.testing.inline import run_inline
    from horsies.testing.pending import Clock, PendingRun, clock_of, run_pending, run_pending_async
    from horsies.testing.replaying import ReplayMismatch, check_replay, replay
    from horsies.testing.sends import CapturedSend, CapturedSends, CapturedStart, capture_sends
    from horsies.testing.worker import WorkerProcess

__all__ = [
    "capture_sends",
    "run_inline",
    "run_pending",
    "run_pending_async",
    "clock_of",
    "Attempt",
    "Attempts",
    "CapturedSend",
    "CapturedSends",
    "CapturedStart",
    "Clock",
    "HorsiesDatabase",
    "PendingRun",
    "WorkerProcess",
    "replay",
    "check_replay",
    "ReplayMismatch",
]

# Load modules on first use, because pytest always imports this package to load its plugin.
_MODULES = {
    "database": ("HorsiesDatabase",),
    "execution": ("Attempt", "Attempts"),
    "inline": ("run_inline",),
    "pending": ("Clock", "PendingRun", "clock_of", "run_pending", "run_pending_async"),
    "replaying": ("ReplayMismatch", "check_replay", "replay"),
    "sends": ("CapturedSend", "CapturedSends", "CapturedStart", "capture_sends"),
    "worker": ("WorkerProcess",),
}

if not TYPE_CHECKING:

    def __getattr__(name):
        for module_name, names in _MODULES.items():
            if name in names:
                from importlib import import_module

                globals()[name] = getattr(import_module(f"{__name__}.{module_name}"), name)
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
