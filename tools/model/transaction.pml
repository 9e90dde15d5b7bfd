/* The transaction of a task (tx): its rows and its outcome commit together, or not at all.
 *
 * docs/internals/liveness.md describes the properties and the abstractions. One task; every start of it is a
 * generation with a child and a session. A child writes, records the outcome, sends COMMIT and reports. An
 * adversary kills children and loses their sessions at any point, and recovery takes the task from a worker
 * that may be alive. A session whose client is gone stays until the server notices; a COMMIT that the server
 * has received may still be executed.
 *
 * Each macro that starts with NO_ removes a rule.
 */

#define GENERATIONS 4   /* the last generation is not retried */
#define NONE 0

#define PENDING 0       /* status of the task */
#define RUNNING 1
#define COMPLETED 2
#define FAILED 3

#define IDLE 0          /* states of a session */
#define WROTE 1         /* the rows of the task, not committed */
#define RECORDED 2      /* and its outcome: the row of the task is locked */
#define COMMITTING 3    /* the server has received COMMIT */
#define OVER 4

#define WORKING 1       /* states of a child */
#define ASKED 2         /* it has sent COMMIT and waits for the answer */
#define REPORTED 3
#define GONE 4          /* killed, or without its session: the worker decides */

byte status, generation;
byte locked_by = NONE;                  /* the generation whose session has locked the row of the task */
byte session[GENERATIONS + 1], child[GENERATIONS + 1];
bit recovered[GENERATIONS + 1];         /* the task was taken from its worker */
byte effects;                           /* committed rows */
bit two_effects, effect_without_outcome, outcome_without_effect, foreign_outcome, not_ended;

#ifdef NO_GENERATION_IN_RECORD
#define OWNS(g) (status == RUNNING)
#else
#define OWNS(g) (status == RUNNING && generation == (g))
#endif
#ifdef NO_ROW_LOCK
#define IS_FREE true
#else
#define IS_FREE (locked_by == NONE)
#endif

inline check() {
    if :: effects > 1 -> two_effects = 1 :: else fi;
    assert(!two_effects);
    if :: effects == 1 && status != COMPLETED -> effect_without_outcome = 1 :: else fi;
    assert(!effect_without_outcome);
    if :: effects == 0 && status == COMPLETED -> outcome_without_effect = 1 :: else fi;
    assert(!outcome_without_effect)
}

inline end_session(g) {
    session[g] = OVER;
    if :: locked_by == g -> locked_by = NONE :: else fi
}

/* A worker claims the task and starts a child. */
proctype worker() {
end_worker:
    do
    :: atomic { status == PENDING && generation < GENERATIONS ->
        generation++; status = RUNNING; child[generation] = WORKING }
    od
}

/* The child of generation g, and the server at the other end of its session. */
proctype attempt(byte g) {
end_attempt:
    do
    :: atomic { child[g] == WORKING && session[g] == IDLE -> session[g] = WROTE }
    :: atomic { child[g] == WORKING && session[g] == WROTE && IS_FREE ->
        if
        :: OWNS(g) -> session[g] = RECORDED; locked_by = g
        :: else -> end_session(g); child[g] = REPORTED  /* LOST: rolled back */
        fi }
#ifdef NO_SHARED_COMMIT
    /* The rows commit first, and the outcome follows in another transaction. */
    :: atomic { child[g] == WORKING && session[g] == RECORDED ->
        effects++; session[g] = COMMITTING; child[g] = ASKED; check() }
#else
    :: atomic { child[g] == WORKING && session[g] == RECORDED ->
        session[g] = COMMITTING; child[g] = ASKED }
#endif
    :: atomic { session[g] == COMMITTING ->
#ifndef NO_SHARED_COMMIT
        effects++;
#endif
        if :: generation != g -> foreign_outcome = 1 :: else fi;
        assert(!foreign_outcome);
        status = COMPLETED; end_session(g); check() }
    :: atomic { child[g] == ASKED && session[g] == OVER -> child[g] = REPORTED }
    /* Faults: the child is killed, or its session ends. */
    :: atomic { child[g] == WORKING || child[g] == ASKED -> child[g] = GONE }
    :: atomic { child[g] == GONE && session[g] != OVER -> end_session(g) }
    od
}

/* The worker's verdict on a child that is gone, and recovery of the task of a worker that may be alive. */
proctype verdict(byte g) {
end_verdict:
    do
    :: atomic { (child[g] == GONE || (child[g] != IDLE && !recovered[g])) && IS_FREE ->
        recovered[g] = 1;
#ifdef NO_STATUS_IN_VERDICT
        if
        :: generation == g ->
#else
        if
        :: generation == g && status == RUNNING ->
#endif
            status = (g < GENERATIONS -> PENDING : FAILED)
        :: else
        fi;
        check();
        break }
    od
}

/* Nothing can happen any more: the task has ended. */
proctype rest() {
    timeout;
    if :: status == PENDING || status == RUNNING -> not_ended = 1 :: else fi;
    assert(!not_ended)
}

init {
    atomic {
        run worker();
        run attempt(1); run attempt(2); run attempt(3); run attempt(4);
        run verdict(1); run verdict(2); run verdict(3); run verdict(4);
        run rest()
    }
}
