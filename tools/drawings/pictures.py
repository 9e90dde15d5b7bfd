"""The drawings: each function returns its canvas."""

from __future__ import annotations

from tools.drawings.canvas import Canvas


def how_it_works() -> Canvas:
    """Draw a producer, PostgreSQL, a worker and its children, with the transaction marked."""
    canvas = Canvas(
        900,
        330,
        "An order and its task are stored in one transaction; a worker claims the task, a child runs it",
    )
    canvas.frame((12, 20), (230, 250), "your program")
    canvas.box((32, 62), (190, 150), "", kind="accent", dashed=True)
    canvas.words((127, 86), "one transaction", "muted", colour="accent")
    canvas.box((47, 98), (160, 42), "INSERT order", code=True)
    canvas.box((47, 154), (160, 42), "confirm.enqueue", code=True)
    canvas.words((127, 248), "handle.result()", "code")

    canvas.frame((350, 20), (200, 250), "PostgreSQL")
    canvas.box((370, 98), (160, 42), "your tables")
    canvas.box((370, 154), (160, 42), "tasks", kind="accent")
    canvas.box((370, 212), (160, 42), "results")

    canvas.frame((658, 20), (230, 250), "worker")
    canvas.box((678, 62), (190, 52), "parent process", ["claims, records"])
    canvas.box((678, 150), (88, 50), "child", ["one task"], kind="running")
    canvas.box((780, 150), (88, 50), "child", ["one task"], kind="running")
    canvas.words((773, 232), "your code runs here", "muted")

    canvas.arrow([(222, 119), (370, 119)], kind="accent")
    canvas.arrow([(222, 175), (370, 175)], "COMMIT", "accent", at=(296, 151))
    canvas.arrow([(550, 88), (678, 88)], "notify", at=(614, 80), dashed=True)
    canvas.arrow([(678, 104), (604, 104), (604, 175), (530, 175)], "claim", at=(578, 168))
    canvas.arrow([(640, 104), (640, 233), (530, 233)], "record", at=(582, 226))
    canvas.arrow([(722, 114), (722, 150)])
    canvas.arrow([(824, 114), (824, 150)])
    canvas.arrow(
        [(370, 233), (300, 233), (300, 244), (200, 244)], "notify", at=(285, 226), dashed=True
    )
    canvas.words((450, 304), "If you roll back, the order and its task never existed.", "muted")
    return canvas


def life_of_a_task() -> Canvas:
    """Draw the five states of a task, with the retry."""
    canvas = Canvas(
        900,
        300,
        "A task waits, runs, and ends as completed or failed; a retry returns it to its queue",
    )
    canvas.box((20, 110), (150, 64), "send", ["stored, durable"], kind="accent")
    canvas.box((230, 110), (160, 64), "PENDING", ["waits in its queue"])
    canvas.box((460, 110), (170, 64), "RUNNING", ["in its own process"], kind="running")
    canvas.box((710, 40), (170, 64), "COMPLETED", ["its value is stored"], kind="ok")
    canvas.box((710, 180), (170, 64), "FAILED", ["its error is stored"], kind="failed")
    canvas.arrow([(170, 142), (230, 142)])
    canvas.arrow([(390, 142), (460, 142)], "claim")
    canvas.arrow(
        [(630, 130), (670, 130), (670, 72), (710, 72)], "returns", at=(664, 92), anchor="end"
    )
    canvas.arrow(
        [(630, 154), (670, 154), (670, 212), (710, 212)], "fails", at=(664, 204), anchor="end"
    )
    canvas.arrow(
        [(545, 110), (545, 50), (310, 50), (310, 110)],
        "listed in its retry policy: back to the queue, after a wait",
        "accent",
        at=(428, 40),
    )
    canvas.arrow([(310, 174), (310, 214)], dashed=True)
    canvas.words((310, 234), "EXPIRED: not started in time", "muted")
    canvas.arrow([(545, 174), (545, 250)], dashed=True)
    canvas.words((545, 270), "CANCELLED: you asked for it", "muted")
    return canvas


def crash() -> Canvas:
    """Draw the timeline of a task whose process dies, before and after its code starts."""
    canvas = Canvas(
        900,
        360,
        "A crash before your code starts is invisible; after that the task fails or is retried, as you chose",
    )
    canvas.words((20, 30), "The worker dies before your code starts", "title", "start")
    canvas.rule_line((20, 90), (880, 90), width=2)
    canvas.words((20, 190), "It dies while your code runs", "title", "start")
    canvas.rule_line((20, 250), (530, 250), width=2)
    _moments(canvas, 90, [(90, "sent", "accent"), (260, "claimed", ""), (400, "crash", "failed")])
    _moments(
        canvas, 90, [(560, "claimed again", ""), (720, "runs", "running"), (850, "done", "ok")]
    )
    canvas.words((480, 124), "another worker detects it", "muted")
    _moments(
        canvas, 250, [(90, "sent", "accent"), (230, "runs", "running"), (400, "crash", "failed")]
    )
    canvas.words((400, 284), "a crashed child is noticed at once,", "muted")
    canvas.words((400, 302), "a lost host within seconds", "muted")
    canvas.arrow([(520, 250), (560, 250), (560, 222), (610, 222)], kind="muted")
    canvas.box((612, 202), (270, 40), "FAILED: WORKER_CRASHED", kind="failed")
    canvas.arrow([(520, 250), (560, 250), (560, 292), (610, 292)], kind="muted")
    canvas.box((612, 270), (270, 44), "runs again", kind="ok")
    canvas.words((747, 258), "default: at most once", "muted")
    canvas.words((747, 332), "WORKER_CRASHED listed: at least once", "muted")
    return canvas


