"""Allreduce in wire formats: two roundings, whatever the number of ranks, equal bits on all, nothing lost for good."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from doubles import RecordingMessages

import ringreduce as rr
from ringreduce.algorithms import Collective, schedule_for
from ringreduce.buffers.codecs import CODECS, Codec
from ringreduce.common.config import Config
from ringreduce.common.partition import Partition
from ringreduce.common.topology import Topology
from ringreduce.testing import caught, run_ranks

Floats = npt.NDArray[np.float32]

#: Ranks, and ranks per node: one on each, two on each, nodes of different sizes.
LAYOUTS = [(2, 1), (3, 1), (4, 1), (4, 2), (5, 2), (4, 3)]
COUNTS = [0, 1, 5, 257, 40_001]
#: The relative error of rounding standard normal numbers once, with some room.
ROUNDING = {"bf16": 2e-3, "fp16": 3e-4, "fp8": 3e-2, "int8": 8e-3, "int4": 0.13}
#: Several segments, even of small arrays.
SMALL_SEGMENTS = Config(timeout_s=30.0, segment_nbytes=8 << 10)


def contribution(rank: int, count: int, step: int = 0) -> Floats:
    """Return what a rank contributes: standard normal numbers."""
    return np.random.default_rng(100 * step + rank).standard_normal(count).astype(np.float32)


def exact(size: int, count: int, step: int = 0) -> npt.NDArray[np.float64]:
    """Return the sum over the ranks, in float64."""
    total: npt.NDArray[np.float64] = sum(contribution(rank, count, step).astype(np.float64) for rank in range(size))
    return total


@pytest.mark.parametrize("wire", CODECS)
@pytest.mark.parametrize(("size", "node_size"), LAYOUTS)
def test_the_error_is_that_of_two_roundings(size: int, node_size: int, wire: str) -> None:
    """Sums and averages of odd counts, in place and not, are as exact as the format, with equal bits on all ranks."""

    def check(communicator: rr.Communicator) -> list[bytes]:
        bits = []
        for count in COUNTS:
            mine = contribution(communicator.rank, count)
            total = communicator.allreduce(mine, compression=wire)
            buffer = communicator.empty(count)
            buffer[:] = mine
            assert communicator.allreduce(buffer, "average", out=buffer, compression=wire) is buffer
            expected = exact(size, count)
            for result, reference in ((total, expected), (buffer, expected / size)):
                # Of independent roundings of P terms and of their sum, each so much of its own size.
                limit = ROUNDING[wire] * 2**0.5 * np.linalg.norm(reference) * (1.5 if count < 300 else 1.1)
                assert np.linalg.norm(result - reference) <= limit
                bits.append(result.tobytes())
            assert (mine == contribution(communicator.rank, count)).all()
        return bits

    results = run_ranks(size, check, node_size=node_size, config=SMALL_SEGMENTS)
    assert all(each == results[0] for each in results)


@pytest.mark.parametrize("wire", CODECS)
def test_nothing_is_encoded_on_one_node(wire: str) -> None:
    """The result has the bits of a plain allreduce, and there is no error."""

    def check(communicator: rr.Communicator) -> None:
        mine, feedback = contribution(communicator.rank, 1001), rr.Feedback()
        result = communicator.allreduce(mine, "average", compression=wire, feedback=feedback)
        assert result.tobytes() == communicator.allreduce(mine, "average").tobytes()
        assert feedback.error == 0.0

    for size in (1, 3):
        run_ranks(size, check)


@pytest.mark.parametrize(("size", "node_size"), LAYOUTS)
def test_what_is_lost_is_fed_back(size: int, node_size: int) -> None:
    """The results of all steps and what is still kept add up to the sum of all contributions; without, they drift."""
    count, steps = 3001, 12

    def check(communicator: rr.Communicator) -> tuple[float, float]:
        feedback, measured = rr.Feedback(), rr.Feedback(keep=False)
        fed, plain = np.zeros(count), np.zeros(count)
        for step in range(steps):
            mine = contribution(communicator.rank, count, step)
            fed += communicator.allreduce(mine, compression="int4", feedback=feedback)
            plain += communicator.allreduce(mine, compression="int4", feedback=measured)
        for each in (feedback, measured):
            if each.sent is not None:
                assert 0.05 < each.error < 0.2
        expected = sum(exact(size, count, step) for step in range(steps))
        scale = float(np.linalg.norm(exact(size, count)))
        return float(np.linalg.norm(fed - expected)) / scale, float(np.linalg.norm(plain - expected)) / scale

    fed, plain = run_ranks(size, check, node_size=node_size, config=SMALL_SEGMENTS)[0]
    # One step's loss is left over, however many there were; without feedback losses add up like a random walk.
    assert fed < 0.3
    assert plain > 1.5 * fed


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_travel_in_the_format_too(dtype: Any) -> None:
    """They come back in their own type, from arrays of any strides into arrays of any strides."""

    def check(communicator: rr.Communicator) -> None:
        mine = contribution(communicator.rank, 3000).astype(dtype).reshape(30, 100).T[::2]
        out = np.zeros((30, 50), dtype).T
        assert communicator.allreduce(mine, out=out, compression="int8") is out
        expected = exact(3, 3000).reshape(30, 100).T[::2]
        assert np.linalg.norm(out - expected) < 0.013 * np.linalg.norm(expected)
        assert out.dtype == dtype

    run_ranks(3, check, node_size=1)


@pytest.mark.parametrize("wire", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_arrives_and_is_forgotten(wire: str, bad: float) -> None:
    """All ranks see that a value of one rank was not finite, where it was; the next step is as if it had never been."""

    def check(communicator: rr.Communicator) -> None:
        feedback = rr.Feedback()
        mine = np.ones(2000, np.float32)
        if communicator.rank == 1:
            mine[700] = bad
        result = communicator.allreduce(mine, compression=wire, feedback=feedback)
        assert not np.isfinite(result[700])
        assert np.isfinite(result[:256]).all()
        result = communicator.allreduce(np.ones(2000, np.float32), compression=wire, feedback=feedback)
        np.testing.assert_allclose(result, 3.0, rtol=0.2)

    run_ranks(3, check, node_size=1)


def test_wrong_arguments_are_refused_and_lose_nothing() -> None:
    """Each error says what is wrong; later calls work."""

    def check(communicator: rr.Communicator) -> None:
        floats = np.ones(5, np.float32)
        for error, arguments in (
            (rr.ConfigError, (floats, "sum", "int7")),
            (rr.ConfigError, (floats, "max", "int8")),
            (rr.UnsupportedBufferError, (np.ones(5, np.int32), "sum", "int8")),
            (rr.UnsupportedBufferError, (np.ones(5, np.complex64), "sum", "bf16")),
        ):
            array, op, wire = arguments
            assert isinstance(caught(communicator.allreduce, array, op, compression=wire), error)
        assert isinstance(caught(communicator.allreduce, floats, compression="int8", algorithm="ring"), rr.ConfigError)
        with pytest.raises(rr.ConfigError, match=r"^give deterministic=True or compression='bf16', not both$"):
            communicator.allreduce(floats, compression="bf16", deterministic=True)
        assert communicator.allreduce(floats, compression="int8").tolist() == pytest.approx([2.0] * 5, rel=0.01)

    run_ranks(2, check, node_size=1)


def test_different_formats_are_a_mismatch_on_all_ranks() -> None:
    """Nothing is decoded that was encoded otherwise."""

    def check(communicator: rr.Communicator) -> None:
        floats = np.ones(5, np.float32)
        error = caught(communicator.allreduce, floats, compression="int8" if communicator.rank else "int4")
        assert isinstance(error, rr.MismatchError)
        assert {"int8", "int4"} <= set(str(error).replace(",", " ").replace(")", " ").split())
        assert communicator.allreduce(floats, compression="int4").tolist() == pytest.approx([2.0] * 5, rel=0.01)

    run_ranks(2, check, node_size=1)


@pytest.mark.parametrize(("size", "node_size"), LAYOUTS)
def test_what_travels_is_what_the_proved_schedule_says(size: int, node_size: int) -> None:
    """Each rank sends to whom `hierarchical_direct` says, in its order, as many bytes as the format takes."""
    count, sent = 40, [list[tuple[int, int]]() for _ in range(size)]

    class Watching(RecordingMessages):
        def start(self, requests: Any) -> None:
            super().start(requests)
            sent[self.rank] = [(peer, nbytes) for kind, peer, nbytes in self.started if kind == "send"]

    run_ranks(
        size,
        lambda communicator: communicator.allreduce(np.ones(count, np.float32), compression="fp16"),
        node_size=node_size,
        wrap=Watching,
    )
    topology = Topology.from_hosts(rank // node_size for rank in range(size))
    nlanes, nnodes = min(map(len, topology.nodes)), len(topology.nodes)
    lanes = Partition.even(count, nlanes).segment
    blocks = [part for lane in lanes for part in Partition.even(lane.stop - lane.start, nnodes).segment]
    for rank in range(size):
        steps = schedule_for(Collective.ALLREDUCE, "hierarchical_direct", rank, topology).steps
        sends = [(each.peer, blocks[each.blocks.start]) for step in steps for each in step.sends]
        assert sent[rank] == [(peer, 2 * (part.stop - part.start)) for peer, part in sends]


class CountingCodec:
    """A codec that takes note of how many elements it encodes at once."""

    def __init__(self, codec: Codec, sizes: list[int]) -> None:
        self.name, self.block, self.nbytes = codec.name, codec.block, codec.nbytes
        self.decode, self.decode_add = codec.decode, codec.decode_add
        self._codec, self._sizes = codec, sizes

    def encode(self, source: Floats, target: npt.NDArray[np.uint8]) -> None:
        self._sizes.append(source.size)
        self._codec.encode(source, target)


@pytest.mark.parametrize("wire", CODECS)
@pytest.mark.parametrize(("size", "node_size"), [(2, 1), (3, 1), (4, 2)])
def test_messages_begin_at_multiples_of_the_block(
    size: int, node_size: int, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are as long as promised: a short block is encoded by itself, so there is one, at the end of the array."""
    count, codec = 400_001, CODECS[wire]
    sizes: list[int] = []  # of all ranks, which are threads
    monkeypatch.setitem(CODECS, wire, CountingCodec(codec, sizes))
    run_ranks(
        size,
        lambda communicator: communicator.allreduce(np.ones(count, np.float32), compression=wire),
        node_size=node_size,
        config=Config(native=False),  # compiled loops would take the place of the one that counts
    )
    assert max(map(codec.nbytes, sizes)) <= 32 << 10
    # Each other node encodes it for the rank that sums it up, and that one encodes the sum.
    rest = count % codec.block
    assert [each % codec.block for each in sizes if each % codec.block] == [rest] * (rest and size // node_size)


@pytest.mark.parametrize(("dtype", "value"), [(np.float64, 1e300), (np.float16, 6e4)])
def test_values_that_are_too_large_are_infinite_and_silent(dtype: Any, value: float) -> None:
    """On the way into float32 and on the way back: where warnings are errors, one would leave the others waiting."""

    def check(communicator: rr.Communicator) -> None:
        array = np.full(40, value, dtype)
        communicator.allreduce(array, out=array, compression="bf16")
        assert np.isposinf(array).all()
        assert communicator.allreduce(np.ones(3, dtype), compression="bf16").tolist() == [2.0] * 3

    run_ranks(2, check, node_size=1, config=Config(timeout_s=10.0))


@pytest.mark.parametrize("node_size", [None, 1])
def test_nothing_is_encoded_where_sums_are_to_be_deterministic(node_size: int | None) -> None:
    """Rounded sums depend on which ranks share a node, so the two do not go together, on one node either."""

    def check(communicator: rr.Communicator) -> None:
        with pytest.raises(rr.ConfigError, match="RINGREDUCE_DETERMINISTIC is set"):
            communicator.allreduce(np.ones(5, np.float32), compression="bf16")
        assert communicator.allreduce(np.ones(5, np.float32)).tolist() == [2.0] * 5

    run_ranks(2, check, node_size=node_size, config=Config(timeout_s=30.0, deterministic=True))
