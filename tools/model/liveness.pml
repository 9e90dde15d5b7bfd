/* How workers find lost workers: session lock, sign, watch, condemnation, recovery.
 *
 * docs/internals/liveness.md describes the protocol, the properties and the abstractions. Time is discrete:
 * one tick is the longest interval between two signs or two looks of a worker (2.5 s). In every tick each
 * running worker performs one round: connect, sign, look, condemn, recover, turn. Every step is one
 * transaction and interleaves freely with the steps of other workers and with faults.
 *
 * Each macro below that starts with NO_ or names a wrong order removes one rule of the protocol. A macro
 * WITNESS_... turns a situation into an error, which shows that the model reaches it.
 */

#ifndef N
#define N 2             /* workers; number 0 owns the task and runs it when the model starts */
#endif
#ifndef FAULTS
#define FAULTS 2        /* faults in all; repairs are free */
#endif
#define KILL 1
#define FREEZE 2
#define CUT_ONE 4       /* the path of one worker */
#define HOLE_ONE 8
#define LOCK_ROW 16
#define CUT_ALL 32      /* the paths of all workers, or the database */
#define HOLE_ALL 64
#define LOCK_TASK 128
#ifndef KINDS
#define KINDS 255       /* the kinds of faults that happen */
#endif

#define LIMIT 4         /* worker_lost_after_ms */
#define GAP 2           /* half of it: two looks further apart are a gap */
#define STALE 6         /* running_stale_threshold_ms; only the order LIMIT < STALE matters */
#define GIVE_UP 2       /* the client's TCP timeout: a statement without an answer ends the session */
#define RESPONSE 3      /* ticks in which the watch starts, and the tasks are recovered after it */
#define LATE 2          /* a sign this old makes every observer look, not only the neighbour in the ring */

#define NONE 255        /* owner of a task that waits in its queue */

#define ALIVE 0         /* process */
#define FROZEN 1
#define DEAD 2

#define OK 0            /* network path of a worker, or of all workers */
#define CUT 1           /* sessions end on both sides; for all workers also a restart of the database */
#define HOLE 2          /* packets vanish; the server keeps its session */

#define DOWN 0          /* the worker's connection */
#define NEW 1           /* connected, but no statement was answered yet */
#define UP 2

#define FREE 0          /* session lock */
#define HELD 1          /* held by the worker's current session */
#define KEPT 2          /* held by an earlier session that the server has not ended yet */

#define ABSENT 0        /* row in horsies_workers */
#define OPEN 1
#define LOST 2

byte process[N], path[N], all_paths;
byte connection[N], lock[N], row[N];
bit session[N];         /* the server side of the worker's current connection exists */
bit row_locked[N];      /* another transaction locks the worker's row */
bit task_locked;        /* another transaction locks the task */
byte owner;
bit child[N];           /* a child of this worker runs the task */
bit must_release[N];    /* the worker may own a task that it does not hold */
bit done[N];            /* the worker has finished its round in this tick */
bit slept[N];           /* the worker was frozen when a tick passed */
byte stuck[N];          /* ticks that a statement has been without an answer */

/* The memory of observer o about worker w, at PAIR(o, w) */
#define PAIR(o, w) ((o) * N + (w))
byte silence[N * N];    /* 0, or 1 + ticks since the first look that found this sign and this state of the lock */
bit was_free[N * N];    /* the lock was free at the last look */
bit same[N * N];        /* the sign is the one of the last look */
bit busy[N * N];        /* the session that holds the lock was active since the last look */
byte verdict[N * N];    /* the rule by which the next statement condemns */
byte look_age[N];       /* ticks since the last answered look; GAP + 1 is a gap */
#if N > 2
byte sign_age[N];       /* ticks since the last sign of a worker, up to LATE */

/* The workers form a ring; a closed row is not part of it. Two workers always look at each other. */
#define AFTER(o, step) (((o) + (step)) % N)
#define IS_NEXT(o, w) ((w) == AFTER(o, 1) || ((w) == AFTER(o, 2) && row[AFTER(o, 1)] != OPEN))
#ifdef ONLY_NEIGHBOURS
#define IS_WATCHED(o, w) IS_NEXT(o, w)
#else
#define IS_WATCHED(o, w) (IS_NEXT(o, w) || sign_age[w] >= LATE)
#endif
#else
#define IS_WATCHED(o, w) true
#endif

