from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from horsies import RetryPolicy
from horsies.error_codes import (
    BUILTIN_CODE_REGISTRY,
    OperationalErrorCode,
    reserved_code_collisions,
    resolve_exception_code,
    validate_error_code_name,
    validate_exception_mapper,
)
from horsies.errors import InvalidFieldError, RetryLater, StepFailed, TaskFailed
from horsies.retry import (
    Backoff,
    decide_retry,
    delay_seconds,
    exception_names,
    limit_after_return,
    policy_from_options,
)
from tests.support.examples import examples

draws = st.floats(min_value=0, max_value=1, exclude_max=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def policy(**changes: Any) -> RetryPolicy:
    return RetryPolicy(**{"auto_retry_for": ["GATEWAY_DOWN"], **changes})


def delay(**changes: Any) -> float | None:
    values: dict[str, Any] = {
        "task_options": json.dumps({"retry_policy": policy(jitter=False).to_json()}),
        "error_code": "GATEWAY_DOWN",
        "retry_count": 0,
        "max_retries": 3,
        "random": lambda: 0.0,
    }
    return decide_retry(**{**values, **changes}).delay_seconds


def test_the_defaults_are_three_fixed_retries_with_jitter() -> None:
    default = policy()
    assert default.max_retries == 3
    assert default.intervals == [60, 300, 900]
    assert default.backoff_strategy == "fixed"
    assert default.jitter is True


def test_the_fixed_constructor_retries_once_per_interval() -> None:
    fixed = RetryPolicy.fixed((1, 5), auto_retry_for=["A_CODE"], jitter=False)
    assert fixed == RetryPolicy(
        auto_retry_for=["A_CODE"], max_retries=2, intervals=[1, 5], jitter=False
    )


def test_the_exponential_constructor_keeps_one_base() -> None:
    exponential = RetryPolicy.exponential(7, max_retries=5, auto_retry_for=["A_CODE"])
    assert exponential.intervals == [7]
    assert exponential.max_retries == 5
    assert exponential.backoff_strategy == "exponential"
    assert exponential.jitter is True


@pytest.mark.parametrize("count", [1, 20, 5_000])
def test_any_number_of_retries_is_accepted(count: int) -> None:
    assert RetryPolicy.fixed([1] * count, auto_retry_for=["A"]).max_retries == count
    RetryPolicy.exponential(86_400, max_retries=count, auto_retry_for=["A"])


@pytest.mark.parametrize(
    "changes",
    [
        {"max_retries": 0, "intervals": [1], "backoff_strategy": "exponential"},
        {"max_retries": 2_000_000_001, "intervals": [1], "backoff_strategy": "exponential"},
        {"max_retries": 1, "intervals": [0]},
        {"max_retries": 1, "intervals": [0.0009]},
        {"max_retries": 1, "intervals": [float("nan")]},
        {"max_retries": 1, "intervals": [86_401]},
        {"max_retries": 1, "intervals": []},
        {"max_retries": 20, "intervals": [1] * 21},
        {"backoff_strategy": "linear"},
        {"auto_retry_for": []},
        {"auto_retry_for": "GATEWAY_DOWN"},
        {"auto_retry_for": None},
        {"auto_retry_for": ConnectionError},
        {"auto_retry_for": [5]},
        {"auto_retry_for": [int]},
        {"auto_retry_for": [ConnectionError()]},
        {"auto_retry_for": [TaskFailed]},
        {"auto_retry_for": ["not.a class"]},
        {"max_delay_seconds": 0},
        {"max_delay_seconds": 31_536_001},
        {"max_delay_seconds": float("nan")},
        {"longest_delay_seconds": 5},
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidFieldError):
        policy(**changes)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: RetryPolicy.fixed(cast("Any", 1), auto_retry_for=["A"]),
            "a list of seconds, .* not int",
        ),
        (
            lambda: RetryPolicy.fixed([1, cast("Any", "2")], auto_retry_for=["A"]),
            "intervals as a number of seconds, not str",
        ),
        (
            lambda: RetryPolicy.exponential(
                cast("Any", timedelta(seconds=1)), max_retries=2, auto_retry_for=["A"]
            ),
            r"RetryPolicy.exponential\(\) takes base_seconds as a number of seconds, not timedelta; use",
        ),
        (
            lambda: RetryPolicy.forever(cast("Any", "1"), auto_retry_for=["A"]),
            r"RetryPolicy.forever\(\) takes base_seconds as a number",
        ),
    ],
)
def test_seconds_of_another_type_are_refused_in_one_sentence(
    make: Callable[[], RetryPolicy], sentence: str
) -> None:
    with pytest.raises(TypeError, match=sentence):
        make()


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        policy().jitter = False


