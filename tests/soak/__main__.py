"""`python -m tests.soak --seconds 600 --seed 1`: a load, random faults, and a comparison at the end.

Exits with 1 when anything was lost, repeated or left behind. The same seed makes the same plan of faults.
"""

from __future__ import annotations

import argparse
import random
import sys

from tests.soak.run import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults happen; 600")
    parser.add_argument("--seed", type=int, help="the seed of load and faults; default: a new one")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    report = soak(options.seconds, seed)
    print("\n".join(report.lines()))
    return 1 if report.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
