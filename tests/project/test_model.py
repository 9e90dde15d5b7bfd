"""The protocol models: SPIN verifies small ones here, `make model` verifies the large ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tools.model import verify
from tools.model.verify import Check, Result

from tests.support.doc_pages import code_of, page, rows, section

needs_spin = pytest.mark.skipif(
    not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin and gcc"
)
SAMPLE = (
    *("NO_BREAK_RESET", "NO_SIGN_GUARD", "NO_GENERATION_IN_OUTCOME", "NO_RELEASE"),
    *("NO_SHARED_COMMIT", "NO_ROW_LOCK", "NO_GENERATION_IN_RECORD", "NO_STATUS_IN_VERDICT"),
    *("NO_LOCK_BY_EVENT", "NO_SECOND_LOOK", "NO_GENERATION_IN_TAKE"),
    *("NO_CANCEL_IN_PARK", "NO_CLEAN_UP", "NO_HEAD_BEFORE_LOCK"),
)


def title(check: Check) -> str:
    return check.title


@needs_spin
@pytest.mark.parametrize("check", verify.QUICK, ids=title)
def test_every_state_has_the_properties(check: Check, tmp_path: Path) -> None:
    result = verify.search(check, tmp_path)
    assert result.violated == ""
    assert verify.judge(check, result)
    assert result.states > 10_000


@needs_spin
@pytest.mark.parametrize(("model", "states"), [("transaction", 5_000), ("parking", 100_000)])
def test_transactions_and_parked_runs_have_the_properties(
    model: str, states: int, tmp_path: Path
) -> None:
    (check,) = [one for one in verify.PROPERTIES if one.model == model]
    result = verify.search(check, tmp_path)
    assert result.violated == ""
    assert verify.judge(check, result)
    assert result.states > states


@needs_spin
@pytest.mark.parametrize("check", [one for one in verify.MUTANTS if one.title in SAMPLE], ids=title)
def test_a_missing_rule_violates_its_property(check: Check, tmp_path: Path) -> None:
    assert verify.search(check, tmp_path).violated == check.violated


@pytest.mark.parametrize("check", [*verify.MUTANTS, *verify.WITNESSES], ids=title)
def test_a_macro_of_a_check_changes_its_model(check: Check) -> None:
    text = (verify.MODELS / f"{check.model}.pml").read_text("utf-8")
    assert f"def {check.title}\n" in text, "no #ifdef or #ifndef"


def test_every_rule_is_described_with_its_name() -> None:
    described = [
        code_of(cells[-1]) for cells in rows(section(page("internals/liveness.md"), "The rules"))
    ]
    assert sorted(described) == sorted(
        one.title for one in verify.MUTANTS if one.title != "LATE_COMMIT"
    )


def test_a_violation_is_expected_only_where_a_rule_is_missing() -> None:
    clean = Result(states=9, depth=3, errors=0, violated="", is_exhaustive=True)
    violation = Result(states=9, depth=3, errors=1, violated="forgotten", is_exhaustive=False)
    cut_short = Result(states=9, depth=3, errors=0, violated="", is_exhaustive=False)
    whole, mutant = Check("whole", "claim"), Check("mutant", "claim", (), "forgotten")
    assert verify.judge(whole, clean)
    assert verify.judge(mutant, violation)
    assert not any(
        verify.judge(*pair)
        for pair in ((whole, violation), (whole, cut_short), (mutant, clean), (mutant, cut_short))
    )
