/* How workers own a task: claim, outcome, release, recovery, with transactions whose COMMIT is in doubt.
 *
 * docs/internals/liveness.md describes the properties and the abstractions. Recovery is an adversary here: it
 * takes the task from its owner at any time, with or without reason. Every transaction is one step. Its
 * answer may be lost, whether or not the server executed it.
 *
 * Each macro that starts with NO_ removes a rule. LATE_COMMIT removes an assumption: the server executes nothing
 * of a lost session after the worker's next session has begun. TAKES_LOCK_FIRST is a rule that makes it
 * unnecessary: a worker releases and claims only on a session that holds its lock.
 */

#ifndef N
#define N 2
#endif
#define GENERATIONS 4   /* the last generation does not retry */
#define LOSSES 2        /* lost answers */
#define RECOVERIES 2    /* recoveries of workers that may be alive */
#define NONE 255

#define PENDING 0       /* status of the task */
#define RUNNING 1
#define ENDED 2

#define COMPLETE 1      /* outcomes */
#define RETRY 2

#define TURN 1          /* transactions */
#define RELEASE 2

byte status, owner = NONE, generation;
bit dead[N];
byte runs[N];           /* generation that a child of the worker runs */
byte runs_still[N];     /* an earlier one, lost to recovery, that another child of the worker still runs */
byte reported[N];       /* generation whose outcome waits to be recorded */
byte outcome[N];
bit in_doubt[N];        /* the worker may own a task that it does not hold */

/* A transaction of a lost session that the server has received and may still execute */
byte late[N], late_reported[N], late_outcome[N], late_held[N];

byte losses, recoveries;
byte started, finished, recorded;       /* sets of generations */
byte claimed;                           /* the answer of the last turn */
bit two_owners, invented_outcome, second_outcome, released_held, forgotten, not_ended;

#define BIT(g) (1 << (g))
#define CAN_CLAIM(w) (status == PENDING && generation < GENERATIONS && runs_still[w] == 0)
#define HELD(w) (BIT(runs[w]) | BIT(runs_still[w]) | BIT(reported[w]))
#define HOLDS(w, g) (HELD(w) & BIT(g))

inline record(g) {
    if :: recorded & BIT(g) -> second_outcome = 1 :: else fi;
    assert(!second_outcome);
    recorded = recorded | BIT(g)
}

#ifdef NO_GENERATION_IN_OUTCOME
#define IS_CURRENT(g) true
#else
#define IS_CURRENT(g) (generation == (g))
#endif
#ifdef NO_GENERATION_IN_RELEASE
#define IS_HELD(held) ((held) != BIT(0))
#else
#define IS_HELD(held) ((held) & BIT(generation))
#endif

/* Record the outcome of generation g, if there is one, then claim if the worker has room. */
inline execute_turn(w, g, result) {
    claimed = 0;
    if
    :: g != 0 && owner == w && status == RUNNING && IS_CURRENT(g) ->
        if :: !(finished & BIT(generation)) -> invented_outcome = 1 :: else fi;
        assert(!invented_outcome);
        record(generation);
        owner = NONE;
        status = (result == RETRY -> PENDING : ENDED)
    :: else
    fi;
    if
    :: CAN_CLAIM(w) ->
        generation++; owner = w; status = RUNNING; claimed = generation
    :: else
    fi
}

/* Return a task that the worker owns and does not hold: no child has seen it. */
inline execute_release(w, held) {
    if
    :: owner == w && status == RUNNING && !IS_HELD(held) ->
        if :: HOLDS(w, generation) -> released_held = 1 :: else fi;
        assert(!released_held);
        owner = NONE; status = PENDING;
        printf("generation %d is released\n", generation)
    :: else
    fi
}

/* An owner holds its task, or knows that it may own one, or its session is still executing a claim. */
inline check_owner() {
    if
    :: owner != NONE ->
        if
        :: !dead[owner] && !HOLDS(owner, generation) && !in_doubt[owner] -> forgotten = 1
        :: else
        fi
    :: else
    fi;
    assert(!forgotten)
}

inline take_answer(w) {
    reported[w] = 0; outcome[w] = 0;
    if
    :: claimed ->
        if :: started & BIT(claimed) -> two_owners = 1 :: else fi;
        assert(!two_owners);
        started = started | BIT(claimed);
        runs_still[w] = runs[w]; runs[w] = claimed;
        printf("worker %d runs generation %d\n", w, claimed)
    :: else
    fi;
    check_owner();
    claimed = 0
}

inline lose_answer(w) {
    losses++; claimed = 0;
#ifndef NO_RELEASE
    in_doubt[w] = 1;
#endif
    check_owner()
}

