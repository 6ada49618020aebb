"""What fails or goes wrong in Horovod 0.28.1 and must hold here: one row for each, and the tests that keep it so.

| in Horovod | test |
|---|---|
| no operation is faster than a cycle of the background thread | unit/test_engine.py::test_an_operation_waits_for_no_clock |
| idle ranks negotiate in every cycle | unit/test_engine.py::test_ranks_that_wait_say_so_once |
| after join, or another number of calls, operations without a name miss each other | test_torch_async.py::test_operations_without_a_name_meet_in_order |
| joined ranks take part in Min, Max and Product with zeros | test_conventions.py::test_averages_after_a_join |
| ``groups`` and ranks that use different parameters: deadlock | test_torch_optimizer.py::test_ranks_may_use_different_parameters |
| ``groups``: gradient_predivide_factor is ignored | test_gradients_in_groups_are_divided_before_they_travel |
| step(closure): ranks end with different weights | test_torch_optimizer.py::test_step_with_a_closure_leaves_equal_weights, ::test_lbfgs_calls_the_closure_many_times |
| zero_grad(set_to_none=True) is a TypeError | test_torch_optimizer.py::test_trains_like_one_process_on_the_whole_batch, unit/test_torch_optimizer.py::test_zero_grad_means_what_it_means_in_torch |
| gradients in channels_last are refused | test_torch_optimizer.py::test_channels_last_gradients_keep_their_layout |
| so is every tensor that is not contiguous | test_every_collective_takes_every_dtype_of_any_strides, test_torch_async.py::test_channels_last, test_torch_ops.py::test_in_place_operations_return_their_tensor |
| bfloat16 is not supported | test_every_collective_takes_every_dtype_of_any_strides, test_torch_optimizer.py::test_dtypes_may_be_mixed |
| nor are bool and complex; allreduce and reducescatter take few integers | test_every_collective_takes_every_dtype_of_any_strides, test_torch_optimizer.py::test_complex_parameters |
| nor is fp8 (nor here, but the error says what is) | unit/test_arrays.py::test_what_is_no_array_of_numbers_is_rejected |
| broadcast_optimizer_state changes a fresh optimizer and its weights | test_conventions.py::test_gradients_after_the_state_of_an_optimizer_was_broadcast |
| an optimizer that is wrapped loses its state | test_torch_optimizer.py::test_an_optimizer_keeps_the_state_it_had |
| parameters that no rank used are updated (here, unless ``skip_unused``) | test_conventions.py::test_gradients_of_parameters_that_no_rank_used |
| counts are 32-bit integers | test_operations_of_more_than_2_to_the_31_elements |
| objects are smaller than 2 GiB | test_operations_of_more_than_2_to_the_31_elements, and with --all test_pickles_of_more_than_2_gib |
| hierarchies and pipelining only with NCCL | test_collectives.py::test_collectives_conform_on_several_nodes, unit/test_conformance.py::test_collectives_conform, unit/test_selection.py::test_allreduce_goes_by_size_and_topology |
| a long operation holds up negotiation, all process sets | test_a_long_operation_holds_up_nothing_else, test_an_operation_that_waits_for_a_rank_holds_up_nothing_else |
| and shutdown | test_shutdown_waits_for_no_rank_that_never_came, unit/test_engine.py::test_closing_ends_what_is_under_way |
| no init after shutdown | test_runtime.py::test_shutdown_and_init_again |
| an MPI error ends the job | test_an_error_of_mpi_is_an_exception |
| no elastic training over MPI (here all but the recovery of lost ranks) | test_torch_elastic.py::test_a_distributed_optimizer_works_on_in_the_next_world |
"""  # noqa: E501

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.engine import CollectiveOp
from ringreduce.testing import caught
from ringreduce.transport.mpi_messages import MpiMessages
from ringreduce.transport.waiting import Waiter

torch = pytest.importorskip("torch")
from mpi4py import MPI  # noqa: E402
from torch_models import DTYPES  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

