"""Programs that children execute instead of an application: small functions by name."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from horsies.errors import TaskStopped
from horsies.worker import protocol
from horsies.worker.child.parent_socket import ParentSocket
from horsies.worker.protocol import Assignment, ChildBoot, ChildReport, FrameKind
from tests.support.apps.hostile import KINDS, LOOP_KINDS, read_bytes


class FunctionProgram:
    def __init__(
        self,
        hooks: Sequence[Callable[[], object]] = (),
        stop_hooks: Sequence[Callable[[], object]] = (),
    ) -> None:
        self._hooks = hooks
        self._stop_hooks = stop_hooks

    def start_hooks(self) -> Sequence[Callable[[], object]]:
        return self._hooks

    def stop_hooks(self) -> Sequence[Callable[[], object]]:
        return self._stop_hooks

    def execute(self, assignment: Assignment) -> ChildReport:
        value = FUNCTIONS[assignment.task_name](*json.loads(assignment.args_json))
        return _report(assignment, value)

    def execute_batch(self, assignments: Sequence[Assignment]) -> Sequence[ChildReport]:
        return [self.execute(one) for one in assignments]

    async def execute_async(self, assignment: Assignment) -> ChildReport:
        value = FUNCTIONS[assignment.task_name](*json.loads(assignment.args_json))
        return _report(assignment, await value if inspect.isawaitable(value) else value)

    def warm_up(self, assignment: Assignment) -> ChildReport:
        return ChildReport(assignment.task_id, assignment.generation, True, "null", None, None)

    def close(self) -> None:
        return None


def _report(assignment: Assignment, value: object) -> ChildReport:
    result = json.dumps(value)
    return ChildReport(assignment.task_id, assignment.generation, True, result, None, None)


def load(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram()


def load_with_hooks(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram([first_hook, second_hook])


def load_without_threads(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram((refuse_threads,))


def load_with_raising_hook(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram([first_hook, raising_hook])


def load_with_slow_hook(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram([slow_hook])


def load_with_slow_stop_hook(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram(stop_hooks=[slow_hook])


def load_with_exiting_hook(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram([exiting_hook])


def load_with_hook_failing_later(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram([hook_failing_later])


def load_with_dying_hook(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram([dying_hook])


def load_with_moving_hook(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram([moving_hook])


def load_with_user_changing_hook(boot: ChildBoot) -> FunctionProgram:
    return FunctionProgram([change_user])


def load_nothing(boot: ChildBoot) -> FunctionProgram:
    raise ImportError("no such thing")


def load_for_ever(boot: ChildBoot) -> FunctionProgram:
    while True:
        time.sleep(60)


def load_with_helper(boot: ChildBoot) -> FunctionProgram:
    helper = subprocess.Popen(["sleep", "60"], process_group=0)
    with open(os.environ["POOL_TEST_HELPER_PID"], "w") as file:
        file.write(str(helper.pid))
    return FunctionProgram()


def first_hook() -> None:
    HOOKS_THAT_RAN.append("first_hook")


def second_hook() -> None:
    HOOKS_THAT_RAN.append("second_hook")


def refuse_threads() -> None:
    """Prevent this process from starting a thread."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse  # type: ignore[assignment,method-assign]


def raising_hook() -> None:
    raise ValueError("no license")


def slow_hook() -> None:
    time.sleep(600)


def exiting_hook() -> None:
    sys.exit(0)


def hook_failing_later() -> None:
    if os.path.exists(os.environ["POOL_TEST_HOOK_FAILS_IF"]):
        raise RuntimeError("not any more")


def dying_hook() -> None:
    if os.path.exists(os.environ["POOL_TEST_BOOT_DIES_IF"]):
        os._exit(9)


def moving_hook() -> None:
    os.chdir("/")
    os.umask(0o027)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_PROF, 60, 60)


def describe_after_hooks() -> list[Any]:
    mask = os.umask(0)
    os.umask(mask)
    return [
        os.getcwd(),
        mask,
        callable(signal.getsignal(signal.SIGTERM)),
        signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN,
        signal.getitimer(signal.ITIMER_PROF)[1],
    ]


def hooks_that_ran() -> list[Any]:
    return [os.getpid(), *HOOKS_THAT_RAN]


def echo(value: Any) -> Any:
    return value


def own_pid() -> int:
    return os.getpid()


def wait_forever(marker: str) -> None:
    touch(marker)
    while True:
        time.sleep(60)


def wait_with(text: str) -> None:
    while True:
        time.sleep(60)


def touch(path: str) -> None:
    with open(path, "w") as marker:
        marker.write(str(os.getpid()))


def gated(journal: str, gate: str, label: str) -> str:
    """Write a line, then wait for a byte from the named pipe."""
    note(journal, label)
    read_byte(gate)
    return label