def test_a_fixed_policy_needs_one_interval_per_retry() -> None:
    with pytest.raises(InvalidFieldError, match="max_retries is 5 and 3 intervals are given"):
        policy(max_retries=5)


def test_an_exponential_policy_needs_exactly_one_interval() -> None:
    with pytest.raises(InvalidFieldError, match="exactly one interval"):
        policy(backoff_strategy="exponential")


def test_an_exception_class_name_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidFieldError, match="list the class itself, without quotes"):
        policy(auto_retry_for=["GATEWAY_DOWN", "TimeoutError"])


@pytest.mark.parametrize("code", ["A", "GATEWAY_DOWN", "E2BIG", *BUILTIN_CODE_REGISTRY])
def test_upper_case_names_are_well_formed_codes(code: str) -> None:
    assert validate_error_code_name(code) == []


@pytest.mark.parametrize("code", ["", "lower", "1ST", "_X", "A-B", "A B", "A\n", "KeyError", "É"])
def test_other_names_are_one_problem_each(code: str) -> None:
    assert len(validate_error_code_name(code)) == 1


@pytest.mark.parametrize("code", [None, 5, ValueError, b"A"])
def test_a_code_must_be_text(code: object) -> None:
    assert "must be a string" in validate_error_code_name(code)[0]


def test_built_in_members_are_accepted_and_compared_by_value() -> None:
    crash = policy(auto_retry_for=[OperationalErrorCode.WORKER_CRASHED], jitter=False)
    options = json.dumps({"retry_policy": crash.to_json()})
    assert delay(task_options=options, error_code="WORKER_CRASHED") == 60
    assert delay(task_options=options, error_code=OperationalErrorCode.WORKER_CRASHED) == 60


def test_the_snapshot_is_plain_json_and_reads_back_equal() -> None:
    original = RetryPolicy.exponential(
        3, max_retries=4, auto_retry_for=[OperationalErrorCode.WORKER_CRASHED, "X"], jitter=False
    )
    stored = original.to_json()
    assert stored == {
        "auto_retry_for": ["WORKER_CRASHED", "X"],
        "max_retries": 4,
        "intervals": [3],
        "backoff_strategy": "exponential",
        "jitter": False,
    }
    restored = RetryPolicy.from_json(json.loads(json.dumps(stored)))
    assert restored is not None
    assert restored.to_json() == stored


def test_the_stored_options_yield_their_policy() -> None:
    text = json.dumps({"retry_policy": policy().to_json(), "good_until": None})
    assert policy_from_options(text) == policy()


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "no json",
        "5",
        "[]",
        "{}",
        '{"retry_policy": null}',
        '{"retry_policy": 5}',
        '{"retry_policy": {}}',
        '{"retry_policy": {"auto_retry_for": "X"}}',
        '{"retry_policy": {"auto_retry_for": [5]}}',
        "[" * 100_000,
    ],
)
def test_options_without_a_readable_policy_yield_none(text: str | None) -> None:
    assert policy_from_options(text) is None


def test_damaged_parts_fall_back_to_their_defaults() -> None:
    salvaged = RetryPolicy.from_json(
        {
            "auto_retry_for": ["X", 5],
            "max_retries": "many",
            "intervals": [True, -1, "x"],
            "backoff_strategy": "linear",
            "jitter": None,
            "from_the_future": 1,
        }
    )
    assert salvaged == policy(auto_retry_for=["X"])


