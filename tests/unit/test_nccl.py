"""NCCL as an algorithm: what it is asked, in which order, and that all ranks give it up together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_doubles.driver import HostDriver
from gpu_doubles.nccl import HostNccl
from gpu_doubles.ranks import run_gpu_ranks

import ringreduce as rr
from ringreduce.buffers import DTYPES
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, MismatchError, TransportError, UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu import devices
from ringreduce.gpu import nccl as transport
from ringreduce.gpu.nccl import Nccl, code_of_dtype, code_of_op
from ringreduce.testing import assert_close, assert_equal, caught, expected, sample

with contextlib.suppress(ImportError):
    import torch  # noqa: F401 - before one thread imports it for its kernels while another one asks what is a tensor

WORLDS = pytest.mark.parametrize(("size", "node_size"), [(2, None), (3, None), (4, None), (4, 2), (3, 1)])


def on_gpus(
    size: int,
    function: Callable[[rr.Communicator, HostDriver, HostNccl], object],
    *,
    node_size: int | None = None,
    seed: int = 0,
    shared: bool = False,
    versions: dict[int, int] | None = None,
    config: Config | None = None,
) -> list[Any]:
    """Run ``function(communicator, driver, nccl)`` on ranks with a GPU each, or with one for all of them."""
    groups: dict[bytes, Any] = {}

    def run(communicator: rr.Communicator, driver: HostDriver) -> object:
        nccl = HostNccl(driver, groups, (versions or {}).get(communicator.rank, 22705))
        communicator.gpu.libraries = lambda number: nccl
        return function(communicator, driver, nccl)

    options = {"node_size": node_size, "config": config or Config(timeout_s=20.0)}
    return run_gpu_ranks(size, run, gpu=lambda rank: 0 if shared else rank, seed=seed, **options)


def launches(driver: HostDriver) -> list[str]:
    """Return the collectives of NCCL that were enqueued."""
    return [line.removeprefix("launch ") for line in driver.log if line.startswith("launch nccl")]


# ---- results ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ReduceOp)
def test_every_dtype_and_op(op: ReduceOp, dtype: str) -> None:
    """Results are NumPy's: from NCCL, where it has the dtype and means the same by the op, else from elsewhere."""
    row = DTYPES[dtype]
    arrays = [sample(rank, 23, dtype) for rank in range(3)]
    if row.kind == "complex" and op in (ReduceOp.MIN, ReduceOp.MAX):
        arrays = [array.real.astype(dtype) for array in arrays]
    theirs = dtype not in ("int16", "uint16", "bool", "complex64", "complex128")
    theirs &= op in (ReduceOp.SUM, ReduceOp.PRODUCT) or (op is ReduceOp.AVERAGE) == (row.kind == "float")

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        source = driver.put_late(arrays[communicator.rank])
        communicator.allreduce(source, op, out=source, algorithm="nccl")
        assert_close(source.get(source.stream), expected(arrays, op))
        assert len(launches(driver)) == theirs

    on_gpus(3, function)


@WORLDS
@pytest.mark.parametrize("seed", range(3))
def test_orders_of_the_gpu_do_not_show(size: int, node_size: int | None, seed: int) -> None:
    """Calls in a row, on different streams, in place and not, are right under every order that a GPU may take."""
    counts = (37, 0, 1, 1003, 37)
    inputs = [[sample(rank, count, "float32", salt=turn) for rank in range(size)] for turn, count in enumerate(counts)]

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        results = []
        for turn, arrays in enumerate(inputs):
            source = driver.put_late(arrays[communicator.rank])
            target = source
            if turn % 2:
                target = driver.put(np.full(source.shape, 77, np.float32))
                target.stream = driver.make_stream()
            communicator.allreduce(source, out=target, algorithm="nccl")
            results.append(target)
        for target, arrays in zip(results, inputs, strict=True):
            assert_equal(target.get(target.stream), expected(arrays, ReduceOp.SUM))
        assert len(launches(driver)) == 4  # nothing is nothing to reduce

    on_gpus(size, function, node_size=node_size, seed=seed)


