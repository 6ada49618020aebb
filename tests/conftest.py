"""What all tests share: a watchdog that no hang survives, and random numbers that are the same in every run."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import zlib
from collections.abc import Generator, Iterator

import numpy as np
import pytest

os.environ.setdefault("RINGREDUCE_TUNING", "0")  # what this machine's user has tuned is not tested
LIMIT_S = float(os.environ.get("RINGREDUCE_TEST_TIMEOUT", "120"))


class Watchdog:
    """Ends the process, with the stacks of all its threads, when one test takes longer than ``limit_s`` seconds.

    It also guards the time before the first test and, because it stays armed, the way out of the process, where MPI
    waits for the other ranks. A process that is told to end from outside (by mpirun, because another rank ended or
    because the time is over) shows its stacks as well.

    Attributes:
        who: what the report begins with; tests/parallel puts the rank here.
    """

    def __init__(self, limit_s: float) -> None:
        self.who = f"process {os.getpid()}"
        self._limit_s = limit_s
        # A copy: pytest puts other files in the place of standard error while it captures.
        self._stream = os.fdopen(os.dup(sys.stderr.fileno()), "w")
        self._timer: threading.Timer | None = None
        faulthandler.register(signal.SIGTERM, file=self._stream, chain=True)

    def arm(self, activity: str, limit_s: float = 0.0) -> None:
        """Start to count anew; ``activity`` is what the report says took too long, if it takes more than the limits."""
        limit_s = max(limit_s, self._limit_s)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(limit_s, self._end, [activity, limit_s])
        self._timer.daemon = True
        self._timer.start()
        # The timer needs the interpreter, this does not: it is for code that hangs without giving it back.
        faulthandler.dump_traceback_later(limit_s + 5, file=self._stream, exit=True)

    def _end(self, activity: str, limit_s: float) -> None:
        self._stream.write(f"\n{self.who}: more than {limit_s:g} s in {activity}; all stacks:\n")
        self._stream.flush()
        faulthandler.dump_traceback(self._stream)
        os._exit(1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        marker = item.get_closest_marker("limit")
        self.arm(item.nodeid, *(marker.args if marker else ()))
        try:
            return (yield)
        finally:
            self.arm(f"what follows {item.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # other processes run the tests (pytest-xdist), each with a watchdog of its own
    watchdog = Watchdog(LIMIT_S)
    watchdog.arm("the start of the test run")
    config.pluginmanager.register(watchdog, "watchdog")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is thorough, without --all."""
    if not os.environ.get("TEST_ALL"):
        left_out = [item for item in items if item.get_closest_marker("thorough") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Leave what lives as long as the tests out of garbage collections, which tests ask for again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number that depends on the test alone (and in tests/parallel on the rank)."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Random numbers that are the same in every run of this test."""
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    """Seed what draws from global state."""
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread per thread that calls it: where ranks are threads, there are enough of them."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
