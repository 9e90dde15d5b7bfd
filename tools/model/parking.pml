/* Parking a run of a durable function: no event is slept through, each is taken once, a cancel is carried out, and no
 * task of its fifo lane passes the run.
 *
 * docs/internals/liveness.md describes the properties and the abstractions. One run waits for up to two events, signals
 * or ends of children, one after the other. Every claim of it is a generation with an attempt. An attempt takes an
 * event that is committed, or asks its worker to park the run. Events, cancels, parks and takes are transactions of
 * several steps; recovery may give the run to another generation while the attempt before it lives on. A second
 * task waits behind the run in a lane that runs its tasks one after the other.
 *
 * Each macro that starts with NO_ removes a rule.
 */

#define GENERATIONS 7
#define EVENTS 2
#define POLLS 2         /* claims without a reason */
#define FREE 0
#define CANCELLER 20    /* holders of the lock besides the generations and the events */

#define RUNNING 1       /* status of the run */
#define PARKED 2        /* PENDING, due or not */
#define ENDED 3
#define CANCELLED 4
#define IS_OVER (status == ENDED || status == CANCELLED)

#define ASLEEP 0        /* states of an attempt */
#define LOOKING 1
#define TAKING 2
#define PARKING 3       /* its worker is about to park the run */
#define LOCKED 4        /* and has locked the row */
#define LOOKED 5
#define CLEANING 6      /* its clean-up step is called, then recorded */
#define LEAVING 7       /* its worker is about to end the run as CANCELLED */
#define OVER 8

byte status = RUNNING, generation = 1;
bit due;
byte locked_by = FREE;
byte stored, taken;             /* committed events, and those that steps have taken */
byte attempt_state[GENERATIONS + 1];
byte seen[GENERATIONS + 1];     /* the events in the snapshot of a park */
bit recovered;
bit registered;                 /* the run has a clean-up step */
bit asked;                      /* a cancel was accepted while the run was running */
bit accepted;                   /* any cancel was accepted */
bit recorded;                   /* the cancel is a step of the record: the clean-up has begun */
bit cleaned;                    /* the clean-up step is recorded */
byte polls;
bit successor;                  /* the second task of the lane has started */
bit foreign_take, lost_wake_up, lost_cancel, no_clean_up, step_after_cancel, overtaken, lane_stuck;

#ifdef NO_GENERATION_IN_TAKE
#define MAY_TAKE(g) (status == RUNNING)
#else
#define MAY_TAKE(g) (status == RUNNING && generation == (g))
#endif

#ifdef NO_CANCEL_IN_PARK
#define MAY_PARK(g) (status == RUNNING && generation == (g))
#else
#define MAY_PARK(g) (status == RUNNING && generation == (g) && !asked)
#endif

#define MAY_STOP(g) (status == RUNNING && generation == (g) && (attempt_state[g] == LOOKING || attempt_state[g] == TAKING))

inline end_as_cancelled() {
    if :: registered && !cleaned -> no_clean_up = 1 :: else fi;
    assert(!no_clean_up);
    status = CANCELLED
}

/* An accepted cancel takes effect; the caller holds the lock of the row. */
inline carry_out() {
    asked = 0;
    if
#ifndef NO_CLEAN_UP
    :: registered -> recorded = 1; status = PARKED; due = 1
    :: !registered -> end_as_cancelled()
#else
    :: true -> end_as_cancelled()
#endif
    fi
}

/* The attempt of generation g, and the turns of its worker about it. */
proctype attempt(byte g) {
end_attempt:
    do
    :: atomic { generation >= g && attempt_state[g] == ASLEEP ->
        if
        :: recorded -> attempt_state[g] = CLEANING      /* the record that it replays ends with the cancel */
        :: else -> attempt_state[g] = LOOKING
        fi }
    :: atomic { attempt_state[g] == LOOKING && stored > taken -> attempt_state[g] = TAKING }
    :: atomic { attempt_state[g] == LOOKING && stored == taken ->
        seen[g] = stored; attempt_state[g] = PARKING }
    :: atomic { attempt_state[g] == TAKING && locked_by == FREE ->
        if
        :: MAY_TAKE(g) && stored > taken ->
            if :: generation != g -> foreign_take = 1 :: else fi;
            assert(!foreign_take);
            if :: recorded -> step_after_cancel = 1 :: else fi;
            assert(!step_after_cancel);
            taken++;
            if
            :: taken == EVENTS -> status = ENDED; attempt_state[g] = OVER
            :: else -> attempt_state[g] = LOOKING
            fi
        :: MAY_TAKE(g) && stored == taken -> attempt_state[g] = LOOKING
        :: else -> attempt_state[g] = OVER
        fi }
    :: atomic { attempt_state[g] == PARKING && locked_by == FREE ->
        locked_by = g; attempt_state[g] = LOCKED }
    /* With a new snapshot, behind the lock. */
    :: atomic { attempt_state[g] == LOCKED ->
#ifndef NO_SECOND_LOOK
        seen[g] = stored;
#endif
        attempt_state[g] = LOOKED }
    :: atomic { attempt_state[g] == LOOKED ->
        if
        :: MAY_PARK(g) -> status = PARKED; due = (seen[g] > taken)
        :: !MAY_PARK(g) && status == RUNNING && generation == g -> carry_out()
        :: else
        fi;
        locked_by = FREE; attempt_state[g] = OVER }
    /* Its worker stops an attempt whose cancel was accepted. */
    :: atomic { asked && MAY_STOP(g) && locked_by == FREE -> attempt_state[g] = OVER; carry_out() }
    :: atomic { attempt_state[g] == CLEANING ->
        if
        :: status == RUNNING && generation == g -> cleaned = 1; attempt_state[g] = LEAVING
        :: else -> attempt_state[g] = OVER
        fi }
    :: atomic { attempt_state[g] == LEAVING && locked_by == FREE ->
        if
        :: status == RUNNING && generation == g -> end_as_cancelled()
        :: else
        fi;
        attempt_state[g] = OVER }
    od
}