inline keep_for_later(w, kind) {
    late[w] = kind; late_reported[w] = reported[w]; late_outcome[w] = outcome[w];
    late_held[w] = HELD(w)
}

inline forget_late(w) {
    late[w] = 0; late_reported[w] = 0; late_outcome[w] = 0; late_held[w] = 0
}

#ifdef TAKES_LOCK_FIRST
#define HAS_LOCK(w) (late[w] == 0)
#else
#define HAS_LOCK(w) true
#endif
#define LATE(w) (late[w] != 0)
#define TAKES_TURNS(w) (!dead[w] && !in_doubt[w] && HAS_LOCK(w))

inline choose_outcome(w) {
    finished = finished | BIT(reported[w]);
    if
    :: reported[w] < GENERATIONS -> outcome[w] = RETRY
    :: outcome[w] = COMPLETE
    fi
}

proctype Worker(byte me) {
end:
    do
    :: atomic { !dead[me] && reported[me] == 0 && runs[me] != 0 ->          /* a child ends */
        reported[me] = runs[me]; runs[me] = 0; choose_outcome(me) }
    :: atomic { !dead[me] && reported[me] == 0 && runs_still[me] != 0 ->
        reported[me] = runs_still[me]; runs_still[me] = 0; choose_outcome(me) }
    :: atomic { TAKES_TURNS(me) && (CAN_CLAIM(me) || reported[me]) ->                 /* answered */
        d_step { execute_turn(me, reported[me], outcome[me]); take_answer(me) } }
    :: atomic { TAKES_TURNS(me) && (CAN_CLAIM(me) || reported[me]) && losses < LOSSES ->
        if
        :: d_step { execute_turn(me, reported[me], outcome[me]);    /* executed, not answered */
            printf("worker %d: answer of a turn lost, claimed %d\n", me, claimed); lose_answer(me) }
        :: d_step { printf("worker %d: turn lost\n", me); lose_answer(me) }
#ifdef LATE_COMMIT
        :: d_step { late[me] == 0 -> printf("worker %d: turn delayed\n", me);
            keep_for_later(me, TURN); lose_answer(me) }
#endif
        fi }
    :: atomic { !dead[me] && in_doubt[me] && HAS_LOCK(me) ->
        d_step { execute_release(me, HELD(me)); in_doubt[me] = 0; check_owner() } }
    :: atomic { !dead[me] && in_doubt[me] && HAS_LOCK(me) && losses < LOSSES ->
        if
        :: d_step { execute_release(me, HELD(me)); lose_answer(me) }
#ifdef LATE_COMMIT
        :: d_step { late[me] == 0 -> printf("worker %d: release delayed\n", me);
            keep_for_later(me, RELEASE); lose_answer(me) }
#endif
        fi }
    :: atomic { !dead[me] && runs[me] != 0 && runs[me] != generation ->     /* it finds itself condemned */
        printf("worker %d kills its child\n", me);
        runs[me] = 0; runs_still[me] = 0; in_doubt[me] = 1 }
    :: atomic { LATE(me) ->                                         /* the server, in a lost session */
        if
        :: late[me] == TURN -> d_step {
            printf("late turn of worker %d\n", me);
            execute_turn(me, late_reported[me], late_outcome[me]); claimed = 0 }
        :: late[me] == RELEASE -> d_step {
            printf("late release of worker %d\n", me); execute_release(me, late_held[me]) }
        :: true                                                     /* the session ends before */
        fi;
        d_step { forget_late(me); check_owner() } }
    od
}

inline recover() {
    printf("generation %d is recovered\n", generation);
    record(generation);
    owner = NONE
}

proctype World() {
end:
    do
    :: atomic { status == RUNNING && recoveries < RECOVERIES && !dead[owner] ->
        recoveries++; recover();
        if :: generation < GENERATIONS -> status = PENDING :: status = ENDED fi }
    :: atomic { status == RUNNING && dead[owner] && !LATE(owner) -> recover();
        if :: generation < GENERATIONS -> status = PENDING :: status = ENDED fi }
    :: atomic { !dead[0] ->                                         /* one worker may die */
        printf("worker 0 dies\n");
        dead[0] = 1; runs[0] = 0; runs_still[0] = 0; reported[0] = 0; outcome[0] = 0; in_doubt[0] = 0 }
    :: timeout ->
        if :: status != ENDED && generation < GENERATIONS -> not_ended = 1 :: else fi;
        assert(!not_ended);
        break
    od
}

init {
    byte i = 0;
    atomic {
        for (i : 0 .. N - 1) { run Worker(i) }
        run World()
    }
}