/* Ghost variables: the truth that the properties compare with */
byte faults;
byte away[N];           /* ticks without presence, except in common outages */
byte worst[N];          /* the longest absence since the worker was last present */
byte common;            /* ticks in which no worker could act, one after another */
byte unrecovered;       /* quiet ticks in which the owner of the task was not serving it */
bit double_run, condemned_alive, not_recovered;

#define IN_HOLE(w) (path[w] == HOLE || all_paths == HOLE)
#define REACHES(w) (process[w] == ALIVE && path[w] == OK && all_paths == OK)
#define PRESENT(w) (REACHES(w) && connection[w] == UP && session[w])
#define STUCK(w) (process[w] == ALIVE && connection[w] != DOWN && IN_HOLE(w) && !done[w] && stuck[w] < GIVE_UP)
/* Workers 0 and 1 share a host; worker 2 is a container with the same host name. */
#define SPACE(w) ((w) / 2)

#ifdef ANY_PROCESS_SPACE
#define SEEN_GONE(o, w) (process[w] == DEAD || SPACE(o) != SPACE(w))
#else
#define SEEN_GONE(o, w) (process[w] == DEAD && SPACE(o) == SPACE(w))
#endif

/* The rules by which an observer condemns a worker, and the absence in ticks that each one requires. The
 * last sign before a freeze may be a tick older than the freeze. */
#define PROVED_GONE 1
#define SILENT 2
#define MOTIONLESS 3
#define REQUIRED(rule) (rule == MOTIONLESS -> STALE - 1 : LIMIT)

/* Silence lasts from the answer of one look to the question of another. */
#ifdef COUNTS_SLOW_LOOKS
#define FIRST_SILENCE(o) (1 + stuck[o])
#define SILENCE(o, w) (silence[PAIR(o, w)] - 1)
#else
#define FIRST_SILENCE(o) 1
#define SILENCE(o, w) (silence[PAIR(o, w)] - 1 - stuck[o])
#endif

#ifdef IGNORES_LOOK_TIME
#define LOOK_GAP(o) (look_age[o] == NONE -> GAP + 1 : look_age[o] - stuck[o])
#else
#define LOOK_GAP(o) look_age[o]     /* from answer to answer */
#endif

#ifdef NO_SIGN_GUARD
#define UNSIGNED(o, w) true
#else
#define UNSIGNED(o, w) same[PAIR(o, w)]
#endif

/* The guards of the condemning UPDATE besides the open row */
#define STILL_HOLDS(o, w) (UNSIGNED(o, w) && (verdict[PAIR(o, w)] == MOTIONLESS || lock[w] == FREE))

#ifdef NO_SIGN_WATCH
#define HAS_SIGNED(o, w) false
#else
#define HAS_SIGNED(o, w) (!same[PAIR(o, w)])
#endif

#ifdef NO_LOCK_TIMEOUT
#define BLOCKED(w) (process[w] == ALIVE && PRESENT(w) && task_locked && waits[w])
bit waits[N];
#else
#define BLOCKED(w) false
#endif

/* The session of worker w ended on the server. */
inline end_session(w) {
    session[w] = 0;
    if :: lock[w] == HELD -> lock[w] = FREE :: else fi
}

inline forget(observer, worker) {
    silence[PAIR(observer, worker)] = 0; was_free[PAIR(observer, worker)] = 0;
    same[PAIR(observer, worker)] = 0; busy[PAIR(observer, worker)] = 0
}

inline drop_watches(o) {
    for (i : 0 .. N - 1) { forget(o, i) }
    i = 0
}

/* The worker finds its session broken, or gives it up. */
inline lose_connection(w) {
    printf("worker %d loses its connection\n", w);
    connection[w] = DOWN;
    stuck[w] = 0;
    if
    :: session[w] ->            /* only this side gives up: the server keeps the session and the lock */
        session[w] = 0;
        /* An earlier session that holds the lock of a worker whose row is locked: left out, see the page. */
        if :: lock[w] == HELD -> lock[w] = (row_locked[w] -> FREE : KEPT) :: else fi
    :: else
    fi;
    for (i : 0 .. N - 1) { verdict[PAIR(w, i)] = 0 }
    i = 0;
#ifndef NO_BREAK_RESET
    drop_watches(w);
#endif
}

