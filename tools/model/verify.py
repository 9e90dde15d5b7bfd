"""Verify the protocols of liveness, claims, transactions and parked runs with the model checker SPIN.

`python -m tools.model.verify` checks every property of the models in this folder in all reachable
states, then removes one rule of the protocols after another and requires a counterexample each time.
`--quick` checks smaller models, `--explain MACRO` prints the counterexample without that rule. SPIN
(package `spin`) and a C compiler must be installed. docs/internals/liveness.md describes the models.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).parent
# Exhaustive search; COLLAPSE compresses states without loss.
COMPILE = ("gcc", "-w", "-DCOLLAPSE", "-DNOFAIR", "-DMEMLIM=4096", "-o", "pan", "pan.c")
# Small models and counterexamples take less time than the optimization (3 s).
LONG, SHORT = "-O2", "-O0"
SAFETY, PROGRESS = ("-DSAFETY",), ("-DNP",)
DEPTH_MAX = 1_000_000

KILL, FREEZE, CUT_ONE, CUT_ALL = 1, 2, 4, 32


@dataclass(frozen=True, slots=True)
class Check:
    """One run of the model checker: a model, its macros, and the property that must fail, or None."""

    title: str
    model: str
    macros: tuple[str, ...] = ()
    violated: str | None = None
    search: tuple[str, ...] = SAFETY


@dataclass(frozen=True, slots=True)
class Result:
    states: int
    depth: int
    errors: int
    violated: str
    is_exhaustive: bool


def liveness(workers: int, faults: int, kinds: int = 255) -> tuple[str, ...]:
    return (f"N={workers}", f"FAULTS={faults}", f"KINDS={kinds}")


PAIR = liveness(2, 2)
TRIO_KILLED = liveness(3, 2, KILL)

PROPERTIES = (
    Check("liveness, 2 workers, 2 faults of any kind", "liveness", PAIR),
    Check(
        "liveness, 2 workers, 3 faults: freeze, cut, outage",
        "liveness",
        liveness(2, 3, FREEZE | CUT_ONE | CUT_ALL),
    ),
    Check("liveness, 3 workers, 1 fault of any kind", "liveness", liveness(3, 1)),
    Check("liveness, 3 workers, 2 of them killed", "liveness", TRIO_KILLED),
    Check("liveness, 3 workers, 2 faults: kill, freeze", "liveness", liveness(3, 2, KILL | FREEZE)),
    Check("liveness, time never stops", "liveness", liveness(2, 1), search=PROGRESS),
    Check("claims, 2 workers", "claim"),
    Check("claims, late commits, lock taken first", "claim", ("LATE_COMMIT", "TAKES_LOCK_FIRST")),
    Check("transactions of tasks", "transaction"),
    Check("parked runs of durable functions", "parking"),
)


def without(macro: str, violated: str, model: str, macros: tuple[str, ...] = ()) -> Check:
    return Check(macro, model, (*macros, macro), violated)


MUTANTS = (
    without("NO_BREAK_RESET", "condemned_alive", "liveness", PAIR),
    without("NO_GAP_RESET", "condemned_alive", "liveness", PAIR),
    without("IGNORES_LOOK_TIME", "condemned_alive", "liveness", PAIR),
    without("COUNTS_SLOW_LOOKS", "condemned_alive", "liveness", PAIR),
    without("FIRST_LOOK_COUNTS", "condemned_alive", "liveness", PAIR),
    without("NO_SIGN_WATCH", "condemned_alive", "liveness", PAIR),
    without("NO_SIGN_GUARD", "condemned_alive", "liveness", PAIR),
    without("TURN_BEFORE_SIGN", "condemned_alive", "liveness", PAIR),
    without("NO_ACTIVITY_CHECK", "condemned_alive", "liveness", PAIR),
    without("NO_LOCK_TIMEOUT", "condemned_alive", "liveness", PAIR),
    without("ANY_PROCESS_SPACE", "condemned_alive", "liveness", liveness(3, 1)),
    without("NO_FENCE", "double_run", "liveness", PAIR),
    without("FORGETS_AFTER_LOSS", "not_recovered", "liveness", PAIR),
    without("ONLY_NEIGHBOURS", "not_recovered", "liveness", TRIO_KILLED),
    without("ONLY_CONDEMNER_RECOVERS", "not_recovered", "liveness", TRIO_KILLED),
    without("NO_GENERATION_IN_OUTCOME", "invented_outcome", "claim"),
    without("NO_GENERATION_IN_RELEASE", "forgotten", "claim"),
    without("NO_RELEASE", "forgotten", "claim"),
    without("LATE_COMMIT", "forgotten", "claim"),
    without("NO_SHARED_COMMIT", "effect_without_outcome", "transaction"),
    without("NO_ROW_LOCK", "foreign_outcome", "transaction"),
    without("NO_GENERATION_IN_RECORD", "foreign_outcome", "transaction"),
    without("NO_STATUS_IN_VERDICT", "effect_without_outcome", "transaction"),
    without("NO_LOCK_BY_EVENT", "lost_wake_up", "parking"),
    without("NO_SECOND_LOOK", "lost_wake_up", "parking"),
    without("NO_GENERATION_IN_TAKE", "foreign_take", "parking"),
    without("NO_CANCEL_IN_PARK", "lost_cancel", "parking"),
    without("NO_LOCK_BY_CANCEL", "lost_cancel", "parking"),
    without("NO_RECORD_OF_CANCEL", "lost_cancel", "parking"),
    without("NO_CLEAN_UP", "no_clean_up", "parking"),
    without("NO_PLACE_KEPT", "overtaken", "parking"),
    without("NO_HEAD_BEFORE_LOCK", "overtaken", "parking"),
    without("NO_COUNT_FIRST", "overtaken", "parking"),
)

# A model that never declares a worker lost would satisfy most properties, so these situations must
# be reachable.
WITNESSES = tuple(
    Check(macro, "liveness", (*PAIR, macro), "")
    for macro in (
        *("WITNESS_PROVED_GONE", "WITNESS_SILENT", "WITNESS_FROZEN"),
        *("WITNESS_OVERLAP", "WITNESS_RETURN"),
    )
)

QUICK = (
    Check("liveness, 2 workers, 1 fault", "liveness", liveness(2, 1)),
    Check("claims, 2 workers", "claim"),
)


def _run(command: Sequence[str], directory: Path) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def search(check: Check, directory: Path) -> Result:
    """Compile the model with its macros and search all of its states, up to the first error."""
    shutil.copy(MODELS / f"{check.model}.pml", directory)
    macros = [f"-D{macro}" for macro in check.macros]
    progress = ["-DNP"] if check.search is PROGRESS else []
    _run(["spin", *macros, *progress, "-a", f"{check.model}.pml"], directory)
    optimization = LONG if check in PROPERTIES else SHORT
    _run([*COMPILE, optimization, *check.search], directory)
    flags = ["-l"] if check.search is PROGRESS else []
    return read_report(_run(["./pan", *flags, f"-m{DEPTH_MAX}", "-w24"], directory))


def read_report(report: str) -> Result:
    """Parse the report of the model checker; a search that was cut short is not exhaustive."""
    states = re.search(r"^\s*(\d+) states, stored", report, re.M)
    found = re.search(r"depth reached (\d+), errors: (\d+)", report)
    if states is None or found is None:
        raise SystemExit(f"the model checker did not report a search:\n{report}")
    failure = re.search(
        r"^pan:\d+: (?:assertion violated\s*)?(.*?)(?: \(at depth \d+\))?$", report, re.M
    )
    violated = "" if failure is None else failure[1].strip("!() ")
    is_cut_short = "Search not completed" in report or "max search depth too small" in report
    return Result(int(states[1]), int(found[1]), int(found[2]), violated, not is_cut_short)


def judge(check: Check, result: Result) -> bool:
    """Return whether the result is the expected one: no error in any state, or the expected violation."""
    if check.violated is None:
        return result.errors == 0 and result.is_exhaustive
    return result.errors > 0 and check.violated in result.violated


def perform(check: Check) -> bool:
    """Run one check and print its line."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="horsies-model-") as directory:
        result = search(check, Path(directory))
    is_expected = judge(check, result)
    line = f"violates {result.violated}" if result.errors else "violates nothing"
    if check.violated is None:
        line = f"{result.states:,} states, depth {result.depth:,}, errors {result.errors}"
    elif check in WITNESSES:
        line = "reached" if result.errors else "not reached"
    seconds = time.monotonic() - started
    verdict = "ok" if is_expected else "FAILED"
    print(f"{verdict:>6}  {check.title}: {line} ({seconds:.1f} s)", flush=True)
    return is_expected


