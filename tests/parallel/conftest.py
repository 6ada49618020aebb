"""The harness of the multi-rank tests: the same suite runs under ``mpirun -np N python -m pytest tests/parallel``.

Every rank runs every test. After each phase of a test (set-up, call, tear-down) the ranks exchange verdicts over a
communicator of their own, which also keeps them in step: a test that fails on one rank fails on all. Rank 0 reports
for everybody and shows the failures of the others under its own; the other ranks print nothing. The watchdog of
tests/conftest.py ends a rank that hangs, and mpirun then ends the job.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import platform
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr

PRIVATE = MPI.COMM_WORLD.Dup()
RANK, SIZE = PRIVATE.rank, PRIVATE.size
# Well below the watchdog's limit: a rank that waits in vain gets a typed error before its process is ended.
os.environ.setdefault("RINGREDUCE_TIMEOUT", "20")
Failure = (Exception, pytest.fail.Exception, pytest.skip.Exception)


class Verdict(NamedTuple):
    """How one phase of a test ended on one rank.

    Attributes:
        kind: "passed", "skipped" or "failed".
        line: the error in one line.
        text: the error as pytest would show it.
    """

    kind: str = "passed"
    line: str = ""
    text: str = ""


def pytest_report_header() -> list[str]:
    vendor = " ".join(str(part) for part in MPI.get_vendor()[:1])
    version = ".".join(str(part) for part in MPI.get_vendor()[1])
    return [
        f"world: {SIZE} rank{'s' * (SIZE != 1)}, this is rank {RANK}; {vendor} {version} on {platform.node()}",
        f"versions: mpi4py {metadata.version('mpi4py')}, numpy {np.__version__}, torch {_torch_version()}",
    ]


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.get_plugin("watchdog").who = f"rank {RANK} of {SIZE}"
    if RANK != 0:
        config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(SharedVerdicts(), "shared-verdicts")
    # Each rank has a folder of its own: where several pytest processes share one, the one may fail to remove what the
    # other is removing. Registered before pytest's own clean-up, this comes after it.
    folder = tempfile.mkdtemp(prefix=f"ringreduce-rank{RANK}-")
    os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not for this number of ranks.

    Tests marked ``sizes(...)`` are for these alone. Of the cases of a test marked ``spread``, without --all, each is
    for one number, and each number has some of them; where there are fewer cases than numbers, each number has one.
    With ``spread(name, ...)`` that is true of the cases of each value of these parameters.
    """
    wanted = {item for item in items if SIZE in _sizes_of(item)}
    if not os.environ.get("TEST_ALL"):
        groups: dict[object, list[pytest.Item]] = {}
        for item in items:
            if (mark := item.get_closest_marker("spread")) is not None:
                values = [repr(item.callspec.params[name]) for name in mark.args]
                groups.setdefault((item.path, item.originalname, *values, *_sizes_of(item)), []).append(item)
        for cases in groups.values():
            wanted -= {*cases} - _share_of(cases, _sizes_of(cases[0]))
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = [item for item in items if item in wanted]


def _sizes_of(item: pytest.Item) -> list[int]:
    """Return the numbers of ranks that a test is for."""
    sizes = range(1, max(SIZE, 4) + 1)
    return [size for size in sizes if all(size in mark.args for mark in item.iter_markers("sizes"))]


def _share_of(cases: list[pytest.Item], sizes: list[int]) -> set[pytest.Item]:
    """Return those of the cases that are for this number of ranks when they are spread over these numbers."""
    order = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))  # unlike that of any parameter
    first = zlib.crc32(order[0].nodeid.encode())
    pairs = range(max(len(cases), len(sizes)))
    return {order[pair % len(cases)] for pair in pairs if sizes[(first + pair) % len(sizes)] == SIZE}