inline note_activity(w) {
    for (i : 0 .. N - 1) { busy[PAIR(i, w)] = (i != w && process[i] != DEAD && lock[w] == HELD) }
    i = 0
}

/* The first answer on a session, or a sign: the worker is present. */
inline become_present(w) {
    connection[w] = UP; away[w] = 0; worst[w] = 0
}

inline write_sign(w) {
    for (i : 0 .. N - 1) { same[PAIR(i, w)] = 0 }
#if N > 2
    sign_age[w] = 0;
#endif
    i = 0
}

inline kill_children(w) {
    child[w] = 0;
#ifndef FORGETS_AFTER_LOSS
    must_release[w] = 1
#else
    skip
#endif
}

inline look_at(o, w) {
    if
    :: o == w || row[w] != OPEN || !IS_WATCHED(o, w) -> forget(o, w)
    :: else ->
        if
        :: silence[PAIR(o, w)] == 0 || HAS_SIGNED(o, w) || was_free[PAIR(o, w)] != (lock[w] == FREE) ->
            silence[PAIR(o, w)] = FIRST_SILENCE(o);
#ifdef FIRST_LOOK_COUNTS
            if :: look_age[o] == NONE -> silence[PAIR(o, w)] = LIMIT + 1 :: else fi
#endif
#ifndef NO_ACTIVITY_CHECK
        :: busy[PAIR(o, w)] -> silence[PAIR(o, w)] = 1
#endif
        :: else
        fi;
        was_free[PAIR(o, w)] = (lock[w] == FREE);
        same[PAIR(o, w)] = 1;
        busy[PAIR(o, w)] = 0;
        if
        :: lock[w] == FREE && SEEN_GONE(o, w) -> verdict[PAIR(o, w)] = PROVED_GONE
        :: lock[w] == FREE && !SEEN_GONE(o, w) && SILENCE(o, w) >= (owner == w -> LIMIT : STALE) ->
            verdict[PAIR(o, w)] = SILENT
        :: lock[w] != FREE && SILENCE(o, w) >= STALE -> verdict[PAIR(o, w)] = MOTIONLESS
        :: else
        fi
    fi
}

inline look(o) {
#ifndef NO_GAP_RESET
    if :: LOOK_GAP(o) > GAP -> drop_watches(o) :: else fi;
#endif
    for (j : 0 .. N - 1) { look_at(o, j) }
    j = 0;
    stuck[o] = 0;
    look_age[o] = 0;
    printf("worker %d looks\n", o)
}

/* One transaction: take the lock if an earlier session held it, sign, look at the other workers. */
inline answer_sign(w) {
    if :: lock[w] == FREE -> lock[w] = HELD :: else fi;
    if
    :: row_locked[w] -> note_activity(w)       /* lock_timeout ends the sign; the next round repeats it */
    :: !row_locked[w] && row[w] == OPEN ->
        printf("worker %d signs\n", w);
        write_sign(w); become_present(w)
    :: !row_locked[w] && row[w] == LOST ->
        printf("worker %d finds itself condemned\n", w);
        kill_children(w); connection[w] = NEW
    :: else
    fi;
    if :: connection[w] == UP -> look(w) :: else fi
}

inline register(w) {
    printf("worker %d registers\n", w);
    row[w] = OPEN; write_sign(w); become_present(w);
    look(w)
}

inline condemn(o) {
    for (j : 0 .. N - 1) {
        if
        :: verdict[PAIR(o, j)] && row[j] == OPEN && !row_locked[j] && STILL_HOLDS(o, j) ->
            printf("worker %d condemns worker %d\n", o, j);
            row[j] = LOST;
            if
            :: process[j] != DEAD && worst[j] < REQUIRED(verdict[PAIR(o, j)]) ->
                condemned_alive = 1
            :: else
            fi;
            assert(!condemned_alive);
#ifdef WITNESS_PROVED_GONE
            assert(!(verdict[PAIR(o, j)] == PROVED_GONE));
#endif
#ifdef WITNESS_SILENT
            assert(!(verdict[PAIR(o, j)] == SILENT && process[j] == ALIVE));
#endif
#ifdef WITNESS_FROZEN
            assert(!(verdict[PAIR(o, j)] == MOTIONLESS && process[j] == FROZEN));
#endif
#ifdef ONLY_CONDEMNER_RECOVERS
            condemned_by[j] = o
#endif
        :: else
        fi;
        verdict[PAIR(o, j)] = 0
    }
    j = 0
}