/* A signal, or the end of a child: it locks the row of the run, looks whether the run is parked, and commits. The
 * second one may never come.
 */
proctype event(byte number) {
    bit is_parked;
    if :: number > 1 -> goto end_event :: true fi;
#ifdef NO_LOCK_BY_EVENT
    atomic { is_parked = (status == PARKED) };
    atomic { stored++; if :: is_parked && status == PARKED -> due = 1 :: else fi }
#else
    atomic { locked_by == FREE -> locked_by = GENERATIONS + number };
    atomic { is_parked = (status == PARKED) };
    atomic { if :: !IS_OVER -> stored++ :: else fi; if :: is_parked -> due = 1 :: else fi; locked_by = FREE }
#endif
end_event:
    skip
}

/* A cancel: it locks the row of the run, looks at its status, and commits. One during the clean-up changes nothing. */
proctype cancel() {
    byte was_status;
    if :: goto end_cancel :: true fi;
#ifndef NO_LOCK_BY_CANCEL
    atomic { locked_by == FREE -> locked_by = CANCELLER };
#endif
    atomic { was_status = status };
    atomic {
        if
        :: recorded || IS_OVER
        :: !recorded && !IS_OVER && was_status == RUNNING -> asked = 1; accepted = 1
        :: !recorded && !IS_OVER && was_status == PARKED -> accepted = 1; carry_out()
        :: else
        fi;
        if :: locked_by == CANCELLER -> locked_by = FREE :: else fi }
end_cancel:
    skip
}

#define HAS_WORK ((status == PARKED && due && generation < GENERATIONS) || IS_OVER)

/* The first task of the lane that is not in flight, 1: the run, 2: the task behind it; and whether it may start. */
inline choose_head() {
    head = 2; is_due = 1;
    if
#ifdef NO_PLACE_KEPT
    :: status == PARKED && due -> head = 1
#else
#ifdef NO_HEAD_BEFORE_LOCK
    :: status == PARKED && locked_by == FREE -> head = 1; is_due = due
#else
    :: status == PARKED -> head = 1; is_due = due
#endif
#endif
    :: else
    fi
}

/* A worker claims from the lane, when it is notified and now and then: it counts the tasks in flight, then it chooses
 * the head, then it locks the head.
 */
proctype worker() {
    bit in_flight, is_due;
    byte head;
end_worker:
    do
    :: atomic { !successor && (HAS_WORK || polls < POLLS) ->
        if :: HAS_WORK :: else -> polls++ fi;
#ifdef NO_COUNT_FIRST
        choose_head() };
        atomic { in_flight = (status == RUNNING) };
#else
        in_flight = (status == RUNNING) };
        atomic { choose_head() };
#endif
        atomic {
            if
            :: !in_flight && head == 1 && is_due && status == PARKED && locked_by == FREE && generation < GENERATIONS ->
                generation++; status = RUNNING; due = 0
            :: !in_flight && head == 2 ->
                if :: !IS_OVER -> overtaken = 1 :: else fi;
                assert(!overtaken);
                successor = 1
            :: else
            fi;
            head = 0; in_flight = 0; is_due = 0 }
    od
}

/* Recovery gives the run to another generation; the attempt before it is a zombie from now on. */
proctype recovery() {
end_recovery:
    do
    :: atomic { status == RUNNING && !recovered && locked_by == FREE && generation < GENERATIONS ->
        recovered = 1;
#ifdef NO_RECORD_OF_CANCEL
        recorded = 0;
#endif
        if
        :: asked -> carry_out()
        :: else -> status = PARKED; due = 1
        fi }
    od
}

/* Nothing can happen any more: the run has ended, or waits for an event that never came. */
proctype rest() {
    timeout;
    if :: accepted && !IS_OVER -> lost_cancel = 1 :: else fi;
    assert(!lost_cancel);
    if :: !IS_OVER && (stored > taken || stored == EVENTS) -> lost_wake_up = 1 :: else fi;
    assert(!lost_wake_up);
    if :: IS_OVER && !successor -> lane_stuck = 1 :: else fi;
    assert(!lane_stuck)
}

init {
    atomic {
        if :: registered = 1 :: registered = 0 fi;
        run attempt(1); run attempt(2); run attempt(3); run attempt(4); run attempt(5); run attempt(6);
        run attempt(7);
        run event(1); run event(2); run cancel();
        run worker(); run recovery(); run rest()
    }
}