def test_a_damaged_interval_list_keeps_its_good_entries() -> None:
    salvaged = RetryPolicy.from_json({"auto_retry_for": ["X"], "intervals": [7, None]})
    assert salvaged is not None
    assert [delay_seconds(salvaged, n, lambda: 0.0) for n in (1, 2, 3)] == [7.0, 7.0, 7.0]


@settings(max_examples=examples(200), deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "auto_retry_for": json_values | st.just(["X"]),
            "max_retries": json_values,
            "intervals": json_values,
            "backoff_strategy": json_values | st.just("exponential"),
            "jitter": json_values,
        },
    )
    | json_values,
    st.integers(),
    st.integers(),
    draws,
)
def test_damaged_policy_data_never_raises(
    stored: object, retry_count: int, max_retries: int, draw: float
) -> None:
    seconds = delay(
        task_options=json.dumps({"retry_policy": stored}),
        error_code="X",
        retry_count=retry_count,
        max_retries=max_retries,
        random=lambda: draw,
    )
    assert seconds is None or 0 < seconds <= 31_536_000


def test_fixed_delays_follow_the_list_and_stay_on_its_last_entry() -> None:
    fixed = policy(intervals=[1, 5, 10], jitter=False)
    delays = [delay_seconds(fixed, n, lambda: 0.9) for n in (0, 1, 2, 3, 4, 99)]
    assert delays == [1.0, 1.0, 5.0, 10.0, 10.0, 10.0]


def test_exponential_delays_double() -> None:
    doubling = RetryPolicy.exponential(3, max_retries=4, auto_retry_for=["X"], jitter=False)
    assert [delay_seconds(doubling, n) for n in (1, 2, 3, 4)] == [3.0, 6.0, 12.0, 24.0]


@settings(max_examples=examples(100), deadline=None)
@given(
    st.integers(1, 86_400),
    st.none() | st.floats(0.001, 31_536_000),
    st.lists(draws, min_size=40, max_size=40),
)
def test_exponential_delays_grow_to_the_longest_wait_even_with_jitter(
    base: int, longest: float | None, drawn: list[float]
) -> None:
    jittery = RetryPolicy.exponential(
        base, max_retries=20, auto_retry_for=["X"], max_delay_seconds=longest
    )
    draw = iter(drawn).__next__
    delays = [delay_seconds(jittery, number, draw) for number in range(1, 41)]
    end = 31_536_000 if longest is None else longest
    assert all(0 < wait <= end for wait in delays)
    assert all(
        earlier < later or later >= end / 1.25 * (1 - 1e-9) for earlier, later in pairwise(delays)
    )
    assert delays[-1] == pytest.approx(end / 1.25 * (1 + 0.25 * drawn[-1]))


def test_the_number_of_a_retry_never_overflows_the_wait() -> None:
    endless = RetryPolicy.exponential(86_400, max_retries=20, auto_retry_for=["X"], jitter=False)
    assert delay_seconds(endless, 2_000_000_000) == 31_536_000


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 86_400), draws)
def test_jitter_only_lengthens_and_by_a_quarter_at_most(interval: int, draw: float) -> None:
    fixed = RetryPolicy.fixed([interval], auto_retry_for=["X"])
    assert interval <= delay_seconds(fixed, 1, lambda: draw) <= interval * 1.25


def test_a_listed_code_is_retried_after_the_delay_of_the_next_retry() -> None:
    assert [delay(retry_count=count) for count in (0, 1, 2)] == [60.0, 300.0, 900.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_retries": 0},
        {"max_retries": -1},
        {"retry_count": 3},
        {"retry_count": 4},
        {"task_options": None},
        {"task_options": "not JSON"},
        {"error_code": None},
        {"error_code": "OTHER"},
    ],
)
def test_any_other_failure_is_final(changes: dict[str, Any]) -> None:
    assert delay(**changes) is None


