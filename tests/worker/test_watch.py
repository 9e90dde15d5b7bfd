"""Watch: silence counts only as far as the observer itself watched without a gap."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horsies import AppConfig, PostgresConfig, RecoveryConfig, WorkerResilienceConfig
from horsies.db.statements.workers import WatchedWorker
from horsies.worker.watch import Verdict, Watch, WatchLimits

LIMITS = WatchLimits(lost=10.0, idle=300.0, held=60.0)
BROKER = PostgresConfig(database_url="postgresql://localhost/unused")


def watched(sign: str = "1", *, free: bool = True, worker_id: str = "w") -> WatchedWorker:
    return WatchedWorker(worker_id, sign, "host", 7, "space", 99, free)


@dataclass(slots=True)
class Observer:
    """An observer whose looks take no time, unless the test says otherwise."""

    gone: set[str] = field(default_factory=set)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(LIMITS, lambda worker: worker.worker_id in self.gone)

    def look(self, at: float, *workers: WatchedWorker, taken: float = 0.0) -> list[Verdict]:
        return self.watch.note_look(workers, at, at + taken)

    def look_every_second(self, start: int, end: int, *workers: WatchedWorker) -> list[Verdict]:
        """Look from `start` to `end`; return the verdicts of the last look, and expect none before."""
        for at in range(start, end):
            assert self.look(at, *workers) == []
        return self.look(end, *workers)


def test_a_free_lock_counts_after_ten_seconds_of_watching() -> None:
    observer = Observer()
    (verdict,) = observer.look_every_second(100, 110, watched())
    assert verdict == Verdict("w", "1", True, True, "not connected for 10 s")


def test_the_first_look_condemns_nobody_however_old_the_sign_is() -> None:
    assert Observer().look(1e9, watched("years ago")) == []


@pytest.mark.parametrize("change", [watched("2"), watched(free=False)], ids=["sign", "lock"])
def test_any_sign_of_life_starts_the_count_again(change: WatchedWorker) -> None:
    observer = Observer()
    observer.look_every_second(100, 109, watched())
    assert observer.look(109.5, change) == []
    again = watched(change.sign)
    assert observer.look_every_second(110, 119, again) == []
    assert observer.look_every_second(120, 120, again)


def test_a_gap_in_our_own_connection_starts_every_count_again() -> None:
    observer = Observer()
    observer.look_every_second(100, 109, watched())
    observer.watch.note_gap()
    assert observer.look_every_second(110, 119, watched()) == []
    assert observer.look(120, watched())


def test_looks_too_far_apart_are_a_gap() -> None:
    observer = Observer()
    observer.look_every_second(100, 105, watched())
    assert observer.look(110.1, watched()) == []
    assert observer.look_every_second(111, 120, watched()) == []
    assert observer.look(121, watched())


def test_a_look_that_took_too_long_is_a_gap() -> None:
    observer = Observer()
    observer.look_every_second(100, 108, watched())
    assert observer.look(109, watched(), taken=5.1) == []
    assert observer.look_every_second(115, 124, watched()) == []
    assert observer.look(125, watched())


def test_only_the_time_between_an_answer_and_a_question_is_certain() -> None:
    observer = Observer()
    for at in (100, 104, 108):
        assert observer.look(at, watched(), taken=2.0) == []
    assert observer.look(111.9, watched(), taken=2.0) == [], "9.9 s after the first answer"
    assert observer.look(115, watched(), taken=1.0)


def test_a_pause_and_a_slow_look_are_one_gap() -> None:
    observer = Observer()
    assert observer.look(100, watched()) == []
    assert observer.look(104.9, watched(), taken=4.9) == []
    assert observer.look(110, watched(), taken=0.1) == []


def test_a_process_that_is_gone_is_lost_at_the_first_look_if_its_lock_is_free() -> None:
    observer = Observer(gone={"w"})
    assert observer.look(1, watched(free=False)) == []
    (verdict,) = observer.look(2, watched())
    assert verdict == Verdict("w", "1", True, False, "its process has ended")


def test_a_held_lock_counts_for_life_until_the_slow_threshold() -> None:
    observer = Observer()
    (verdict,) = observer.look_every_second(100, 160, watched(free=False))
    assert verdict == Verdict("w", "1", False, False, "silent for 60 s with its lock held")


def test_a_worker_without_tasks_is_lost_after_the_longest_reconnect() -> None:
    observer = Observer()
    for at in range(1, 400):
        for verdict in observer.look(at, watched()):
            assert verdict.needs_tasks is (at - 1 < LIMITS.idle)


def test_suspects_are_looked_at_more_often() -> None:
    observer = Observer()
    observer.look(1, watched(free=False))
    assert not observer.watch.has_suspects
    observer.look(2, watched())
    assert observer.watch.has_suspects
    observer.look(3)
    assert not observer.watch.has_suspects, "its row was closed"


# Compared with an oracle: the whole history, kept and searched from the start at every poll.

LOOKS = st.lists(
    st.tuples(
        st.floats(0.1, 7.0),  # since the answer of the last look
        st.floats(0.0, 7.0),  # until the answer of this one
        st.sampled_from(["a", "b"]),
        st.booleans(),
        st.booleans(),  # whether our own connection broke before this look
    ),
    max_size=40,
)


def silent_seconds(history: list[tuple[float, float, str, bool, bool]]) -> float:
    """How long the state of the last poll has certainly lasted, by going back through the history."""
    asked, answered, sign, free, _ = history[-1]
    since = answered
    for later, earlier in zip(history[::-1], history[-2::-1], strict=False):
        has_gap = later[4] or later[1] - earlier[1] > LIMITS.gap_seconds
        if has_gap or earlier[2:4] != (sign, free):
            break
        since = earlier[1]
    return asked - since


@given(LOOKS)
def test_verdicts_agree_with_the_whole_history(
    looks: list[tuple[float, float, str, bool, bool]],
) -> None:
    observer, now = Observer(), 1_000.0
    history: list[tuple[float, float, str, bool, bool]] = []
    for pause, taken, sign, free, broke in looks:
        if broke:
            observer.watch.note_gap()
        now += pause
        history.append((now, now + taken, sign, free, broke))
        verdicts = observer.look(now, watched(sign, free=free), taken=taken)
        limit = LIMITS.lost if free else LIMITS.held
        assert bool(verdicts) == (silent_seconds(history) >= limit)
        now += taken


# Limits


def test_limits_follow_the_configuration() -> None:
    limits = WatchLimits.of(AppConfig(broker=BROKER))
    assert limits == WatchLimits(lost=10.0, idle=300.0, held=300.0)
    assert (limits.look_seconds, limits.suspicion_seconds, limits.gap_seconds) == (2.5, 1.0, 5.0)
    slow = WorkerResilienceConfig(db_retry_max_ms=300_000)
    assert WatchLimits.of(AppConfig(broker=BROKER, resilience=slow)).idle == 600.0


def test_a_lower_threshold_of_staleness_wins() -> None:
    recovery = RecoveryConfig(
        running_stale_threshold_ms=4_000,
        runner_heartbeat_interval_ms=1_000,
        claimed_stale_threshold_ms=2_000,
        claimer_heartbeat_interval_ms=1_000,
    )
    limits = WatchLimits.of(AppConfig(broker=BROKER, recovery=recovery))
    assert (limits.lost, limits.held) == (4.0, 4.0)
