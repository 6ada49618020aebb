"""The order of streams around operations on a GPU, proved on a double of torch's streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from gpu_doubles.torch_streams import TorchStreams

torch = pytest.importorskip("torch")
from ringreduce.torch.tensors import streams  # noqa: E402


class World:
    """In place of a communicator, which the streams only tell from others, and buckets take memory from."""

    def empty(self, nbytes: int, dtype: Any) -> Any:
        return np.zeros(nbytes, dtype)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> TorchStreams:
    """Streams in place of torch's, for tensors that all seem to lie on a GPU."""
    double = TorchStreams()
    monkeypatch.setattr(streams, "cuda", double)
    monkeypatch.setattr(streams, "gpu_of", lambda tensors: torch.device("cuda", 0))
    return double


def on_another_thread(function: Any, *arguments: Any) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *arguments).result()


def test_an_operation_that_is_waited_for_runs_on_its_callers_stream(cuda: TorchStreams) -> None:
    """Whichever thread carries it out: it comes after the caller's work, and needs no event."""
    cuda.main.enqueue("input")
    mine = cuda.Stream()
    with cuda.stream(mine):
        mine.enqueue("more input")
        run = streams.on_this_stream(lambda world: cuda.current_stream().enqueue("operation"))
    assert on_another_thread(run, World()) == {"more input"}
    assert "operation" in mine.before
    assert cuda.current_stream() is cuda.main
    assert cuda.record == []


def test_an_operation_beside_the_program_comes_after_its_input_and_before_its_result(cuda: TorchStreams) -> None:
    """It starts after what was enqueued at submission, not after what came later; only `finish` waits for it."""
    world: Any = World()
    cuda.main.enqueue("input")
    run, finish = streams.beside_this_stream(lambda world: cuda.current_stream().enqueue("operation"), [torch.zeros(3)])
    cuda.main.enqueue("what came later")
    assert on_another_thread(run, world) == {"input"}
    assert "operation" not in cuda.main.before
    finish(torch.zeros(3))
    assert "operation" in cuda.main.before
    assert cuda.record == [
        "event 1 on main",
        "own 1 waits for event 1",
        "event 2 on own 1",
        "main waits for event 2",
    ]


def test_each_communicator_has_its_own_stream(cuda: TorchStreams) -> None:
    """The same one each time; sets of ranks that begin in different orders do not wait for each other."""
    first, second = World(), World()
    device = torch.device("cuda", 0)
    streams_of: Any = streams.own_stream
    assert streams_of(first, device) is streams_of(first, device)
    assert streams_of(first, device) is not streams_of(second, device)


def test_a_handover_orders_filling_working_and_coming_back(cuda: TorchStreams) -> None:
    """A buffer is filled after all streams that contribute, worked on when filled, filled again when worked on."""
    world: Any = World()
    sync = streams.StreamSync(torch.device("cuda", 0), world)
    other = cuda.Stream()
    other.enqueue("gradient of another stream")
    with cuda.stream(other):
        sync.mark()
    sync.mark()
    with sync.filling():
        assert "gradient of another stream" in cuda.main.enqueue("first filling")
    with sync.working():
        assert "first filling" in cuda.current_stream().enqueue("first work")
    assert "first work" not in cuda.main.before
    with sync.filling():
        assert "first work" in cuda.main.enqueue("second filling")
    with sync.working():
        cuda.current_stream().enqueue("second work")
    sync.come_back()
    assert "second work" in cuda.main.before


def test_work_that_fails_is_over_as_well(cuda: TorchStreams) -> None:
    """The next filling comes after what it has enqueued."""
    world: Any = World()
    sync = streams.StreamSync(torch.device("cuda", 0), world)
    with sync.filling():
        pass

    def fail() -> None:
        with sync.working():
            cuda.current_stream().enqueue("half of the work")
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    with sync.filling():
        assert "half of the work" in cuda.main.enqueue("second filling")