def test_backoff_doubles_up_to_its_cap_and_starts_over_after_a_reset() -> None:
    backoff = Backoff(initial_ms=500, max_ms=3_000, random=lambda: 0.5)
    waits = [backoff.next_delay_seconds() for _ in range(5)]
    # At the cap the wait varies between three quarters of it and the cap itself.
    assert waits == [0.5, 1.0, 2.0, 2.625, 2.625]
    assert backoff.attempts == 5
    backoff.reset()
    assert backoff.next_delay_seconds() == 0.5


@pytest.mark.parametrize(("draw", "expected"), [(0.0, 0.75), (0.5, 1.0), (1.0, 1.25)])
def test_backoff_varies_by_a_quarter_both_ways(draw: float, expected: float) -> None:
    assert Backoff(1_000, 2_000, random=lambda: draw).next_delay_seconds() == expected


def test_backoff_never_waits_less_than_a_tenth_of_a_second() -> None:
    assert Backoff(100, 500, random=lambda: 0.0).next_delay_seconds() == 0.1


def test_backoff_ends_after_its_retries() -> None:
    backoff = Backoff(100, 500, max_attempts=2, random=lambda: 0.5)
    assert [backoff.next_delay_seconds() for _ in range(4)] == [0.1, 0.2, None, None]


def test_backoff_without_a_limit_never_ends_nor_overflows() -> None:
    backoff = Backoff(100, 500, random=lambda: 0.5)
    backoff.attempts = 10**6
    assert backoff.next_delay_seconds() == 0.4375


class ChildOfTimeout(TimeoutError):
    pass


KINDS = [BaseException, Exception, OSError, TimeoutError, ChildOfTimeout, ConnectionError, KeyError]


def test_the_task_mapper_speaks_before_the_app_mapper() -> None:
    code = resolve_exception_code(
        TimeoutError(), {TimeoutError: "FROM_TASK"}, {TimeoutError: "FROM_APP"}, "TASK", "APP"
    )
    assert code == "FROM_TASK"


def test_the_app_mapper_speaks_before_the_task_default() -> None:
    code = resolve_exception_code(TimeoutError(), {}, {TimeoutError: "FROM_APP"}, "TASK", "APP")
    assert code == "FROM_APP"


@given(
    st.dictionaries(st.sampled_from(KINDS), st.sampled_from(["A", "B", "C"])),
    st.dictionaries(st.sampled_from(KINDS), st.sampled_from(["D", "E", "F"])),
    st.sampled_from(KINDS),
)
def test_the_nearest_mapped_class_decides(
    task_mapper: dict[type[BaseException], str],
    app_mapper: dict[type[BaseException], str],
    kind: type[BaseException],
) -> None:
    expected = "DEFAULT"
    for mapper in (app_mapper, task_mapper):
        fitting = [mapped for mapped in mapper if issubclass(kind, mapped)]
        # In a chain of classes the nearest is the one that is a subclass of all others.
        for mapped in fitting:
            if all(issubclass(mapped, other) for other in fitting):
                expected = mapper[mapped]
    assert resolve_exception_code(kind(), task_mapper, app_mapper, "DEFAULT", None) == expected


def test_defaults_go_from_task_to_app_to_unhandled_exception() -> None:
    assert resolve_exception_code(OSError(), None, None, None, "APP") == "APP"
    code = resolve_exception_code(OSError(), None, None, None, None)
    assert code is OperationalErrorCode.UNHANDLED_EXCEPTION


def test_a_mapped_built_in_name_becomes_its_member() -> None:
    code = resolve_exception_code(OSError(), {OSError: "BROKER_ERROR"}, None, None, None)
    assert code is OperationalErrorCode.BROKER_ERROR


def test_a_well_formed_mapper_has_no_problems() -> None:
    assert validate_exception_mapper({TimeoutError: "GATEWAY_DOWN", SystemExit: "STOPPED"}) == []