def test_one_rank_needs_no_nccl() -> None:
    """A world of one copies."""

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        source = driver.put_late(np.arange(5, dtype=np.float32))
        result = driver.put(np.zeros(5, np.float32))
        communicator.allreduce(source, out=result, algorithm="nccl")
        assert_equal(result.get(0), np.arange(5, dtype=np.float32))
        assert not any("nccl" in line for line in driver.log)

    on_gpus(1, function)


# ---- order ----


def test_what_nccl_is_asked_in_which_order() -> None:
    """One rank makes the id, all connect once; a call waits for the last one and is enqueued on the caller's stream."""

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> list[str]:
        source = driver.put(np.ones(4, np.float32))
        source.stream = driver.make_stream()
        communicator.allreduce(source, out=source, algorithm="nccl")
        first = [line for line in driver.log if "nccl" in line]
        driver.log.clear()
        communicator.allreduce(source, out=source, algorithm="nccl")
        event = driver.log[0].split()[-1]
        assert driver.log == [
            f"s2 waits for {event}",
            "launch nccl float32 sum 4 on s2",
            f"record {event} on s2",
        ]
        communicator.gpu.close()
        assert "nccl close" in driver.log
        assert "nccl abort" not in driver.log
        return first

    asked = on_gpus(3, function)
    assert asked == [
        [
            *(["nccl unique_id"] if rank == 0 else []),
            f"nccl connect {rank} of 3",
            "launch nccl float32 sum 4 on s2",
        ]
        for rank in range(3)
    ]


