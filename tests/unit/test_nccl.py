"""NCCL as an algorithm: what it is asked, in which order, and that all ranks give it up together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest
from gpu_doubles.driver import HostDriver
from gpu_doubles.nccl import HostNccl
from gpu_doubles.ranks import reduced, run_gpu_ranks
from suites.conformance import assert_equal, expected, sample

import ringreduce as rr
from ringreduce.buffers import DTYPES
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, TransportError, UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu import devices
from ringreduce.gpu import nccl as transport
from ringreduce.gpu.nccl import Nccl, code_of_dtype, code_of_op
from ringreduce.testing import caught
from ringreduce.transport.waiting import Waiter

with contextlib.suppress(ImportError):
    import torch  # noqa: F401 - before one thread imports it for its kernels while another one asks what is a tensor

CONFIG = Config(timeout_s=20.0, gpu="nccl")


def on_gpus(
    size: int,
    function: Callable[[rr.Communicator, HostDriver, HostNccl], object],
    *,
    shared: bool = False,
    versions: dict[int, int] | None = None,
    config: Config = CONFIG,
) -> list[Any]:
    """Run ``function(communicator, driver, nccl)`` on ranks with a GPU each, or with one for all of them."""

    def run(communicator: rr.Communicator, driver: HostDriver) -> object:
        nccl: Any = communicator.gpu.libraries(0)
        nccl.version = (versions or {}).get(communicator.rank, 22705)
        return function(communicator, driver, nccl)

    return run_gpu_ranks(size, run, gpu=lambda rank: 0 if shared else rank, config=config)


# ---- order ----


def test_what_nccl_is_asked_in_which_order() -> None:
    """One rank makes the id, all connect once; a call waits for the last one and is enqueued on the caller's stream."""

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> list[str]:
        source = driver.put(np.ones(4, np.float32))
        source.stream = driver.make_stream()
        communicator.allreduce(source, out=source)
        driver.log.append("again")
        communicator.allreduce(source, out=source)
        again = driver.log[driver.log.index("again") + 1 :]
        event = again[0].split()[-1]
        assert again == [f"s2 waits for {event}", "launch nccl float32 sum 4 on s2", f"record {event} on s2"]
        communicator.gpu.close()
        return [line for line in driver.log if line.startswith("nccl")]

    assert on_gpus(3, function) == [
        [*first, f"nccl connect {rank} of 3", "nccl close"] for rank, first in enumerate((["nccl unique_id"], [], []))
    ]


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
        with pytest.raises(ConfigError, match=complaint):
            communicator.allreduce(array, out=array, algorithm="nccl")

    on_gpus(2, function, config=Config(timeout_s=20.0, deterministic=deterministic))


# ---- refusals and failures ----


def missing(number: int) -> Nccl:
    """Return what a rank has that has no NCCL."""
    raise UnsupportedBufferError("there is no NCCL here")


def fail(rank: int, step: str) -> Callable[[rr.Communicator, HostNccl], object]:
    """Return what lets a rank's NCCL fail in a step."""
    return lambda communicator, nccl: communicator.rank == rank and nccl.fails.add(step)


def break_late(communicator: rr.Communicator, nccl: Any) -> None:
    """Let NCCL fail on rank 1 when it has connected."""
    connect = nccl.connect

    def late(size: int, unique_id: bytes, rank: int) -> Any:
        connect(size, unique_id, rank).close()  # as NCCL does itself
        raise TransportError("it broke at the end")

    if communicator.rank == 1:
        nccl.connect = late


SHARE = "ranks 0 and 1 share a GPU, where NCCL's kernels wait for each other in turns at best; "
SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks lets NCCL try"
NEW = dict.fromkeys(range(3), 23003)
NOTHING: list[list[str]] = [[], [], []]