def test_every_bad_mapper_entry_is_a_sentence_of_its_own() -> None:
    problems = validate_exception_mapper({"TimeoutError": "A", int: "B", OSError: "oops"})
    assert len(problems) == 3
    assert "'TimeoutError'" in problems[0]
    assert "int" in problems[1]
    assert "exception_mapper[OSError]" in problems[2]


def test_a_mapper_must_be_a_dictionary() -> None:
    assert "must be a dictionary" in validate_exception_mapper([OSError])[0]


def test_built_in_names_in_user_configuration_are_collisions() -> None:
    problems = reserved_code_collisions({OSError: "BROKER_ERROR", KeyError: "X"}, "TASK_CANCELLED")
    assert len(problems) == 2
    assert reserved_code_collisions({}, "UNHANDLED_EXCEPTION") == []
    assert reserved_code_collisions({}, None) == []


# Rules: codes, exception classes, RetryLater


class Away(ConnectionError):
    class Nested(KeyError):
        pass


def test_exception_classes_are_stored_by_name_and_read_back_as_names() -> None:
    stored = policy(auto_retry_for=[ConnectionError, Away.Nested, "GATEWAY_BUSY"]).to_json()
    names = ["builtins.ConnectionError", f"{__name__}.Away.Nested", "GATEWAY_BUSY"]
    assert stored["auto_retry_for"] == names
    assert RetryPolicy.from_json(json.loads(json.dumps(stored))) == policy(auto_retry_for=names)


def test_fractions_of_a_second_are_kept_and_whole_seconds_stay_integers() -> None:
    fixed = RetryPolicy.fixed([0.25, 2], auto_retry_for=["X"], jitter=False)
    assert json.dumps(fixed.to_json()["intervals"]) == "[0.25, 2]"
    stored = RetryPolicy.from_json(fixed.to_json())
    assert stored is not None
    assert [delay_seconds(stored, number) for number in (1, 2)] == [0.25, 2.0]


def test_a_policy_without_a_limit_goes_on_and_its_waits_end_at_the_maximum() -> None:
    endless = RetryPolicy.forever(auto_retry_for=["GATEWAY_DOWN"], jitter=False)
    options = json.dumps({"retry_policy": endless.to_json()})
    counts = (0, 1, 2, 11, 12, 100_000, 1_999_999_999)
    waits = [
        delay(task_options=options, retry_count=count, max_retries=endless.max_retries)
        for count in counts
    ]
    assert waits == [1, 2, 4, 2048, 3600, 3600, 3600]


# Each class with its bases, written down apart from the code: the oracle of the property below.
ANCESTORS: dict[type[BaseException], set[type[BaseException]]] = {
    KeyError: {KeyError, LookupError, Exception, BaseException},
    Away: {Away, ConnectionError, OSError, Exception, BaseException},
    ConnectionError: {ConnectionError, OSError, Exception, BaseException},
    SystemExit: {SystemExit, BaseException},
}
RULES = [*ANCESTORS, LookupError, OSError, Exception, BaseException, "DOWN", "BUSY", "OTHER"]