class SharedVerdicts:
    """Makes the ranks agree: on the tests there are, and on how each phase of each test ended."""

    def __init__(self) -> None:
        self._broken = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken += f"{report.longreprtext}\n"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse to start when the ranks have collected different tests: they would wait for each other for ever."""
        mine = ([item.nodeid for item in session.items], self._broken)
        everyone = PRIVATE.allgather(mine)
        if any(theirs != mine for theirs in everyone):
            found = "\n".join(f"rank {rank}: {bad or tests}" for rank, (tests, bad) in enumerate(everyone))
            raise pytest.UsageError(f"the ranks collected different tests\n{found}")

    def pytest_unconfigure(self) -> None:
        """Leave together: mpirun ends the job, with the report half written, when a rank exits with a failure."""
        PRIVATE.Barrier()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        yield from _share(item, "setup")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        yield from _share(item, "call")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        yield from _share(item, "teardown")


def _share(item: pytest.Item, when: str) -> Generator[None, None, None]:
    """Run one phase of a test, then end it on this rank the way it ended on the worst of all ranks."""
    mine, error = Verdict(), None
    try:
        yield
    except Failure as caught:
        error = caught
        kind = "skipped" if isinstance(caught, pytest.skip.Exception) else "failed"
        text = str(item.repr_failure(pytest.ExceptionInfo.from_exception(caught)))
        mine = Verdict(kind, f"{type(caught).__name__}: {caught}".splitlines()[0], text)
    # Nearly always all ranks have passed: to learn that takes one small reduction, not two rounds and pickles.
    bad_somewhere = np.array(mine.kind != "passed", np.int32)
    PRIVATE.Allreduce(MPI.IN_PLACE, bad_somewhere, MPI.MAX)
    if not bad_somewhere:
        return
    everyone = PRIVATE.allgather(mine)
    if len({verdict.kind for verdict in everyone}) > 1 or mine.kind == "failed":
        for rank, verdict in enumerate(everyone):
            if verdict.kind != "passed":
                item.add_report_section(when, f"rank {rank}, {verdict.kind}", verdict.text)
        _restart_world()
    if error is not None and (mine.kind == "failed" or all(verdict.kind == "skipped" for verdict in everyone)):
        raise error
    bad = {rank: verdict for rank, verdict in enumerate(everyone) if verdict.kind != "passed"}
    if bad:
        pytest.fail("; ".join(f"{verdict.kind} on rank {rank}: {verdict.line}" for rank, verdict in bad.items()), False)


def _restart_world() -> None:
    """Begin the next test with a new world: a rank that failed may have left a collective half done, or the world."""
    if PRIVATE.allreduce(rr.is_initialized(), MPI.LOR):
        rr.shutdown()
        rr.init()


class SharedWorld:
    """The world of one test after the other: a new one where a test wants other nodes, or has begun or ended worlds."""

    def __init__(self) -> None:
        self._world: rr.Communicator | None = None
        self._node_size: int | None = None

    def enter(self, node_size: int | None) -> None:
        """Begin a world unless the last one will do. RINGREDUCE_NODE_SIZE says the same as ``node_size``."""
        if not rr.is_initialized() or rr.world() is not self._world or node_size != self._node_size:
            rr.shutdown()
            rr.init()
            self._world, self._node_size = rr.world(), node_size


@pytest.fixture(scope="session", autouse=True)
def _shared() -> Iterator[SharedWorld]:
    yield SharedWorld()
    rr.shutdown()


@pytest.fixture(autouse=True)
def _one_node(request: pytest.FixtureRequest, _shared: SharedWorld) -> None:
    if not {"no_world", "nodes_of"} & {*request.fixturenames}:
        _shared.enter(None)


@pytest.fixture
def world() -> rr.Communicator:
    """The communicator of all ranks."""
    return rr.world()


@pytest.fixture
def no_world() -> Iterator[None]:
    """Take the world away for a test."""
    rr.shutdown()
    yield
    rr.shutdown()


@pytest.fixture
def begin_world(no_world: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Called with settings, as in ``CHECK="2"``: begins a world that has them."""

    def begin(**settings: str) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(f"RINGREDUCE_{name}", value)
        rr.init()

    return begin


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Called with words: returns the warnings of the library that have them."""
    caplog.set_level("WARNING", logger="ringreduce")
    return lambda words: [text for each in caplog.records if words in (text := each.getMessage())]


@pytest.fixture
def checked(begin_world: Callable[..., None]) -> None:
    """A world in which weights are compared every second step, and gradients looked at in each."""
    begin_world(CHECK="2", CHECK_FINITE="1")


@pytest.fixture
def nodes_of(_shared: SharedWorld, monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Called with n: begins a world with nodes of n ranks, the last one has the rest; with None: with one node."""

    def enter(node_size: int | None) -> None:
        if node_size is not None:
            monkeypatch.setenv("RINGREDUCE_NODE_SIZE", str(node_size))
        _shared.enter(node_size)

    return enter