def note(journal: str, label: str) -> str:
    """Write a line in one call, so that a kill cannot truncate it."""
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{label}\n".encode())
    os.close(descriptor)
    return label


def note_and_sleep(journal: str, label: str, seconds: float) -> str:
    note(journal, label)
    time.sleep(seconds)
    return label


async def wait_for_ever(journal: str, ignores_stop: bool) -> None:
    note(journal, "begun")
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            if not ignores_stop:
                raise


async def clean_up_slowly(journal: str, gate: str) -> None:
    """Wait for a byte from the named pipe after a stop."""
    note(journal, "begun")
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.to_thread(read_byte, gate)


def read_byte(gate: str) -> None:
    with open(gate, "rb", buffering=0) as pipe:
        pipe.read(1)


async def note_twice(journal: str, seconds: float) -> None:
    note(journal, "begun")
    await asyncio.sleep(seconds)
    note(journal, "ended")


async def fork_into_the_loop() -> int:
    """Fork a process that continues on the event loop, and return its pid."""
    future = asyncio.get_running_loop().create_future()
    if (pid := os.fork()) == 0:
        await future
    return pid


async def cancel_others() -> None:
    """Cancel every other task of the event loop."""
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()


async def set_old_task_factory() -> None:
    """Install a task factory with the older signature, which takes no context."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(lambda loop, coroutine: asyncio.Task(coroutine, loop=loop))


def note_and_exit(journal: str, label: str) -> None:
    note(journal, label)
    os._exit(3)


def note_and_fork(journal: str, label: str) -> str:
    note(journal, label)
    if os.fork() == 0:
        os._exit(0)
    return label


def note_and_segfault(journal: str, label: str) -> None:
    note(journal, label)
    segfault()


def note_and_close(journal: str, label: str) -> None:
    note(journal, label)
    close_all_descriptors()


def note_and_block(journal: str, label: str) -> None:
    """Block SIGTERM and wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    note(journal, label)
    time.sleep(600)


def note_and_return_much(journal: str, label: str) -> str:
    return note(journal, label).ljust(20_000_000)


def attack(journal: str, label: str, kind: str) -> str:
    """Run one of the functions of ``hostile.py``."""
    note(journal, label)
    KINDS[kind]()
    return label


async def attack_loop(journal: str, label: str, kind: str) -> str:
    note(journal, label)
    await LOOP_KINDS[kind]()
    return label


def exit_with(code: int) -> None:
    os._exit(code)


def segfault() -> None:
    ctypes.string_at(0)


def ignore_stop(marker: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait_forever(marker)


def clean_up_when_stopped(marker: str, cleaned: str) -> None:
    try:
        wait_forever(marker)
    finally:
        touch(cleaned)


def start_grandchild(marker: str) -> None:
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(marker + ".part", "w") as file:
        file.write(str(grandchild.pid))
    os.rename(marker + ".part", marker)
    while True:
        time.sleep(60)


def leave_grandchild() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def fork_and_return() -> str:
    return "grandchild" if os.fork() == 0 else "child"


def close_all_descriptors() -> None:
    os.closerange(3, 70000)
    while True:
        time.sleep(60)


def close_low_descriptors() -> str:
    os.closerange(3, 256)
    return "still here"


def flood_stdout(byte_count: int) -> int:
    with open(os.devnull, "w") as null:
        saved = os.dup(1)
        os.dup2(null.fileno(), 1)
        sys.stdout.write("x" * byte_count)
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
    return byte_count


def write_forgery(kind: str) -> None:
    """Send a forged frame with the child's mark."""
    own_parent().send(FORGERIES[kind])
    while True:
        time.sleep(60)


def send_half_a_report() -> None:
    """Send part of a report with the child's mark, then nothing."""
    parent = own_parent()
    parent.socket.send(parent.marked(FORGERIES["other task"])[:-3])
    while True:
        time.sleep(60)


def own_parent() -> ParentSocket:
    """Return the child's connection object, found in a calling stack frame."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("parent"), ParentSocket):
            return found
        frame = frame.f_back
    raise LookupError("no frame of this thread has it")


def note_and_steal(path: str, name: str, gate: str, count: int) -> None:
    """Read this many of the worker's bytes to this process each time the gate opens."""
    note(path, name)
    with open(gate, "rb") as opened:
        opened.read(1)
    read_bytes(count)
    note(path, f"{name} has stolen")
    with open(gate, "rb") as opened:
        opened.read(1)


def terminate_forked_process() -> int:
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def interrupt_started_process() -> int:
    started = subprocess.Popen(["sleep", "600"])
    started.send_signal(signal.SIGINT)
    return started.wait(30)


def interrupt_itself() -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return "still here"


def own_rss_mb() -> float:
    return psutil.Process().memory_info().rss / 1024 / 1024


def change_process_state(directory: str) -> None:
    os.chdir(directory)
    os.umask(0o777)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in COMMON_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for timer in TIMERS:
        signal.setitimer(timer, 0.3)


def describe_process_state() -> list[Any]:
    mask = os.umask(0)
    os.umask(mask)
    return [
        os.getcwd(),
        mask,
        callable(signal.getsignal(signal.SIGTERM)),
        callable(signal.getsignal(signal.SIGINT)),
        [str(signal.getsignal(number)) for number in COMMON_SIGNALS],
        sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        [signal.getitimer(timer) for timer in TIMERS],
    ]


def change_user() -> None:
    """Change to another user and back, which makes the kernel drop the death signal."""
    os.seteuid(65534)
    os.seteuid(0)


def clear_death_signal() -> None:
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)


