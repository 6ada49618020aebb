"""What a binding is made of, on a framework that is described in these lines: NumPy, on a device that is pretended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.training.binding import host
from ringreduce.training.binding.host import HostArrays
from ringreduce.training.calls.handles import poll, synchronize
from ringreduce.training.calls.requests import RequestBuilder
from ringreduce.training.options.options import Adasum, ReproducibleSum

Run = Callable[[Any], Any]


class NumpyArrays(HostArrays):
    """NumPy's, and with a device, everything seems to be on it.

    Attributes:
        log: what was asked of the device.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self.log: list[str] = []

    def keep_in_place(self, arrays: Sequence[Any]) -> Callable[[], object]:
        assert all(isinstance(each, np.ndarray) for each in arrays)
        return lambda: None

    def device_of(self, arrays: Sequence[Any]) -> str | None:
        return self.device if arrays else None

    def place(self, array: Any) -> str:
        return self.device or "cpu"

    def reduce_on_device(self, communicator: rr.Communicator, op: Any, sources: Any, targets: Any) -> None:
        self.log.append("reduce")
        for source, target in zip(sources, targets, strict=True):
            communicator.allreduce(source, op, out=target)

    def on_callers_stream(self, run: Run, device: Any) -> Run:
        self.log.append(f"on the stream of {device}")
        return run

    def beside_callers_stream(self, run: Run, arrays: Sequence[Any]) -> tuple[Run, Callable[[object], object]]:
        self.log.append("beside it")
        return run, lambda result: self.log.append("joined")


@pytest.fixture(params=[None, "gpu"])
def arrays(request: pytest.FixtureRequest) -> NumpyArrays:
    """Arrays in host memory, and such that seem to be elsewhere."""
    return NumpyArrays(request.param)


def preparing(arrays: Any, kind: str, name: str | None = None) -> RequestBuilder:
    return RequestBuilder(kind, name, rr.global_process_set, arrays)


def test_allreduces(arrays: Any, world: rr.Communicator) -> None:
    """New and in place, scaled before and after, one and a group, waited for and not."""
    mine, more = np.full(5, world.rank + 1.0), np.arange(3.0)
    new = [np.empty_like(mine), np.empty_like(more)]
    with preparing(arrays, "allreduce", "a name") as prepare:
        request = prepare.allreduce([mine, more], new, rr.SUM, 0.5, 4.0)
    handle = request.submit()
    result = synchronize(handle)
    total = world.size * (world.size + 1) / 2
    assert poll(handle)
    assert [each is other for each, other in zip(result, new, strict=True)] == [True, True]
    assert new[0].tolist() == [2 * total] * 5
    assert new[1].tolist() == [0.0, 2.0 * world.size, 4.0 * world.size]
    with preparing(arrays, "allreduce") as prepare:
        request = prepare.allreduce([mine], [mine], rr.SUM, 1.0, 1.0, lambda: "done")
    assert request.carry_out() == "done"
    assert mine.tolist() == [total] * 5
    if arrays.device is not None:
        assert arrays.log == ["beside it", "reduce", "joined", "on the stream of gpu", "reduce"]


@pytest.mark.parametrize("op", [rr.AVERAGE, rr.SUM])
def test_many_bytes_are_reduced_where_the_results_are(
    monkeypatch: pytest.MonkeyPatch, world: rr.Communicator, op: rr.ReduceOp
) -> None:
    """In several buffers, each of one dtype; frameworks can use the memory, and what is given stays as it is."""
    monkeypatch.setattr(host, "_SHARED_NBYTES", 1 << 20)
    floats = [(300_001,), (), (0, 3), (257,), (130_001,)]
    shapes = [*[(each, "f4") for each in floats], ((5, 7), "i4"), ((130_001,), "f8"), ((3,), "i4")]
    given = [np.full(shape, 4.0 * number + world.rank, dtype) for number, (shape, dtype) in enumerate(shapes)]
    kept = []
    for factor in (0.5, 1.0):
        with preparing(host.HOST, "allreduce") as prepare:
            request = prepare.allreduce_new(given, op, factor, 2.0)
        kept.append(request.carry_out())
    ranks = np.arange(float(world.size))
    for factor, results in zip((0.5, 1.0), kept, strict=True):
        for number, (source, result) in enumerate(zip(given, results, strict=True)):
            terms = 4.0 * number + ranks
            terms = np.trunc(terms * factor) if source.dtype == "i4" else terms * factor
            total = terms.sum() if op is rr.SUM else terms.sum() / world.size
            expected = 2 * (np.trunc(total) if source.dtype == "i4" else total)
            assert (result.shape, result.dtype) == (source.shape, source.dtype)
            assert result.ctypes.data % 64 == 0
            np.testing.assert_allclose(result, np.full(source.shape, expected), rtol=1e-6)
            np.testing.assert_array_equal(source, np.full(source.shape, 4.0 * number + world.rank))


@pytest.mark.parametrize(("op", "wire"), [(Adasum, None), (ReproducibleSum, None), (rr.SUM, "bf16")])
def test_reductions_by_hand(arrays: Any, world: rr.Communicator, op: Any, wire: str | None) -> None:
    """Equal arrays combine to themselves, or to their sum; what is given stays as it is."""
    mine, new = np.arange(4, dtype=np.float32), np.empty(4, np.float32)
    with preparing(arrays, "allreduce") as prepare:
        request = prepare.allreduce([mine], [new], op, 2.0, 1.0, wire=wire)
    request.carry_out()
    assert mine.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert np.allclose(new, 2 * mine * (1 if op == Adasum else world.size))


def test_the_other_collectives(arrays: Any, world: rr.Communicator) -> None:
    """Their results are those of the blocking collectives."""
    size, rank = world.size, world.rank
    mine = np.arange(size * 2.0).reshape(size * 2, 1) + rank
    with preparing(arrays, "allgather") as prepare:
        request = prepare.allgather([mine[: rank + 1]], list)
    (gathered,) = request.carry_out()
    assert len(gathered) == size * (size + 1) // 2
    with preparing(arrays, "broadcast") as prepare:
        request = prepare.broadcast(mine, size - 1)
    assert request.carry_out()[0, 0] == size - 1
    assert mine[0, 0] == rank
    with preparing(arrays, "alltoall") as prepare:
        request = prepare.alltoall(mine, prepare.row_counts(mine, None), lambda result, rows: (result, list(rows)))
    result, rows = request.carry_out()
    assert (len(result), rows) == (2 * size, [2] * size)
    with preparing(arrays, "reducescatter") as prepare:
        request = prepare.reducescatter([mine], rr.SUM, 0.5, 2.0, list)
    (part,) = request.carry_out()
    assert np.array_equal(part, world.reduce_scatter(mine))