@pytest.mark.parametrize("setting", [{"algorithm": "nccl"}, {"gpu": "nccl"}])
def test_the_environment_can_ask_for_it(setting: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """RINGREDUCE_GPU=nccl (or _ALGORITHM) holds for arrays on GPUs; what NCCL cannot do goes as without it."""
    devices._warn_of_no_report.cache_clear()
    arrays = [sample(rank, 23, "float32") for rank in range(2)]

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        source = driver.put_late(arrays[communicator.rank])
        communicator.allreduce(source, out=source)
        assert_equal(source.get(source.stream), expected(arrays, ReduceOp.SUM))
        assert_equal(communicator.allreduce(arrays[communicator.rank]), expected(arrays, ReduceOp.SUM))
        assert len(launches(driver)) == 1
        communicator.allreduce(source, out=source, deterministic=True)
        assert len(launches(driver)) == 1
        said = communicator.explain(92, device="cuda")
        assert said.endswith("NCCL 2.27.5, as asked for; what it lacks goes through host memory")

    on_gpus(2, function, config=Config(timeout_s=20.0, **setting))
    assert sum("no report of scripts/gpu_check" in line for line in caplog.messages) == 1


def test_it_is_a_name_for_device_memory_alone() -> None:
    """The list of names has it for allreduces of arrays on a GPU, and it is its own transport."""

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        assert communicator.algorithms(device="cuda") == [*communicator.algorithms(), "nccl"]
        assert "nccl" not in communicator.algorithms("broadcast", device="cuda")
        assert communicator.transport_name("nccl") == "nccl"

    on_gpus(2, function)


@pytest.mark.parametrize(
    ("deterministic", "on_gpu", "complaint"),
    [
        (False, False, "'nccl' takes arrays in device memory"),
        (True, True, "RINGREDUCE_DETERMINISTIC is set, so algorithm='nccl' cannot be asked for"),
    ],
)
def test_what_cannot_be_asked_for(deterministic: bool, on_gpu: bool, complaint: str) -> None:
    """Arrays in host memory, and deterministic sums, are refused by name before the ranks meet."""

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        values = np.ones(3, np.float32)
        array = driver.put_late(values) if on_gpu else values
        error = caught(communicator.allreduce, array, out=array, algorithm="nccl")
        assert isinstance(error, ConfigError)
        assert complaint in str(error)

    on_gpus(2, function, config=Config(timeout_s=20.0, deterministic=deterministic))


# ---- refusals and failures ----


def falls_back(
    caplog: pytest.LogCaptureFixture,
    reason: str,
    prepare: Callable[[rr.Communicator, HostNccl], object] = lambda communicator, nccl: None,
    **options: Any,
) -> list[list[str]]:
    """Check that three ranks reduce without NCCL, twice, and say so once; return what each asked NCCL."""
    arrays = [sample(rank, 23, "float32") for rank in range(3)]

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> list[str]:
        prepare(communicator, nccl)
        for _ in range(2):
            source = driver.put_late(arrays[communicator.rank])
            communicator.allreduce(source, out=source, algorithm="nccl")
            assert_equal(source.get(source.stream), expected(arrays, ReduceOp.SUM))
        assert launches(driver) == []
        return [line for line in driver.log if "nccl" in line]

    asked = on_gpus(3, function, **options)
    said = [line for line in caplog.messages if line.startswith("NCCL is not used, though asked for")]
    assert said == [f"NCCL is not used, though asked for: {reason}"]
    return asked


def test_ranks_that_share_a_gpu_are_refused_before_nccl_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    """NCCL before 2.30 fails on a GPU with two ranks; it is not asked then."""
    reason = "ranks 0 and 1 share a GPU, which NCCL takes from 2.30 on; here it is 2.27.5"
    assert falls_back(caplog, reason, shared=True) == [[], [], []]


def test_newer_nccl_shares_gpus_only_if_it_is_told_to(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL 2.30 takes several ranks on a GPU where its own variable says so, on all ranks."""
    reason = (
        "ranks 0 and 1 share a GPU, where NCCL's kernels wait for each other in turns at best; "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks lets NCCL try"
    )
    versions = dict.fromkeys(range(3), 23003)
    assert falls_back(caplog, reason, shared=True, versions=versions) == [[], [], []]
    monkeypatch.setattr(devices, "gpu_switches", lambda: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> bool:
        driver.fail("launch")  # what waits for a peer may not run there, says the double
        communicator.gpu.require_usable(None)
        communicator.gpu._set_up("nccl")
        return communicator.path_on_device("float32", algorithm="nccl").transport == "nccl"

    assert on_gpus(3, function, shared=True, versions=versions) == [True] * 3


def test_different_versions_do_not_meet(caplog: pytest.LogCaptureFixture) -> None:
    """Ranks with different NCCLs do not try."""
    asked = falls_back(caplog, "the ranks have NCCL 2.27.5, 2.28.3", versions={1: 22803})
    assert asked == [[], [], []]


def test_a_rank_without_nccl_takes_it_from_all(caplog: pytest.LogCaptureFixture) -> None:
    """If one rank has no NCCL, all ranks know before any of them connects."""

    def prepare(communicator: rr.Communicator, nccl: HostNccl) -> None:
        def missing(number: int) -> Nccl:
            raise UnsupportedBufferError("there is no NCCL here")

        if communicator.rank == 2:
            communicator.gpu.libraries = missing

    assert falls_back(caplog, "rank 2: there is no NCCL here", prepare) == [[], [], []]


def test_an_id_that_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    """If the first rank gets no id, nobody connects."""

    def prepare(communicator: rr.Communicator, nccl: HostNccl) -> None:
        nccl.fails.add("unique_id")

    asked = falls_back(caplog, "rank 0: NCCL was told to fail to unique_id", prepare)
    assert asked == [["nccl unique_id"], [], []]


def test_a_rank_that_fails_to_connect(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one rank fails where the others wait for it, they give up after a limit, and all fall back."""
    monkeypatch.setattr(transport, "_CONNECTING_S", 0.2)

    def prepare(communicator: rr.Communicator, nccl: HostNccl) -> None:
        if communicator.rank == 0:
            nccl.fails.add("connect")

    falls_back(caplog, "rank 0: NCCL was told to fail to connect", prepare)


def test_ranks_that_connected_let_go_if_one_did_not(caplog: pytest.LogCaptureFixture) -> None:
    """A connection that not all ranks have is aborted, as to close it would take all of them."""

    def prepare(communicator: rr.Communicator, nccl: HostNccl) -> None:
        connect = nccl.connect

        def late(size: int, unique_id: bytes, rank: int) -> Any:
            connect(size, unique_id, rank).close()  # as NCCL does itself
            raise TransportError("it broke at the end")

        if communicator.rank == 1:
            nccl.connect = late  # type: ignore[method-assign]

    asked = falls_back(caplog, "rank 1: it broke at the end", prepare)
    assert [each[-1] for each in asked] == ["nccl abort", "nccl close", "nccl abort"]


def test_mismatches_are_seen_before_nccl_is_asked() -> None:
    """Ranks that call with different shapes all hear of it, and NCCL goes on afterwards."""

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        source = driver.put_late(np.ones(4, np.float32))
        communicator.allreduce(source, out=source, algorithm="nccl")
        other = driver.put_late(np.ones(5 + communicator.rank, np.float32))
        assert isinstance(caught(communicator.allreduce, other, out=other, algorithm="nccl"), MismatchError)
        communicator.allreduce(source, out=source, algorithm="nccl")
        assert_equal(source.get(source.stream), np.full(4, 4, np.float32))
        assert len(launches(driver)) == 2

    on_gpus(2, function)


def test_errors_that_come_later_end_the_communicator() -> None:
    """What NCCL reports about an earlier call comes out of the next one; what is under way is ended."""

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        source = driver.put_late(np.ones(4, np.float32))
        communicator.allreduce(source, out=source, algorithm="nccl")
        nccl.problem = "a cable was pulled"
        error = caught(communicator.allreduce, source, out=source, algorithm="nccl")
        assert isinstance(error, TransportError)
        assert "a cable was pulled" in str(error)
        assert "nccl abort" in driver.log
        assert "out of step" in str(caught(communicator.allreduce, source, out=source))

    on_gpus(2, function)


def test_a_peer_that_is_gone_ends_what_waits_for_it() -> None:
    """The meeting of the next call finds out; kernels that would wait for good are ended."""

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        source = driver.put_late(np.ones(4, np.float32))
        communicator.allreduce(source, out=source, algorithm="nccl")
        source.get(source.stream)
        if communicator.rank == 0:
            assert caught(communicator.allreduce, source, out=source, algorithm="nccl") is not None
            assert "nccl abort" in driver.log

    on_gpus(2, function, config=Config(timeout_s=1.0))


# ---- numbers, and CuPy ----


def test_numbers_are_those_of_the_header() -> None:
    """bfloat16 and averages, which CuPy does not name, go by number; old libraries have neither."""
    assert [code_of_dtype(DTYPES[name], 22705) for name in ("int8", "uint64", "float16", "bfloat16")] == [0, 5, 6, 9]
    assert [code_of_dtype(DTYPES[name], 22705) for name in ("int16", "bool", "complex64")] == [None] * 3
    assert code_of_dtype(DTYPES["bfloat16"], 20900) is None
    floats, integers = DTYPES["bfloat16"], DTYPES["int32"]
    assert [code_of_op(op, floats, 22705) for op in ReduceOp if op.value in ("sum", "product", "average")] == [
        {"sum": 0, "product": 1, "average": 4}[op.value] for op in ReduceOp if op.value in ("sum", "product", "average")
    ]
    assert code_of_op(ReduceOp.MIN, floats, 22705) is None
    assert (code_of_op(ReduceOp.MAX, integers, 22705), code_of_op(ReduceOp.MIN, integers, 22705)) == (2, 3)
    assert code_of_op(ReduceOp.AVERAGE, integers, 22705) is None
    assert code_of_op(ReduceOp.AVERAGE, floats, 20900) is None


class Recorded:
    """CuPy's ``NcclCommunicator``: keeps what it is asked."""

    calls: list[tuple[object, ...]]
    signed = True
    problem: Exception | None = None

    def __init__(self, size: int, unique_id: Any, rank: int) -> None:
        if isinstance(unique_id, tuple) and max(unique_id) > 127 and self.signed:
            raise OverflowError("value too large to convert to char")
        if isinstance(unique_id, tuple) and min(unique_id) < 0 and not self.signed:
            raise OverflowError("negative value to unsigned char")
        self.calls.append((size, unique_id, rank))

    def allReduce(self, *arguments: object) -> None:
        if self.problem is not None:
            raise self.problem
        self.calls.append(arguments)

    def check_async_error(self) -> None:
        if self.problem is not None:
            raise self.problem

    def abort(self) -> None:
        self.calls.append(("abort",))

    def destroy(self) -> None:
        self.calls.append(("destroy",))


def cupy_with(version: str, unique_id: Any, **attributes: Any) -> tuple[Any, Any, type[Recorded]]:
    """Return modules in the shape of CuPy and its NCCL, and the class of the communicators."""
    made = type("NcclCommunicator", (Recorded,), {"calls": [], **attributes})

    class Device:
        """Something to stand behind `with`."""

        def __init__(self, number: int) -> None:
            self.number = number

        def use(self) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    cupy = SimpleNamespace(__version__=version, cuda=SimpleNamespace(Device=Device))
    library = SimpleNamespace(
        available=True, get_version=lambda: 22705, get_unique_id=lambda: unique_id, NcclCommunicator=made
    )
    return cupy, library, made


ID = bytes(range(256))[-128:]


@pytest.mark.parametrize(
    ("version", "given", "attributes", "passed"),
    [
        ("14.0.1", ID, {}, ID),
        ("13.6.0", tuple(each - 256 for each in ID), {}, tuple(each - 256 for each in ID)),
        ("13.6.0", tuple(ID), {"signed": False}, tuple(ID)),
    ],
)
def test_ids_of_every_cupy(version: str, given: Any, attributes: dict[str, Any], passed: Any) -> None:
    """The id travels as bytes, and goes back into CuPy in the form in which that version gives it out."""
    cupy, library, made = cupy_with(version, given, **attributes)
    nccl = transport._CupyNccl(cupy, library, 0)
    assert nccl.version == 22705
    assert nccl.unique_id() == ID
    ranks = nccl.connect(4, nccl.unique_id(), 2)
    ranks.allreduce(1024, 2048, 7, 9, 4, 3)
    assert ranks.error() is None
    ranks.abort()
    ranks.close()
    assert made.calls == [(4, passed, 2), (1024, 2048, 7, 9, 4, 3), ("abort",), ("destroy",)]


@pytest.mark.parametrize("error", [RuntimeError("NCCL_ERROR_SYSTEM_ERROR"), KeyError(6)])
def test_errors_of_cupy_are_translated(error: Exception) -> None:
    """NCCL's errors become TransportErrors, those for which CuPy has no name too."""
    cupy, library, _made = cupy_with("14.0.1", ID, problem=error)
    ranks = transport._CupyNccl(cupy, library, 0).connect(2, ID, 0)
    with pytest.raises(TransportError, match="NCCL"):
        ranks.allreduce(0, 0, 1, 7, 0, 0)
    reported = ranks.error()
    assert reported is not None
    assert str(error) in reported


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for NCCL without CuPy is told which package it takes."""
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(UnsupportedBufferError, match=r"pip install 'cupy-cuda12x\[ctk\]'"):
        transport.cupy_nccl(0)


# ---- what is said of it ----


def test_what_is_said_is_what_runs() -> None:
    """`path_on_device` follows the algorithm that is asked for."""

    def named(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        source = driver.put_late(np.ones(23, np.float32))
        integers = driver.put_late(np.ones(23, np.int32))
        for op, array, algorithm, way in (
            ("sum", source, None, ("staged", "staged")),
            ("sum", source, "auto", ("staged", "staged")),
            ("sum", source, "deterministic", ("staged", "staged")),
            ("sum", source, "nccl", ("nccl", "nccl")),
            ("average", integers, "nccl", ("staged", "staged")),
            ("average", integers, None, ("staged", "staged")),
            ("sum", source, "ring", ("ring", "staged")),
        ):
            before = len(launches(driver))
            communicator.allreduce(array, op, out=array, algorithm=algorithm)
            found = communicator.path_on_device(array.dtype, op, algorithm)
            assert (found.algorithm, found.transport) == way
            assert (len(launches(driver)) > before) == (way[0] == "nccl")

    on_gpus(2, named)