def _moments(canvas: Canvas, y: float, moments: list[tuple[float, str, str]]) -> None:
    for x, label, kind in moments:
        colour = kind or "muted"
        canvas.raw(f'<circle cx="{x:g}" cy="{y:g}" r="7" style="fill:var(--{colour})"/>')
        canvas.words((x, y - 16), label, "title", colour=colour if kind else "")


def order_workflow() -> Canvas:
    """Draw the workflow of README and Home: two parallel checks, then a task that uses both results."""
    canvas = Canvas(640, 150, "reserve and charge run side by side; ship runs with both results")
    canvas.box((20, 14), (190, 50), "reserve", ["order 17"], kind="running")
    canvas.box((20, 86), (190, 50), "charge", ["order 17"], kind="running")
    canvas.box((400, 48), (210, 56), "ship", ["runs when both have ended"], kind="ok")
    canvas.arrow([(210, 39), (300, 39), (300, 68), (400, 68)], "pieces", at=(255, 32))
    canvas.arrow([(210, 111), (300, 111), (300, 86), (400, 86)], "receipt", at=(255, 128))
    return canvas


def fan_out() -> Canvas:
    """Draw the workflow of the second tutorial."""
    canvas = Canvas(880, 220, "list_orders, a map of price, add_up, a signal approval, then ship")
    canvas.box((12, 82), (140, 50), "orders", ["list_orders"])
    for y in (10, 82, 154):
        canvas.box((212, y), (130, 50), "price", ["one order"], kind="running")
        canvas.arrow([(152, 107), (182, 107), (182, y + 25), (212, y + 25)])
        canvas.arrow([(342, y + 25), (372, y + 25), (372, 107), (402, 107)])
    canvas.box((402, 82), (120, 50), "total", ["add_up"])
    canvas.box((572, 82), (140, 50), "approval", ["waits for you"], kind="accent", dashed=True)
    canvas.box((762, 82), (106, 50), "ship", ["the end"], kind="ok")
    canvas.arrow([(522, 107), (572, 107)])
    canvas.arrow([(712, 107), (762, 107)])
    return canvas


def dual_write() -> Canvas:
    """Draw the problem that an outbox solves, and its solution in Horsies."""
    canvas = Canvas(900, 290, "Two systems can disagree; one transaction cannot")
    canvas.words((20, 28), "With a broker: two writes, and a gap between them", "title", "start")
    canvas.box((20, 48), (150, 46), "your program")
    canvas.box((330, 48), (150, 46), "database", ["COMMIT"], kind="ok")
    canvas.box((700, 48), (180, 46), "broker", ["never told"], kind="failed")
    canvas.arrow([(170, 64), (330, 64)], "1. the order")
    canvas.arrow(
        [(170, 84), (250, 84), (250, 116), (790, 116), (790, 94)], dashed=True, kind="failed"
    )
    canvas.words((560, 134), "2. a crash here: an order without its task", "muted", colour="failed")
    canvas.words((20, 186), "With Horsies: one write", "title", "start")
    canvas.box((20, 206), (150, 56), "your program")
    canvas.box((330, 200), (550, 68), "", kind="accent", dashed=True)
    canvas.box((350, 211), (220, 46), "the order")
    canvas.box((640, 211), (220, 46), "its task", kind="ok")
    canvas.arrow([(170, 234), (330, 234)], "one COMMIT", "accent")
    canvas.words((605, 240), "and", "muted")
    return canvas


def state_machine() -> Canvas:
    """Draw every status of a task with the verbs between them; a test compares the drawing with the
    code.
    """
    canvas = Canvas(900, 420, "The statuses of a task and the verbs between them")
    size = (150, 50)
    canvas.box((120, 150), size, "PENDING", kind="accent")
    canvas.box((390, 150), size, "CLAIMED")
    canvas.box((660, 150), size, "RUNNING", kind="running")
    canvas.box((80, 340), (120, 50), "EXPIRED")
    canvas.box((390, 340), size, "CANCELLED")
    canvas.box((590, 340), (140, 50), "FAILED", kind="failed")
    canvas.box((750, 340), (140, 50), "COMPLETED", kind="ok")
    canvas.arrow([(20, 175), (120, 175)], "send")
    canvas.arrow([(270, 165), (390, 165)], "claim")
    canvas.arrow([(390, 188), (270, 188)], "release", at=(330, 206))
    canvas.arrow([(540, 175), (660, 175)], "start")
    canvas.arrow([(210, 150), (210, 100), (710, 100), (710, 150)], "claim_and_start", at=(460, 94))
    canvas.arrow(
        [(760, 150), (760, 60), (180, 60), (180, 150)], "retry", at=(460, 54), kind="accent"
    )
    canvas.arrow([(735, 150), (735, 80), (195, 80), (195, 150)], "park", at=(460, 75))
    canvas.arrow([(790, 150), (790, 24), (150, 24), (150, 150)], "release", at=(460, 18))
    canvas.arrow([(160, 200), (160, 340)], "expire", at=(150, 275), anchor="end")
    canvas.arrow([(240, 200), (240, 365), (390, 365)], "cancel", at=(315, 358))
    canvas.arrow([(465, 200), (465, 340)], "cancel", at=(456, 275), anchor="end")
    canvas.arrow([(680, 200), (680, 250), (500, 250), (500, 340)], "cancel", at=(590, 243))
    canvas.arrow([(720, 200), (720, 300), (660, 300), (660, 340)], "fail", at=(690, 293))
    canvas.arrow([(800, 200), (800, 340)], "complete", at=(810, 275), anchor="start")
    return canvas