HUGE = 2**31 + 3
MEMORY_NBYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# ---- dtypes and strides ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_takes_every_dtype_of_any_strides(dtype: Any) -> None:
    """Of rows that lie far apart in memory, as they are in one process; bfloat16, bool and complex numbers, too."""
    size, rank = rr.size(), rr.rank()
    rows = 2 * size + 1
    everyone = [(torch.arange(3 * rows) % 5 + each).reshape(3, rows).to(dtype).t() for each in range(size)]
    mine = everyone[rank]
    assert not mine.is_contiguous()
    total = torch.stack(everyone).any(0) if dtype is torch.bool else torch.stack(everyone).sum(0).to(dtype)
    part = total.tensor_split(size)[rank]
    assert_same(hvd.allreduce(mine, op=hvd.Sum), total)
    assert_same(hvd.allgather(mine), torch.cat(everyone))
    assert_same(hvd.broadcast(mine[::2] if rank == 0 else mine[::2].contiguous(), 0), everyone[0][::2])
    assert_same(hvd.reducescatter(mine, op=hvd.Sum), part)
    assert_same(hvd.grouped_reducescatter([mine, mine[:, ::2]], op=hvd.Sum)[1], part[:, ::2])
    assert_same(hvd.grouped_allreduce([mine, mine[::2]], op=hvd.Sum)[1], total[::2])
    assert_same(hvd.grouped_allgather([mine[:, 1:]])[0], torch.cat(everyone)[:, 1:])
    splits = [2] * (size - 1) + [3]
    received, counts = hvd.alltoall(mine, splits)
    assert_same(received, torch.cat([each.split(splits)[rank] for each in everyone]))
    assert counts.tolist() == [splits[rank]] * size


def assert_same(actual: Any, expected: Any) -> None:
    """Values, dtype and shape are those of a single process; strides may differ."""
    torch.testing.assert_close(actual, expected.contiguous(), check_stride=False)


# ---- optimizers ----


class Watching(hvd.compression.Compressor):
    """Compresses nothing, and notes the first element of all that travels."""

    seen: list[float]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        cls.seen.append(tensor.flatten()[0].item())
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("groups", [None, 2])
def test_gradients_in_groups_are_divided_before_they_travel(groups: int | None) -> None:
    """What ``gradient_predivide_factor`` asks for happens with ``groups`` as without, and the average is the same."""
    Watching.seen = []
    model = torch.nn.Linear(3, 1).double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), gradient_predivide_factor=4.0, groups=groups, compression=Watching
    )
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 16.0 * (rr.rank() + 1))
    optimizer.synchronize()
    assert Watching.seen == [4.0 * (rr.rank() + 1)] * (groups or 1)
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 8.0 * (rr.size() + 1)))


# ---- nobody waits for what is not theirs ----


@pytest.mark.sizes(2, 3, 4)
def test_an_operation_that_waits_for_a_rank_holds_up_nothing_else() -> None:
    """While all others wait for rank 0, other names, other process sets and blocking calls go on."""
    rank, size = rr.rank(), rr.size()
    others = hvd.add_process_set(range(1, size))
    if rank > 0:
        late = hvd.allreduce_async(torch.tensor([float(rank)]), name="late", op=hvd.Sum)
        assert hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum, process_set=others).tolist() == [size - 1] * 3
    assert hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum).tolist() == [size] * 3
    if rank > 0:
        assert not hvd.poll(late)
    assert rr.allreduce(np.ones(3)).tolist() == [size] * 3
    assert hvd.remove_process_set(others)
    if rank == 0:
        late = hvd.allreduce_async(torch.tensor([0.0]), name="late", op=hvd.Sum)
    assert hvd.synchronize(late).tolist() == [sum(range(size))]


def test_a_long_operation_holds_up_nothing_else() -> None:
    """While one is carried out, others are submitted, process sets come and go, and theirs and blocking calls end."""
    engine = hvd.global_process_set.engine
    if not engine.threaded:
        pytest.skip("without threads, an operation runs only while somebody waits for it")
    size = rr.size()
    begun, end = threading.Event(), threading.Event()

    def run(communicator: rr.Communicator) -> bool:
        begun.set()
        return end.wait(20.0)

    long = CollectiveOp("long", "long", run)
    engine.submit(long)
    try:
        assert begun.wait(20.0)
        after = hvd.allreduce_async(torch.ones(3), name="after", op=hvd.Sum)
        assert rr.allreduce(np.ones(3)).tolist() == [size] * 3
        if size > 1:
            some = hvd.add_process_set(range(1, size))
            if some.included():
                assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=some).tolist() == [size - 1] * 3
            assert hvd.remove_process_set(some)
        assert not hvd.poll(after)
        assert not long.done
    finally:
        end.set()
    assert engine.wait(long)
    assert hvd.synchronize(after).tolist() == [size] * 3