@settings(max_examples=examples(300), deadline=None)
@given(
    rules=st.lists(st.sampled_from(RULES), max_size=4),
    code=st.none() | st.sampled_from(["DOWN", "BUSY", "UNHANDLED_EXCEPTION"]),
    kind=st.none() | st.sampled_from([*ANCESTORS]),
    retry_after=st.none() | st.floats(0, 31_536_000),
    retry_count=st.integers(0, 6),
    max_retries=st.integers(1, 5),
    base=st.sampled_from([0.5, 3, 60]),
    longest=st.none() | st.sampled_from([1, 20.5]),
)
def test_a_failure_is_retried_by_the_rule_that_lists_it(
    rules: list[Any],
    code: str | None,
    kind: type[BaseException] | None,
    retry_after: float | None,
    retry_count: int,
    max_retries: int,
    base: float,
    longest: float | None,
) -> None:
    options, limit = None, 0
    if rules:
        made = RetryPolicy.exponential(
            base,
            max_retries=max_retries,
            auto_retry_for=rules,
            max_delay_seconds=longest,
            jitter=False,
        )
        options, limit = json.dumps({"retry_policy": made.to_json()}), max_retries
    decision = decide_retry(
        task_options=options,
        error_code=code,
        exception_names=exception_names(kind()) if kind else (),
        retry_after=retry_after,
        retry_count=retry_count,
        max_retries=limit,
    )
    ancestors = ANCESTORS[kind] if kind else set()
    is_listed = code in rules or any(rule in ancestors for rule in rules)
    if retry_after is not None:
        is_retried = retry_count < (max_retries if rules else 3)
    else:
        is_retried = is_listed and retry_count < max_retries
    assert (decision.delay_seconds is not None) is is_retried
    if is_retried and retry_after is not None:
        assert (decision.delay_seconds, decision.reason) == (retry_after, "retried by RetryLater")
    elif is_retried:
        wait = base
        for _ in range(retry_count):
            wait += wait
        assert decision.delay_seconds == (wait if longest is None else min(wait, longest))
        assert decision.reason is not None
        assert decision.reason.startswith("retried by code" if code in rules else "retried by ")
    elif rules:
        used_up = is_listed or retry_after is not None
        words = f"max_retries={max_retries} is reached" if used_up else "is listed"
        assert words in str(decision.reason).replace("is not listed", "is listed")


@pytest.mark.parametrize(
    ("rules", "code", "raised", "reason"),
    [
        ([OSError], "X", Away(), "retried by builtins.OSError"),
        ([OSError, Away], "X", Away(), f"retried by {__name__}.Away"),
        (["X", Away], "X", Away(), "retried by code X"),
        (["builtins.OSError"], "X", Away(), "retried by builtins.OSError"),
        (["__main__.Away"], "X", Away(), f"retried by {__name__}.Away"),
        (["__main__.way"], "X", Away(), f"neither code X nor {__name__}.Away is listed"),
        ([KeyError], "X", Away(), f"neither code X nor {__name__}.Away is listed"),
        ([KeyError], "X", None, "not retried: code X is not listed in auto_retry_for"),
        (
            [KeyError],
            "STEP_TIMEOUT",
            StepFailed("fetch", "STEP_TIMEOUT", "too long"),
            "code STEP_TIMEOUT is the recorded failure of a step; list it in the policy of the step",
        ),
        ([KeyError], None, None, "not retried: an error without a code is not listed"),
        (["Y" * 300], "Y" * 300, None, "retried by code " + "Y" * 197 + "..."),
    ],
)
def test_the_reason_names_the_rule_that_decided(
    rules: list[Any], code: str | None, raised: BaseException | None, reason: str
) -> None:
    decision = decide_retry(
        task_options=json.dumps({"retry_policy": policy(auto_retry_for=rules).to_json()}),
        error_code=code,
        exception_names=exception_names(raised) if raised else (),
        retry_count=0,
        max_retries=3,
    )
    assert reason in str(decision.reason)


def test_a_task_without_a_policy_has_no_reason_and_no_retry() -> None:
    final = decide_retry(task_options=None, error_code="X", retry_count=0, max_retries=0)
    assert final == (None, None, 0)


def test_a_task_without_a_policy_may_ask_for_three_retries() -> None:
    decisions = [
        decide_retry(
            task_options=None, error_code="X", retry_after=7, retry_count=count, max_retries=limit
        )
        for count, limit in ((0, 0), (2, 3), (3, 3), (1, 1))
    ]
    assert [one.delay_seconds for one in decisions] == [7, 7, None, 7]
    assert [one.max_retries for one in decisions] == [3, 3, 0, 3]


def test_a_return_to_the_queue_leaves_a_task_without_a_policy_its_three_retries() -> None:
    limit, waits = 0, []
    for count, is_return in enumerate((True, False, False, True, False, False)):
        if is_return:
            limit = limit_after_return(None, limit)
            continue
        decision = decide_retry(
            task_options=None, error_code="X", retry_after=7, retry_count=count, max_retries=limit
        )
        limit = max(limit, decision.max_retries)
        waits.append(decision.delay_seconds)
    assert waits == [7, 7, 7, None]
    assert limit == 5


