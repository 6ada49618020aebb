"""Calls that run one at a time, in the order of the program."""

from __future__ import annotations

import threading

import pytest

from ringreduce.common.errors import CollectiveTimeoutError, ShutdownError
from ringreduce.common.lifetime import Lifetime
from ringreduce.common.serial import InOrder, SerialTask


@pytest.mark.parametrize("threads", [False, True])
def test_tasks_run_in_their_order(threads: bool):
    """Those that are waited for run here where nothing is before them, all others on one thread if there is one."""
    lifetime = Lifetime()
    order, done, gate = InOrder("test", lifetime, threads=threads), list[int](), threading.Event()
    where = list[threading.Thread]()

    def task(number: int) -> SerialTask:
        def call() -> None:
            if threads and number == 1:
                gate.wait(10)
            done.append(number)
            where.append(threading.current_thread())

        return SerialTask(call, f"task {number}")

    tasks = [task(number) for number in range(4)]
    order.submit(tasks[0], here=True)
    assert done == [0]
    for each in tasks[1:3]:
        order.submit(each, here=False)
    assert order.queues == threads
    gate.set()
    order.submit(tasks[3], here=True)
    for each in tasks:
        each.wait(10)
    assert done == [0, 1, 2, 3]
    here = threading.current_thread()
    assert [each is here for each in where] == [True, not threads, not threads, not threads or where[3] is here]
    lifetime.close()
    order.close()
    with pytest.raises(ShutdownError):
        order.submit(task(4), here=True)


def test_errors_reach_whoever_waits():
    """A task keeps its error, and those after it run; waits end in time."""
    order = InOrder("test", Lifetime(), threads=True)
    gate = threading.Event()
    bad, good = SerialTask(lambda: 1 / 0, "bad"), SerialTask(lambda: gate.wait(10), "the good one")
    heard = list[bool]()
    for each in (bad, good):
        order.submit(each, here=False)
    with pytest.raises(ZeroDivisionError):
        bad.wait(10)
    with pytest.raises(CollectiveTimeoutError, match="the good one"):
        good.wait(0.01)
    good.when_done(lambda: heard.append(good.done))
    gate.set()
    good.wait(10)
    order.close()
    bad.when_done(lambda: heard.append(bad.done))
    assert heard == [True, True]


def test_what_a_task_calls_when_done_comes_before_those_that_wait():
    """So it is at the same place on all ranks, however far ahead the program is."""
    order, done, gate = InOrder("test", Lifetime(), threads=True), list[str](), threading.Event()
    first = SerialTask(lambda: gate.wait(10), "first")
    first.when_done(lambda: order.submit(SerialTask(lambda: done.append("inner"), "inner"), here=False))
    second = SerialTask(lambda: done.append("second"), "second")
    for each in (first, second):
        order.submit(each, here=False)
    gate.set()
    second.wait(10)
    order.close()
    assert done == ["inner", "second"]