@pytest.mark.sizes(2, 3, 4)
def test_shutdown_waits_for_no_rank_that_never_came() -> None:
    """What only one rank has submitted ends in an error that says so, and a new world works."""
    waiting = hvd.allreduce_async(torch.ones(3), name="never") if rr.rank() == 0 else None
    hvd.shutdown()
    try:
        if waiting is not None:
            with pytest.raises(hvd.HorovodInternalError, match="shut down"):
                hvd.synchronize(waiting)
    finally:
        hvd.init()
    assert hvd.allreduce(torch.ones(3), name="never", op=hvd.Sum).tolist() == [rr.size()] * 3


@pytest.mark.sizes(2, 3, 4)
def test_an_error_of_mpi_is_an_exception() -> None:
    """A message that is too long for its place, an error of MPI's own, is raised there, and the world goes on."""
    messages = MpiMessages(MPI.COMM_WORLD, Waiter(20.0))
    last = messages.size - 1
    if messages.rank == 0:
        requests = [messages.send(np.ones(64, np.uint8), last, 1)]
    else:
        requests = [messages.recv(np.ones(8, np.uint8), 0, 1)] if messages.rank == last else []
    messages.start(requests)
    error = caught(Waiter(20.0).until, lambda: messages.test_all(requests), lambda: "the message")
    assert isinstance(error, rr.TransportError) == (messages.rank == last)
    messages.close()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [rr.size()] * 3


# ---- more than an int counts ----


@pytest.mark.slow
@pytest.mark.sizes(2)
def test_operations_of_more_than_2_to_the_31_elements() -> None:
    """Named operations count in 64 bits: the first, the last and the middle element are right, the rest is zero.

    So it is with a broadcast, in which objects of that size travel.
    """
    half = HUGE // 2
    mine = torch.from_numpy(np.zeros(half + 1, np.uint8))  # memory that nothing but these has written takes no time
    mine[[0, half - 1 + rr.rank()]] = rr.rank() + 1
    every = hvd.allgather(mine[: half + rr.rank()], name="huge")
    assert every.shape == (HUGE,)
    places = [0, 1, half - 1, half, half + 1, HUGE - 1]
    assert every[places].tolist() == [1, 0, 1, 2, 0, 2]
    every[half] += rr.rank()
    assert hvd.allreduce_(every, name="huge", op=hvd.Sum)[places].tolist() == [2, 0, 2, 5, 0, 4]
    assert np.count_nonzero(every.numpy()) == 4
    every[-1] = 10 + rr.rank()
    assert hvd.broadcast_(every, 1, name="huge")[places].tolist() == [2, 0, 2, 5, 0, 11]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.sizes(2)
@pytest.mark.skipif(MEMORY_NBYTES < 20 << 30, reason="takes 16 GiB of memory: several copies of 2 GiB on each rank")
def test_pickles_of_more_than_2_gib() -> None:
    """The length of what is pickled has no limit of its own; what follows the long part of a pickle arrives as well."""
    received = hvd.broadcast_object((bytes(HUGE), "end") if rr.rank() == 1 else None, root_rank=1)
    assert (len(received[0]), received[1]) == (HUGE, "end")


# ---- errors that scripts catch: each of ours is also of the builtin kind that is raised there ----

SCALAR = torch.tensor(1.0)
TENSOR = torch.ones(4)
FP8 = torch.zeros(4, dtype=torch.float8_e4m3fn)
WEIGHT = torch.nn.Parameter(torch.zeros(2))
SGD = torch.optim.SGD([WEIGHT], lr=1.0)

