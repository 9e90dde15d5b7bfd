"""Run the worker of a peer that is used as a library: ``run_worker PEER SLOTS RECYCLE``."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.peers.adapter import load


def main(peer: str, slots: str, recycle: str) -> None:
    """Run until a signal arrives."""
    adapter: Any = load(peer)
    adapter.run_worker(int(slots), int(recycle) or None)


if __name__ == "__main__":
    main(*sys.argv[1:])