def liveness() -> Canvas:
    """Draw the states of a worker as other workers see them."""
    canvas = Canvas(
        900, 330, "The states of a worker: unregistered, open, suspected, declared lost, closed"
    )
    size = (150, 50)
    canvas.box((20, 60), size, "unregistered")
    canvas.box((330, 60), size, "open", kind="ok")
    canvas.box((700, 60), (170, 50), "suspected", kind="accent")
    canvas.box((310, 240), (130, 50), "closed")
    canvas.box((700, 240), (170, 50), "declared lost", kind="failed")
    canvas.arrow([(170, 85), (330, 85)], "register")
    canvas.arrow([(480, 75), (700, 75)], "a poll finds the lock free")
    canvas.arrow([(700, 97), (480, 97)], "new sign, or lock held", at=(590, 116))
    canvas.arrow([(785, 110), (785, 240)], "proved gone, or silent", at=(776, 180), anchor="end")
    canvas.arrow([(375, 110), (375, 240)], "graceful shutdown", at=(366, 190), anchor="end")
    canvas.arrow([(462, 110), (462, 265), (700, 265)], "motionless", at=(580, 258))
    canvas.arrow(
        [(785, 290), (785, 316), (60, 316), (60, 110)],
        "the worker signs, finds out, and kills its children",
        at=(420, 310),
        dashed=True,
    )
    return canvas


def code_map() -> Canvas:
    """Draw the path of a task through the modules."""
    canvas = Canvas(900, 480, "The modules that a task passes: producer, PostgreSQL, worker, child")
    canvas.frame((12, 12), (410, 190), "producer")
    canvas.box((32, 50), (160, 42), "task.py", ["send"])
    canvas.box((232, 50), (170, 42), "tasks/request.py", ["check, encode"])
    canvas.box((232, 140), (170, 42), "tasks/send.py", ["insert"])
    canvas.box((32, 140), (160, 42), "tasks/handle.py", ["get, waiters.py"])
    canvas.frame((480, 12), (160, 190), "PostgreSQL")
    canvas.box((496, 90), (128, 50), "horsies_tasks", kind="accent")
    canvas.frame((12, 226), (630, 240), "worker")
    canvas.box((32, 268), (180, 42), "worker/loop.py")
    canvas.box((432, 268), (190, 42), "worker/turn.py", ["record and claim"])
    canvas.box((232, 340), (180, 42), "worker/dispatcher.py", ["ledger.py"])
    canvas.box((432, 412), (190, 42), "worker/pool/pool.py", ["dispatch, collect"])
    canvas.box((32, 412), (180, 42), "tasks/outcome.py", ["outcome of a report"])
    canvas.frame((680, 226), (210, 240), "child")
    canvas.box((696, 412), (178, 42), "child/main.py")
    canvas.box((696, 340), (178, 42), "child/execute.py", ["decode, encode"])
    canvas.box((696, 268), (178, 42), "tasks/invoke.py", ["your function"], kind="running")
    canvas.arrow([(192, 71), (232, 71)])
    canvas.arrow([(317, 92), (317, 140)])
    canvas.arrow([(402, 161), (440, 161), (440, 115), (496, 115)], "INSERT", at=(446, 106))
    canvas.arrow([(212, 289), (432, 289)])
    canvas.arrow([(122, 310), (122, 361), (232, 361)])
    canvas.arrow([(412, 361), (520, 361), (520, 412)])
    canvas.arrow([(300, 382), (300, 433), (212, 433)])
    canvas.arrow([(530, 268), (530, 140)], "one transaction", at=(540, 218), anchor="start")
    canvas.arrow([(622, 425), (696, 425)])
    canvas.arrow([(696, 442), (622, 442)])
    canvas.arrow([(785, 412), (785, 382)])
    canvas.arrow([(785, 340), (785, 310)])
    return canvas


PICTURES = {
    "how-it-works": how_it_works,
    "life-of-a-task": life_of_a_task,
    "crash": crash,
    "order-workflow": order_workflow,
    "fan-out": fan_out,
    "dual-write": dual_write,
    "state-machine": state_machine,
    "liveness": liveness,
    "code-map": code_map,
}