def test_a_return_to_the_queue_does_not_lengthen_the_waits() -> None:
    options = json.dumps({"retry_policy": policy(jitter=False).to_json()})
    limit = limit_after_return(options, 3)
    assert limit == 4
    waits = [delay(retry_count=count, max_retries=limit) for count in (1, 2, 3, 4)]
    assert waits == [60, 300, 900, None]


@pytest.mark.parametrize(("given", "seconds"), [(0.5, 0.5), (30, 30.0), (-3, 0.0), (-math.inf, 0)])
def test_retry_later_takes_seconds_and_a_past_time_means_now(given: float, seconds: float) -> None:
    assert RetryLater(given).seconds == seconds


@pytest.mark.parametrize("given", ["30", None, True, math.nan, math.inf, 31_536_001])
def test_retry_later_refuses_values_that_are_not_seconds(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="RetryLater takes"):
        RetryLater(given)


def test_retry_later_can_be_pickled_and_printed() -> None:
    assert str(RetryLater(2.5, OSError("busy"))) == "busy"  # type: ignore[arg-type]
    copied = pickle.loads(pickle.dumps(RetryLater(2.5, "busy")))
    assert (copied.seconds, str(copied), str(RetryLater(2.5))) == (
        2.5,
        "busy",
        "run again in 2.5 s",
    )


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_db_retry_max_ms_is_the_longest_wait(draw: float) -> None:
    backoff = Backoff(initial_ms=500, max_ms=3_000, random=lambda: draw)
    waits = [backoff.next_delay_seconds() or 0.0 for _ in range(8)]
    assert max(waits) <= 3.0


def test_waits_at_the_maximum_still_vary() -> None:
    draws = iter([0.6, 0.9])
    backoff = Backoff(initial_ms=3_000, max_ms=3_000, random=lambda: next(draws))
    assert backoff.next_delay_seconds() != backoff.next_delay_seconds()


class Reset(ConnectionResetError):
    pass


@pytest.mark.parametrize(
    ("task_mapper", "app_mapper", "code"),
    [
        ({ConnectionError: "AWAY"}, {}, "AWAY"),
        ({}, {OSError: "SYSTEM"}, "SYSTEM"),
        ({OSError: "SYSTEM", ConnectionError: "AWAY"}, {}, "AWAY"),
        ({ConnectionError: "AWAY", OSError: "SYSTEM", Reset: "RESET"}, {}, "RESET"),
        ({OSError: "SYSTEM"}, {Reset: "RESET"}, "SYSTEM"),
        ({TimeoutError: "SLOW"}, {BaseException: "ANY"}, "ANY"),
        ({TimeoutError: "SLOW"}, {}, "DEFAULT"),
    ],
)
def test_a_mapped_exception_stands_for_its_subclasses(
    task_mapper: dict[type[BaseException], str],
    app_mapper: dict[type[BaseException], str],
    code: str,
) -> None:
    assert resolve_exception_code(Reset(), task_mapper, app_mapper, "DEFAULT", None) == code


@pytest.mark.parametrize(
    "policy",
    [
        RetryPolicy.exponential(
            5, max_retries=20, auto_retry_for=["DOWN"], max_delay_seconds=60, jitter=False
        ),
        RetryPolicy(
            auto_retry_for=["DOWN"],
            max_retries=20,
            intervals=[5],
            max_delay_seconds=60,
            backoff_strategy="exponential",
            jitter=False,
        ),
    ],
    ids=["exponential", "constructor"],
)
def test_waits_grow_up_to_max_delay_seconds(policy: RetryPolicy) -> None:
    stored = RetryPolicy.from_json(policy.to_json())
    assert stored == policy
    waits = [delay_seconds(policy, number) for number in (1, 2, 3, 4, 5, 20)]
    assert waits == [5, 10, 20, 40, 60, 60]