#: What a script does wrong, on all ranks alike, and what it may expect.
MISTAKES: dict[str, tuple[Callable[[], Any], tuple[type[Exception], ...]]] = {
    # Values that no rank could use: refused in Horovod when the ranks have met, here at the call.
    "allgather of a scalar": (lambda: hvd.allgather(SCALAR), (RuntimeError,)),
    "allgather_async of a scalar": (lambda: hvd.synchronize(hvd.allgather_async(SCALAR)), (RuntimeError,)),
    "grouped_allgather of a scalar": (lambda: hvd.grouped_allgather([TENSOR, SCALAR]), (RuntimeError,)),
    "alltoall of a scalar": (lambda: hvd.alltoall(SCALAR), (RuntimeError, ValueError)),
    "reducescatter of a scalar": (lambda: hvd.reducescatter(SCALAR), (RuntimeError, ValueError)),
    "reducescatter_async of a scalar": (lambda: hvd.synchronize(hvd.reducescatter_async(SCALAR)), (RuntimeError,)),
    "reducescatter with Adasum": (lambda: hvd.reducescatter(TENSOR, op=hvd.Adasum), (RuntimeError, ValueError)),
    "a root that there is not": (lambda: hvd.broadcast(TENSOR, rr.size()), (RuntimeError, ValueError)),
    "splits that are too many": (lambda: hvd.alltoall(TENSOR, [5] * rr.size()), (RuntimeError, ValueError)),
    "splits that are too few": (lambda: hvd.alltoall(torch.ones(rr.size() + 1), [1]), (RuntimeError, ValueError)),
    # Arguments.
    "a dtype": (lambda: hvd.allreduce(FP8), (ValueError,)),
    "a dtype, in place": (lambda: hvd.allreduce_(FP8), (ValueError,)),
    "a dtype, asynchronous": (lambda: hvd.allreduce_async(FP8), (ValueError,)),
    "a dtype to gather": (lambda: hvd.allgather(FP8), (ValueError,)),
    "a dtype to broadcast": (lambda: hvd.broadcast_(FP8, 0), (ValueError,)),
    "a dtype to scatter": (lambda: hvd.reducescatter(FP8), (ValueError,)),
    "op and average": (lambda: hvd.allreduce(TENSOR, average=True, op=hvd.Sum), (ValueError,)),
    "a process set twice": (lambda: hvd.add_process_set(range(rr.size())), (ValueError,)),
    "a process set that is not registered": (
        lambda: hvd.allreduce(TENSOR, process_set=hvd.ProcessSet([0])),
        (RuntimeError, ValueError),
    ),
    "parameters that are none": (lambda: hvd.broadcast_parameters({"a": 1}), (ValueError,)),
    "names twice": (lambda: hvd.DistributedOptimizer(SGD, [("a", WEIGHT), ("a", WEIGHT)]), (ValueError,)),
    "names missing": (lambda: hvd.DistributedOptimizer(SGD, []), (ValueError,)),
    "names alone": (lambda: hvd.DistributedOptimizer(SGD, ["a"]), (ValueError,)),
    "no passes": (lambda: hvd.DistributedOptimizer(SGD, backward_passes_per_step=0), (ValueError,)),
    "predivided sums": (
        lambda: hvd.DistributedOptimizer(SGD, op=hvd.Sum, gradient_predivide_factor=2.0),
        (ValueError,),
    ),
    "a batch without channels": (lambda: hvd.SyncBatchNorm(3)(TENSOR), (ValueError,)),
    "elements that share memory": (lambda: hvd.allreduce_(torch.ones(1).expand(3)), (ValueError,)),
    "a device without memory": (lambda: hvd.allreduce(torch.ones(1, device="meta")), (ValueError,)),
    "a handle that is none": (lambda: hvd.synchronize(17), (ValueError,)),
    "an empty group": (lambda: hvd.grouped_allreduce([]), (ValueError,)),
}
#: What the error says.
WORDS = {
    "allgather of a scalar": "at least one dimension",
    "reducescatter with Adasum": "Adasum",
    "a root that there is not": "does not belong",
    "splits that are too many": "add up",
    "op and average": "not both",
    "elements that share memory": "share memory",
    "a device without memory": "meta",
    "a handle that is none": "handle",
    "an empty group": "at least one",
}


@pytest.mark.spread
@pytest.mark.parametrize("case", MISTAKES)
def test_errors_are_of_the_kind_that_scripts_catch(case: str, world: rr.Communicator) -> None:
    """By ``except RuntimeError`` and ``except ValueError`` where Horovod raises these; later operations work."""
    call, kinds = MISTAKES[case]
    for kind in kinds:
        with pytest.raises(kind, match=WORDS.get(case)) as caught:
            call()
        assert isinstance(caught.value, rr.RingReduceError)
    assert hvd.allreduce(TENSOR, op=hvd.Sum).tolist() == [world.size] * 4


@pytest.mark.spread
@pytest.mark.parametrize(
    "name",
    ["rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous", "mpi_threads_supported"],
)
def test_who_asks_before_init_gets_a_value_error(name: str, no_world: None) -> None:
    """As in Horovod."""
    with pytest.raises(ValueError, match="init"):
        getattr(hvd.mpi_ops, name)()