@pytest.fixture
def nodes_of_one(nodes_of: Callable[[int], None]) -> None:
    """A world in which every rank is a node of its own, so that all that ranks exchange goes between nodes."""
    nodes_of(1)


@pytest.fixture
def nodes_of_two(nodes_of: Callable[[int], None]) -> None:
    """A world in which every two ranks are a node; of three ranks the last is a node of its own."""
    nodes_of(2)


@pytest.fixture(params=[None, 1], ids=["one node", "nodes of one"])
def nodes(request: pytest.FixtureRequest, nodes_of: Callable[[int | None], None]) -> None:
    """A world of one node, and of nodes of one rank."""
    nodes_of(request.param)


@pytest.fixture(params=[None, 1, 2], ids=["one node", "nodes of one", "nodes of two"])
def any_nodes(request: pytest.FixtureRequest, nodes_of: Callable[[int | None], None]) -> None:
    """The same, and of nodes of two ranks."""
    nodes_of(request.param)


@pytest.fixture
def nodes_in_order(begin_world: Callable[..., None]) -> None:
    """A world in which every rank is a node, and reductions add in the order of ranks."""
    begin_world(NODE_SIZE="1", DETERMINISTIC="1")


@pytest.fixture(params=["chain_rule", "horovod"])
def by_horovod(request: pytest.FixtureRequest, begin_world: Callable[..., None]) -> bool:
    """Begins a world of either conventions; whether they are Horovod's."""
    begin_world(CONVENTIONS=request.param)
    return bool(request.param == "horovod")


@pytest.fixture
def seed(seed: int) -> int:
    """A number that depends on the test and on the rank."""
    return seed + RANK


class Growth(NamedTuple):
    """Memory in use, or by how much that grew.

    Attributes:
        nbytes: bytes that malloc gave out, to arrays, tensors, the MPI library and large Python objects.
        blocks: Python objects of at most 512 bytes.
    """

    nbytes: int
    blocks: int


@pytest.fixture
def growth() -> Callable[[Callable[[], object]], Growth]:
    """What measures the memory that an action leaves in use each time: the less of two times.

    Caches grow once; a leak comes back. Resident memory would say less: what leaks first fills the holes in the heap.
    """
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs the C library's mallinfo2: glibc 2.33")

    def measure(action: Callable[[], object]) -> Growth:
        in_use = [_in_use()]
        for _ in range(2):
            action()
            in_use.append(_in_use())
        return Growth(*np.diff(in_use, axis=0).min(axis=0).tolist())

    return measure


class _Mallinfo2(ctypes.Structure):
    """What mallinfo2(3) returns, of which `nbytes` and `mapped_nbytes` are in use."""

    _fields_ = [
        ("_before", ctypes.c_size_t * 4),
        ("mapped_nbytes", ctypes.c_size_t),
        ("_between", ctypes.c_size_t * 2),
        ("nbytes", ctypes.c_size_t),
        ("_after", ctypes.c_size_t * 2),
    ]


def _in_use() -> Growth:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    gc.collect()
    given_out = mallinfo2()
    return Growth(given_out.nbytes + given_out.mapped_nbytes, sys.getallocatedblocks())


@pytest.fixture(params=["eager", "function"])
def step(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """What calls a function of TensorFlow as it is, or as a `tf.function`."""
    tf = pytest.importorskip("tensorflow")
    return (lambda function: function) if request.param == "eager" else tf.function  # type: ignore[no-any-return]


@pytest.fixture(params=["eager", "compiled", "on a device"])
def called(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """What calls a function as it is, or compiled, here or as for a device, whose arrays are copied to the host."""
    jax = pytest.importorskip("jax")
    if request.param == "on a device":
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, cpu, default: default(*arrays))
    return (lambda function: function) if request.param == "eager" else jax.jit  # type: ignore[no-any-return]
