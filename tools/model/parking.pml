/* Parking a run of a durable function: no event is slept through, and each is taken once.
 *
 * docs/internals/liveness.md describes the properties and the abstractions. One run waits for two events, signals
 * or ends of children, one after the other. Every claim of it is a generation with an attempt. An attempt takes an
 * event that is committed, or asks its worker to park the run. Events, parks and takes are transactions of several
 * steps; recovery may give the run to another generation while the attempt before it lives on.
 *
 * Each macro that starts with NO_ removes a rule.
 */

#define GENERATIONS 7
#define EVENTS 2
#define FREE 0

#define RUNNING 1       /* status of the run */
#define PARKED 2
#define ENDED 3

#define ASLEEP 0        /* states of an attempt */
#define LOOKING 1
#define TAKING 2
#define PARKING 3       /* its worker is about to park the run */
#define LOCKED 4        /* and has locked the row */
#define LOOKED 5
#define OVER 6

byte status = RUNNING, generation = 1;
bit due;
byte locked_by = FREE;
byte stored, taken;             /* committed events, and those that steps have taken */
byte attempt_state[GENERATIONS + 1];
byte seen[GENERATIONS + 1];     /* the events in the snapshot of a park */
bit recovered;
bit foreign_take, lost_wake_up;

#ifdef NO_GENERATION_IN_TAKE
#define MAY_TAKE(g) (status == RUNNING)
#else
#define MAY_TAKE(g) (status == RUNNING && generation == (g))
#endif

/* The attempt of generation g, and the turn of its worker that parks the run. */
proctype attempt(byte g) {
end_attempt:
    do
    :: atomic { generation >= g && attempt_state[g] == ASLEEP -> attempt_state[g] = LOOKING }
    :: atomic { attempt_state[g] == LOOKING && stored > taken -> attempt_state[g] = TAKING }
    :: atomic { attempt_state[g] == LOOKING && stored == taken ->
        seen[g] = stored; attempt_state[g] = PARKING }
    :: atomic { attempt_state[g] == TAKING && locked_by == FREE ->
        if
        :: MAY_TAKE(g) && stored > taken ->
            if :: generation != g -> foreign_take = 1 :: else fi;
            assert(!foreign_take);
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
        :: status == RUNNING && generation == g -> status = PARKED; due = (seen[g] > taken)
        :: else
        fi;
        locked_by = FREE; attempt_state[g] = OVER }
    od
}

/* A signal, or the end of a child: it locks the row of the run, looks whether the run is parked, and commits. */
proctype event(byte number) {
    bit is_parked;
#ifdef NO_LOCK_BY_EVENT
    atomic { is_parked = (status == PARKED) };
    atomic { stored++; if :: is_parked && status == PARKED -> due = 1 :: else fi }
#else
    atomic { locked_by == FREE -> locked_by = GENERATIONS + number };
    atomic { is_parked = (status == PARKED) };
    atomic { stored++; if :: is_parked -> due = 1 :: else fi; locked_by = FREE }
#endif
}

/* A worker claims the run once it is due. */
proctype worker() {
end_worker:
    do
    :: atomic { status == PARKED && due && locked_by == FREE && generation < GENERATIONS ->
        generation++; status = RUNNING; due = 0 }
    od
}

/* Recovery gives the run to another generation; the attempt before it is a zombie from now on. */
proctype recovery() {
end_recovery:
    do
    :: atomic { status == RUNNING && !recovered && locked_by == FREE && generation < GENERATIONS ->
        recovered = 1; generation++ }
    od
}

/* Nothing can happen any more: the run has taken both events and ended. */
proctype rest() {
    timeout;
    if :: status != ENDED -> lost_wake_up = 1 :: else fi;
    assert(!lost_wake_up)
}

init {
    atomic {
        run attempt(1); run attempt(2); run attempt(3); run attempt(4); run attempt(5); run attempt(6);
        run attempt(7);
        run event(1); run event(2);
        run worker(); run recovery(); run rest()
    }
}
