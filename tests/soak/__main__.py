"""`python -m tests.soak --seconds 600 --seed 1`: a load, random faults, and a comparison at the end.

Exits with 1 when anything was lost, repeated or left behind. The same seed makes the same plan of faults.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

from tests.soak.run import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults happen; 600")
    parser.add_argument("--seed", type=int, help="the seed of load and faults; default: a new one")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="horsies-soak-"))
    print(f"soak: seed {seed}, {options.seconds:.0f} s; journal and logs: {directory}", flush=True)
    report = soak(options.seconds, seed, directory)
    print("\n".join(report.lines()))
    if report.has_failed:
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