#ifdef ONLY_CONDEMNER_RECOVERS
byte condemned_by[N];
#define MAY_RECOVER(w) (condemned_by[owner] == w)
#else
#define MAY_RECOVER(w) true
#endif

#define RECOVERABLE(w) (owner != NONE && !task_locked && row[(owner == NONE -> 0 : owner)] == LOST && MAY_RECOVER(w))

/* No two workers run the task at once while both are present. */
inline check_runs() {
    for (i : 0 .. N - 1) {
        for (j : 0 .. N - 1) {
            if :: i < j && child[i] && child[j] && PRESENT(i) && PRESENT(j) -> double_run = 1 :: else fi
        }
    }
    i = 0; j = 0;
    assert(!double_run)
}

inline claim(w) {
    printf("worker %d claims the task\n", w);
    owner = w;
    for (i : 0 .. N - 1) {
        if
        :: i != w && child[i] && process[i] != DEAD && worst[i] < LIMIT -> double_run = 1
        :: else
        fi
    }
    i = 0;
    assert(!double_run);
#ifdef WITNESS_OVERLAP
    for (i : 0 .. N - 1) { assert(!(i != w && child[i])) }
    i = 0;
#endif
    child[w] = 1
}

/* Tasks run for ever here: claim.pml has the outcomes. */
inline take_turn(w) {
    if
    :: must_release[w] ->
        if
        :: owner == w && !child[w] ->
            owner = NONE;
#ifdef WITNESS_RETURN
            assert(false)
#endif
        :: else
        fi;
        must_release[w] = 0
    :: else
    fi;
    if :: owner == NONE && !child[w] && !task_locked -> claim(w) :: else fi;
    check_runs()
}

/* A statement waits while packets vanish, until an answer comes or the worker gives the session up. */
#define ANSWERED(w) (process[w] == ALIVE && (!IN_HOLE(w) || stuck[w] >= GIVE_UP))
#define BROKEN(w) (!session[w] || IN_HOLE(w))

#define IF_BROKEN(w) BROKEN(w) -> d_step { lose_connection(w) }; goto connect
#define HAS_VERDICT(w) (verdict[PAIR(w, 0)] || verdict[PAIR(w, 1)] || verdict[PAIR(w, N - 1)])
#define HAS_TURN(w) (must_release[w] || owner == NONE)

proctype Worker(byte me) {
    byte i = 0, j = 0;

connect:
    atomic {
        process[me] == ALIVE && (connection[me] == DOWN || ANSWERED(me)) ->
        if
        :: connection[me] != DOWN && !BROKEN(me) -> goto sign
        :: else
        fi;
        d_step {
            if :: connection[me] != DOWN -> lose_connection(me) :: else fi;
            if
            :: REACHES(me) ->
                printf("worker %d connects\n", me);
                connection[me] = NEW; session[me] = 1;
                if :: lock[me] == FREE -> lock[me] = HELD :: else fi
            :: else
            fi
        };
        if :: connection[me] == DOWN -> goto finish :: else fi
    }
#ifdef TURN_BEFORE_SIGN
    atomic {
        ANSWERED(me) ->
        if
        :: IF_BROKEN(me)
        :: !BROKEN(me) && connection[me] == NEW && row[me] != ABSENT ->
            d_step { become_present(me); take_turn(me) }
        :: else
        fi
    }
#endif
sign:
    atomic {
        ANSWERED(me) ->
        if
        :: IF_BROKEN(me)
        :: else -> d_step { answer_sign(me) }
        fi;
        if
        :: connection[me] == UP -> goto after_look
        :: connection[me] != UP && row_locked[me] -> goto finish
        :: else
        fi
    }
    atomic {
        ANSWERED(me) ->
        if
        :: IF_BROKEN(me)
        :: !BROKEN(me) && row_locked[me] -> goto finish
        :: else -> d_step { register(me) }
        fi;
after_look:
        if
        :: HAS_VERDICT(me)
        :: !HAS_VERDICT(me) && RECOVERABLE(me) -> goto recover
        :: !HAS_VERDICT(me) && !RECOVERABLE(me) && HAS_TURN(me) -> goto turn
        :: else -> goto finish
        fi
    }
    atomic {
        ANSWERED(me) ->
        if
        :: IF_BROKEN(me)
        :: else -> d_step { condemn(me) }
        fi
    }
recover:
    atomic {
        ANSWERED(me) ->
        if
        :: IF_BROKEN(me)
        :: !BROKEN(me) && RECOVERABLE(me) -> printf("worker %d recovers the task\n", me); owner = NONE
        :: else
        fi
    }
turn:
#ifdef NO_LOCK_TIMEOUT
    waits[me] = 1;
    atomic { process[me] == ALIVE && (!task_locked || BROKEN(me)) -> waits[me] = 0 }
#endif
    atomic {
        ANSWERED(me) || (connection[me] == NEW && process[me] == ALIVE) ->
        if
        :: connection[me] == NEW -> goto sign           /* it was frozen: its sign is overdue */
        :: connection[me] != NEW && IF_BROKEN(me)
        :: else -> d_step { take_turn(me) }
        fi;
        if :: stuck[me] > 0 -> goto sign :: else fi;    /* overdue again */
finish:
        done[me] = 1; stuck[me] = 0
    }
end:
    atomic { process[me] == ALIVE && !done[me] -> goto connect }
}