def death_signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def stop_itself(marker: str) -> None:
    touch(marker)
    os.kill(os.getpid(), signal.SIGSTOP)


def become_another_program() -> None:
    os.execvp("sleep", ["sleep", "600"])


def forbid_descriptors(count: int) -> str:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))
    return "still here"


def forbid_system_calls() -> None:
    ctypes.CDLL(None).prctl(22, 1, 0, 0, 0)
    os.getppid()


def raise_task_stopped() -> None:
    raise TaskStopped


def shorten_shared_memory() -> list[str]:
    """Shorten the shared memory, so that the worker would read beyond its end."""
    refused = []
    found = [one for one in os.listdir("/proc/self/map_files") if _is_shared_memory(one)]
    for name in found:
        try:
            os.truncate(f"/proc/self/map_files/{name}", 0)
        except PermissionError as error:
            refused.append(str(error))
    return refused


def _is_shared_memory(name: str) -> bool:
    with suppress(OSError):
        return "memfd:horsies" in os.readlink(f"/proc/self/map_files/{name}")
    return False


def flood_with_hellos() -> None:
    parent = own_parent()
    hello = parent.marked(protocol.encode_numbers(FrameKind.HELLO, os.getpid(), 0))
    while True:
        parent.socket.sendall(hello * 1_000)


def allocate(megabytes: int) -> int:
    HOARD.append(bytearray(megabytes * 1024 * 1024))
    return len(HOARD)


def text_of(length: int) -> str:
    return "x" * length


def length_of(text: str) -> int:
    return len(text)


def log_a_line(text: str) -> None:
    logging.getLogger("app").warning(text)


def list_sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            continue
    return sorted(found)


def environment(name: str) -> str | None:
    return os.environ.get(name)


TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
COMMON_SIGNALS = (
    signal.SIGALRM,
    signal.SIGCHLD,
    signal.SIGHUP,
    signal.SIGPIPE,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
HOARD: list[bytearray] = []
HOOKS_THAT_RAN: list[str] = []
FORGERIES = {
    "other task": protocol.encode_report(ChildReport("another", 7, True, "1", None, None)),
    "other claim": protocol.encode_report(ChildReport("another", 8, True, "1", None, None)),
    "ready": protocol.encode_numbers(FrameKind.READY, 1, 1),
    "hello": protocol.encode_numbers(FrameKind.HELLO, 1, 1),
    "task stopped": protocol.encode_texts(FrameKind.TASK_STOPPED, "another", "7"),
    "progress": protocol.encode_texts(FrameKind.PROGRESS, "another", "7", "inf", "nan", ""),
    "assign": protocol.encode_assignment(Assignment("x", 1, "x", 1, "[]", "{}", None)),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        echo,
        own_pid,
        wait_forever,
        wait_with,
        touch,
        gated,
        note,
        note_and_sleep,
        note_and_exit,
        note_and_fork,
        note_and_steal,
        wait_for_ever,
        clean_up_slowly,
        note_twice,
        fork_into_the_loop,
        cancel_others,
        set_old_task_factory,
        note_and_segfault,
        note_and_close,
        note_and_block,
        note_and_return_much,
        attack,
        attack_loop,
        exit_with,
        segfault,
        ignore_stop,
        clean_up_when_stopped,
        start_grandchild,
        leave_grandchild,
        fork_and_return,
        close_all_descriptors,
        close_low_descriptors,
        flood_stdout,
        send_half_a_report,
        change_process_state,
        describe_process_state,
        change_user,
        clear_death_signal,
        death_signal,
        stop_itself,
        become_another_program,
        forbid_descriptors,
        forbid_system_calls,
        raise_task_stopped,
        shorten_shared_memory,
        flood_with_hellos,
        describe_after_hooks,
        interrupt_started_process,
        interrupt_itself,
        allocate,
        text_of,
        length_of,
        log_a_line,
        list_sockets,
        environment,
        hooks_that_ran,
        write_forgery,
        terminate_forked_process,
        own_rss_mb,
    )
}