@pytest.mark.parametrize(
    ("reason", "prepare", "options", "asked"),
    [
        (
            "ranks 0 and 1 share a GPU, which NCCL takes from 2.30 on; here it is 2.27.5",
            None,
            {"shared": True},
            NOTHING,
        ),
        (SHARE + SWITCH, None, {"shared": True, "versions": NEW}, NOTHING),
        ("the ranks have NCCL 2.27.5, 2.28.3", None, {"versions": {1: 22803}}, NOTHING),
        (
            "rank 2: there is no NCCL here",
            lambda communicator, nccl: communicator.rank == 2 and setattr(communicator.gpu, "libraries", missing),
            {},
            NOTHING,
        ),
        ("rank 0: NCCL was told to fail to unique_id", fail(0, "unique_id"), {}, [["nccl unique_id"], [], []]),
        ("rank 0: NCCL was told to fail to connect", fail(0, "connect"), {}, None),
        ("rank 1: it broke at the end", break_late, {}, ["nccl abort", "nccl close", "nccl abort"]),
    ],
)
def test_all_ranks_do_without_where_one_has_to(
    reason: str,
    prepare: Callable[[rr.Communicator, HostNccl], object] | None,
    options: dict[str, Any],
    asked: list[Any] | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They reduce through host memory, twice, and say why once; NCCL is asked nothing that would wait for a rank.

    A connection that not all ranks have is aborted, as to close it would take all of them.
    """
    monkeypatch.setattr(transport, "_CONNECTING_S", 0.2)
    arrays = [sample(rank, 23, "float32") for rank in range(3)]

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> list[str]:
        if prepare is not None:
            prepare(communicator, nccl)
        for _ in range(2):
            assert_equal(reduced(communicator, driver, arrays[communicator.rank]), expected(arrays, ReduceOp.SUM))
        assert f"NCCL cannot be used: {reason}" in communicator.explain(92, device="cuda")
        lines = [line for line in driver.log if "nccl" in line]
        assert not any(line.startswith("launch") for line in lines)
        return lines

    found = on_gpus(3, function, **options)
    assert asked is None or asked in (found, [each[-1:] and each[-1] for each in found])
    said = [line for line in caplog.messages if line.startswith("NCCL is not used, though asked for")]
    assert said == [f"NCCL is not used, though asked for: {reason}"]


def test_newer_nccl_shares_gpus_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL 2.30 takes several ranks on a GPU where its own variable says so, on all ranks."""
    monkeypatch.setattr(devices, "gpu_switches", lambda: {"NCCL_MULTI_RANK_GPU_ENABLE": "1"})

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> bool:
        driver.fail("launch")  # what waits for a peer may not run there, says the double
        communicator.gpu.require_usable(None)
        communicator.gpu._set_up("nccl")
        return communicator.path_on_device("float32").transport == "nccl"

    assert on_gpus(3, function, shared=True, versions=NEW) == [True] * 3


@pytest.mark.parametrize(("hosts", "connected"), [("abc", True), ("aba", False)])
def test_ranks_of_hosts_of_other_names_may_share_a_gpu(
    hosts: str, connected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes them for ranks of several hosts, and looks no further; ranks of one name are refused."""
    mine = threading.local()
    monkeypatch.setattr(devices, "gpu_switches", lambda: {"NCCL_HOSTID": mine.host})

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> bool:
        mine.host = hosts[communicator.rank]
        communicator.gpu.require_usable(None)
        communicator.gpu._set_up("nccl")
        return communicator.path_on_device("float32").transport == "nccl"

    assert on_gpus(3, function, shared=True) == [connected] * 3


def test_errors_that_come_later_end_the_communicator() -> None:
    """What NCCL reports about an earlier call comes out of the next one; what is under way is ended."""

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        source = driver.put_late(np.ones(4, np.float32))
        communicator.allreduce(source, out=source)
        nccl.problem = "a cable was pulled"
        with pytest.raises(TransportError, match="a cable was pulled"):
            communicator.allreduce(source, out=source)
        assert "nccl abort" in driver.log
        assert "out of step" in str(caught(communicator.allreduce, source, out=source))

    on_gpus(2, function)


def test_a_peer_that_is_gone_ends_what_waits_for_it() -> None:
    """The meeting of the next call finds out; kernels that would wait for good are ended."""

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        source = driver.put_late(np.ones(4, np.float32))
        communicator.allreduce(source, out=source)
        source.get(source.stream)
        if communicator.rank == 0:
            assert caught(communicator.allreduce, source, out=source) is not None
            assert "nccl abort" in driver.log

    on_gpus(2, function, config=Config(timeout_s=1.0, gpu="nccl"))


@pytest.mark.parametrize("ending", ["failed", "failed and busy", "busy"])
def test_what_does_not_end_keeps_nobody_waiting(ending: str) -> None:
    """NCCL is aborted, as Python would destroy it, which waits for all ranks; the GPU is asked nothing else.

    After a failure at once; else when the GPU, which may wait for a rank that is gone, has not ended in time.
    """

    def function(communicator: rr.Communicator, driver: HostDriver, nccl: HostNccl) -> None:
        for how in ({}, {"algorithm": "nccl"}, {"algorithm": "ring"}):
            array = driver.put(np.ones(10, np.float32))
            communicator.allreduce(array, out=array, **how)
            assert array.get(0).tolist() == [2.0] * 10
        if "failed" in ending:
            communicator.lifetime.fail(TransportError("a peer is gone"))
        if "busy" in ending:
            driver.launch("never", lambda: iter(lambda: None, 0), 0)
            driver.record(communicator.gpu._paths["nccl"]._done, 0)
            communicator._context.waiter.timeout_s = 0.05
        begin = len(driver.log)
        communicator.close()
        assert driver.log[begin:] == ["nccl abort"]

    on_gpus(2, function, config=Config(timeout_s=20.0))


def test_a_connection_that_comes_late_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have given NCCL up by then, and to destroy what this one got would wait for them."""
    monkeypatch.setattr(transport, "_CONNECTING_S", 0.01)
    gate, aborted = threading.Event(), threading.Event()

    def connect(size: int, unique_id: bytes, rank: int) -> Any:
        gate.wait(20.0)
        return SimpleNamespace(abort=aborted.set)

    nccl, ranks = SimpleNamespace(connect=connect), SimpleNamespace(size=2, rank=0)
    with pytest.raises(TransportError, match="to connect over NCCL"):
        transport._connect(nccl, ranks, Waiter(20.0, crowded=True), b"id")
    assert not aborted.is_set()
    gate.set()
    assert aborted.wait(20.0)


# ---- numbers, and CuPy ----


def test_numbers_are_those_of_the_header() -> None:
    """bfloat16 and averages, which CuPy does not name, go by number; old libraries have neither."""
    assert [code_of_dtype(DTYPES[name], 22705) for name in ("int8", "uint64", "float16", "bfloat16")] == [0, 5, 6, 9]
    assert [code_of_dtype(DTYPES[name], 22705) for name in ("int16", "bool", "complex64")] == [None] * 3
    assert code_of_dtype(DTYPES["bfloat16"], 20900) is None
    floats, integers = DTYPES["bfloat16"], DTYPES["int32"]
    assert [code_of_op(op, floats, 22705) for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVERAGE)] == [0, 1, 4]
    assert code_of_op(ReduceOp.MIN, floats, 22705) is None
    assert (code_of_op(ReduceOp.MAX, integers, 22705), code_of_op(ReduceOp.MIN, integers, 22705)) == (2, 3)
    assert code_of_op(ReduceOp.AVERAGE, integers, 22705) is None
    assert code_of_op(ReduceOp.AVERAGE, floats, 20900) is None


ID = bytes(range(256))[-128:]
SIGNED = tuple(each - 256 for each in ID)


def nccl_of(version: str, unique_id: Any, communicator: Callable[..., Any]) -> Nccl:
    """Return NCCL over modules in the shape of CuPy's."""
    cupy = SimpleNamespace(__version__=version, cuda=MagicMock())  # Device stands behind `with`, and is used
    library = SimpleNamespace(get_version=lambda: 22705, get_unique_id=lambda: unique_id, NcclCommunicator=communicator)
    return Nccl(cupy, library, 0)


@pytest.mark.parametrize(
    ("version", "given", "refused"), [("14.0.1", ID, None), ("13.6.0", SIGNED, None), ("13.6.0", tuple(ID), SIGNED)]
)
def test_ids_of_every_cupy(version: str, given: Any, refused: Any) -> None:
    """The id travels as bytes, and goes back into CuPy in the form in which that version gives it out."""
    communicator, asked = MagicMock(), []

    def connect(*arguments: Any) -> Any:
        if arguments[1] == refused:
            raise OverflowError("negative value to unsigned char")
        asked.append(arguments)
        return communicator

    nccl = nccl_of(version, given, connect)
    assert (nccl.version, nccl.unique_id()) == (22705, ID)
    ranks = nccl.connect(4, nccl.unique_id(), 2)
    ranks.allreduce(1024, 2048, 7, 9, 4, 3)
    assert ranks.error() is None
    ranks.abort()
    ranks.close()
    assert asked == [(4, given, 2)]
    assert communicator.method_calls == [
        *(call.allReduce(1024, 2048, 7, 9, 4, 3), call.check_async_error(), call.abort(), call.destroy())
    ]


@pytest.mark.parametrize("error", [RuntimeError("NCCL_ERROR_SYSTEM_ERROR"), KeyError(6)])
def test_errors_of_cupy_are_translated(error: Exception) -> None:
    """NCCL's errors become TransportErrors, those for which CuPy has no name too."""
    communicator = MagicMock()
    communicator.allReduce.side_effect = communicator.check_async_error.side_effect = error
    ranks = nccl_of("14.0.1", ID, lambda *arguments: communicator).connect(2, ID, 0)
    with pytest.raises(TransportError, match="NCCL"):
        ranks.allreduce(0, 0, 1, 7, 0, 0)
    assert str(error) in str(ranks.error())