inline count_fault() { faults++; unrecovered = 0 }

inline kill_worker(w) {
    process[w] = DEAD; child[w] = 0;
    if
    :: session[w] && IN_HOLE(w) && lock[w] == HELD -> lock[w] = KEPT
    :: session[w] && !IN_HOLE(w) && lock[w] == HELD -> lock[w] = FREE
    :: else
    fi;
    session[w] = 0; connection[w] = DOWN; done[w] = 0; stuck[w] = 0; must_release[w] = 0;
    look_age[w] = 0; drop_watches(w);
    for (i : 0 .. N - 1) { verdict[PAIR(w, i)] = 0 }
    i = 0
}

inline resume(w) {
    process[w] = ALIVE; common = 0;
#ifndef NO_FENCE
    if
    :: slept[w] && connection[w] == UP -> connection[w] = NEW       /* its sign is overdue: it comes first */
    :: else
    fi
#endif
}

#define FAULT(kind) (faults < FAULTS && (KINDS & (kind)))

proctype Faults(byte w) {
    byte i = 0;
end:
    do
    :: atomic { FAULT(KILL) && process[w] != DEAD ->
        printf("worker %d is killed\n", w); kill_worker(w); count_fault() }
    :: atomic { FAULT(FREEZE) && process[w] == ALIVE ->
        printf("worker %d is frozen\n", w); process[w] = FROZEN; count_fault() }
    :: atomic { FAULT(CUT_ONE) && path[w] == OK && process[w] != DEAD ->
        printf("path of worker %d is cut\n", w); path[w] = CUT; end_session(w); count_fault() }
    :: atomic { FAULT(HOLE_ONE) && path[w] == OK && process[w] != DEAD ->
        printf("path of worker %d becomes a black hole\n", w); path[w] = HOLE; count_fault() }
    :: atomic { FAULT(LOCK_ROW) && !row_locked[w] && lock[w] != KEPT ->
        printf("row of worker %d is locked\n", w); row_locked[w] = 1; count_fault() }
    :: atomic { process[w] == FROZEN ->
        printf("worker %d resumes\n", w); resume(w); unrecovered = 0 }
    :: atomic { path[w] != OK ->
        printf("path of worker %d heals\n", w); path[w] = OK; unrecovered = 0 }
    :: atomic { row_locked[w] ->
        printf("row of worker %d is unlocked\n", w); row_locked[w] = 0; unrecovered = 0 }
    :: atomic { lock[w] == KEPT || (lock[w] == HELD && IN_HOLE(w)) ->   /* the server's TCP keepalive gives up */
        printf("server ends a session of worker %d\n", w);
        if :: lock[w] == KEPT -> lock[w] = FREE :: else -> end_session(w) fi;
        unrecovered = 0 }
    od
}

