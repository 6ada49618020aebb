"""What scripts written for Horovod catch: each error of ours is also of the builtin kind that is raised there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402

SCALAR = torch.tensor(1.0)
TENSOR = torch.ones(4)
FP8 = torch.zeros(4, dtype=torch.float8_e4m3fn)
WEIGHT = torch.nn.Parameter(torch.zeros(2))
SGD = torch.optim.SGD([WEIGHT], lr=1.0)

#: What a script does wrong, on all ranks alike, and what it may expect.
CASES: dict[str, tuple[Callable[[], Any], tuple[type[Exception], ...]]] = {
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
@pytest.mark.parametrize("case", CASES)
def test_errors_are_of_the_kind_that_scripts_catch(case: str, world: rr.Communicator) -> None:
    """By ``except RuntimeError`` and ``except ValueError`` where Horovod raises these; later operations work."""
    call, kinds = CASES[case]
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