def explain(macro: str) -> int:
    """Print the events of the counterexample without one rule."""
    check = next((one for one in (*MUTANTS, *WITNESSES) if one.title == macro), None)
    if check is None:
        raise SystemExit(f"no rule is called {macro}; see tools/model/verify.py")
    with tempfile.TemporaryDirectory(prefix="horsies-model-") as name:
        directory = Path(name)
        search(check, directory)
        macros = [f"-D{one}" for one in check.macros]
        print(_run(["spin", *macros, "-t", "-B", f"{check.model}.pml"], directory))
    return 0


def main() -> int:
    """Run all checks; return 1 if a property fails or if a rule can be removed without a counterexample."""
    parser = argparse.ArgumentParser(prog="python -m tools.model.verify", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="check smaller models")
    parser.add_argument("--explain", metavar="MACRO", help="print one counterexample")
    arguments = parser.parse_args()
    missing = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    if missing:
        raise SystemExit(
            f"not installed: {', '.join(missing)}; on Debian: apt-get install spin gcc"
        )
    if arguments.explain:
        return explain(arguments.explain)
    parts = {
        "all states": QUICK if arguments.quick else PROPERTIES,
        "without one rule": MUTANTS,
        "reachable situations": WITNESSES,
    }
    failed = 0
    for heading, checks in parts.items():
        print(f"{heading}:")
        failed += sum(not perform(check) for check in checks)
    print(f"{failed} check(s) failed" if failed else "all checks passed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