proctype CommonFaults() {
    byte w = 0;
end:
    do
    :: atomic { FAULT(CUT_ALL) && all_paths == OK ->            /* an outage, or a restart of the database */
        printf("outage\n");
        all_paths = CUT;
        for (w : 0 .. N - 1) {
            end_session(w);
            if :: lock[w] == KEPT -> lock[w] = FREE :: else fi
        }
        w = 0; count_fault() }
    :: atomic { FAULT(HOLE_ALL) && all_paths == OK ->
        printf("all paths become black holes\n"); all_paths = HOLE; count_fault() }
    :: atomic { FAULT(LOCK_TASK) && !task_locked ->
        printf("task is locked\n"); task_locked = 1; count_fault() }
    :: atomic { all_paths != OK ->
        printf("outage ends\n"); all_paths = OK; common = 0; unrecovered = 0 }
    :: atomic { task_locked ->
        printf("task is unlocked\n"); task_locked = 0; unrecovered = 0 }
    od
}

#define AGE(x, most) if :: x < (most) -> x++ :: else fi

inline age_worker(w) {
    if :: STUCK(w) -> stuck[w]++ :: else fi;
    slept[w] = (process[w] == FROZEN);
#if N > 2
    AGE(sign_age[w], LATE);
#endif
    done[w] = 0;
    if :: look_age[w] != NONE && process[w] != DEAD -> AGE(look_age[w], GAP + 1) :: else fi;
    for (j : 0 .. N - 1) {
        if :: silence[PAIR(w, j)] > 0 -> AGE(silence[PAIR(w, j)], STALE + 3) :: else fi
    }
    j = 0
}

/* A worker whose earlier session held the lock until now is without it until its next sign. */
#define SHOWS_LIFE(w) (PRESENT(w) && lock[w] != FREE)

inline age_absence(w) {
    if
    :: process[w] == DEAD || SHOWS_LIFE(w) -> away[w] = 0
    :: process[w] != DEAD && !SHOWS_LIFE(w) && (all_paths == CUT || common > GAP) ->
        away[w] = 0     /* a common outage: every worker has the whole limit again after it */
    :: else -> AGE(away[w], STALE)
    fi;
    if :: away[w] > worst[w] && process[w] != DEAD -> worst[w] = away[w] :: else fi
}

/* Whether nothing hinders recovery: another worker is present, no lock, no outage. */
#define OBSERVED(w) ((w != 0 && PRESENT(0)) || (N > 1 && w != 1 && PRESENT(1)) || (N > 2 && w != 2 && PRESENT(N - 1)))
#define SERVED(w) (process[w] == ALIVE && child[w])

inline age_task() {
    if
    :: owner == NONE || task_locked || all_paths != OK -> unrecovered = 0
    :: else ->
        if
        :: SERVED(owner) || row_locked[owner] || !(OBSERVED(owner) || PRESENT(owner)) -> unrecovered = 0
        :: else ->
            if
            :: unrecovered >= (lock[owner] == FREE -> LIMIT : STALE) + RESPONSE -> not_recovered = 1
            :: else -> unrecovered++
            fi;
            assert(!not_recovered)
        fi
    fi
}

#define MAY_WAIT(w) (process[w] != ALIVE || done[w] || STUCK(w) || BLOCKED(w))

proctype Clock() {
    byte i = 0, j = 0;
end:
    do
    :: atomic {
        MAY_WAIT(0) && (N < 2 || MAY_WAIT(1)) && (N < 3 || MAY_WAIT(N - 1)) ->
        printf("tick\n");
        j = 0;
        for (i : 0 .. N - 1) { if :: process[i] == ALIVE && all_paths != HOLE -> j = 1 :: else fi }
        if :: j -> common = 0 :: else -> AGE(common, GAP + 1) fi;
        j = 0;
        for (i : 0 .. N - 1) { age_worker(i); age_absence(i) }
        i = 0;
        check_runs();
        age_task()
    }
#ifdef NP
progress:
        skip
#endif
    od
}

init {
    byte i = 0;
    atomic {
        owner = 0; child[0] = 1; row[0] = OPEN;
        for (i : 0 .. N - 1) { look_age[i] = NONE; run Worker(i); run Faults(i) }
        i = 0;
        run CommonFaults();
        run Clock()
    }
}
