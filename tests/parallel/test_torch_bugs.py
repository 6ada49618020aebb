"""What once went wrong in the torch layer, and must not again: each test tells what it was."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from typing import Any

import pytest

import ringreduce as rr
from ringreduce.testing import caught

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("ringreduce.torch")


def weight_of(size: int = 3, dtype: Any = None) -> Any:
    return torch.nn.Parameter(torch.zeros(size, dtype=dtype))


def sgd(*parameters: Any, **options: Any) -> Any:
    """Return a distributed optimizer with a rate of 1."""
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), **options)


def test_a_step_that_a_scaler_skipped_does_not_spoil_a_later_plain_one(world: rr.Communicator) -> None:
    """The optimizer took the scaler's reduction of the skipped step for one of the next, and ranks drifted apart."""
    weight = weight_of()
    optimizer, scaler = sgd(weight), torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(3):
        weight.grad = None
        loss = (weight * (world.rank + 1.0)).sum() * (float("inf") if step == 0 else 1.0)
        if step == 0:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    assert weight.tolist() == [-(world.size + 1.0)] * 3


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
def test_a_scaler_finds_overflows_itself_in_a_checked_job(checked: None, options: dict[str, Any]) -> None:
    """The first steps of a scaler that is still too large ended the job."""
    weight = weight_of()
    optimizer, scaler = sgd(weight, **options), torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(3):
        optimizer.zero_grad()
        overflow = step == 0 and hvd.rank() == hvd.size() - 1
        scaler.scale((weight * (float("inf") if overflow else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.tolist() == [-2.0] * 3


def test_a_scaler_and_adasum_skip_the_same_steps_on_all_ranks(world: rr.Communicator) -> None:
    """An overflow on one rank made that one skip a step in which the others waited for it."""
    weight = weight_of()
    optimizer, scaler = sgd(weight, op=hvd.Adasum), torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(3):
        optimizer.zero_grad()
        overflow = step == 0 and world.rank == world.size - 1
        scaler.scale((weight * (float("inf") if overflow else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert hvd.allgather_object((scaler.get_scale(), weight.tolist())) == [(1.0, weight.tolist())] * world.size
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize("op", ["average", "sum"])
def test_a_gradient_may_become_sparse(world: rr.Communicator, op: str) -> None:
    """A parameter that had a place in a bucket, and then a sparse gradient on some rank, ended the world."""
    embedding, linear = torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1)
    dense = torch.nn.Embedding(5, 2)
    dense.weight = embedding.weight
    optimizer = sgd(embedding.weight, *linear.parameters(), op=op)
    factor = 1.0 if op == "average" else world.size
    for step, makes in enumerate((None, lambda rank: embedding, lambda rank: embedding if rank == 0 else dense)):
        optimizer.zero_grad()
        rows = torch.ones(1, 2) if makes is None else makes(world.rank)(torch.tensor([step]))
        rows.sum().mul(1.0).backward() if rows.requires_grad else linear(rows).sum().backward()
        optimizer.synchronize()
        if makes is not None:
            expected = torch.zeros(5, 2)
            expected[step] = factor
            assert torch.equal(embedding.weight.grad.to_dense(), expected)
        with optimizer.skip_synchronize():
            optimizer.step()


def test_a_rank_may_join_without_its_optimizer(world: rr.Communicator) -> None:
    """What the others' steps need of a joined rank went with its optimizer."""
    weight = weight_of()

    def train(steps: int) -> None:
        optimizer = sgd(weight)
        for _ in range(steps):
            weight.grad = torch.ones(3)
            optimizer.step()

    train(world.rank + 1)
    gc.collect()
    assert hvd.join() in range(world.size)
    assert weight.tolist() == [-(world.rank + 1.0)] * 3


def test_objects_may_be_sent_from_several_threads(world: rr.Communicator) -> None:
    """Named or not, they did not meet by name, and ranks took one thread's for another's."""
    results: dict[str, Any] = {}

    def gather(name: str) -> None:
        results[name] = [hvd.allgather_object((name, turn, world.rank), name=name) for turn in range(20)]

    threads = [threading.Thread(target=gather, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, found in results.items():
        assert found == [[(name, turn, rank) for rank in range(world.size)] for turn in range(20)]


def test_helpers_say_that_a_rank_has_joined(world: rr.Communicator) -> None:
    """They waited for it until the time limit."""
    if world.rank == 0:
        hvd.join()
    else:
        assert isinstance(caught(hvd.allgather_object, 1), rr.MismatchError)
        assert isinstance(caught(hvd.broadcast_parameters, {"a": torch.ones(2)}), rr.MismatchError)
        hvd.join()


def test_compressions_made_of_ours_are_called(world: rr.Communicator) -> None:
    """A subclass of fp16 that clips was taken for fp16."""

    class Clipping(hvd.Compression.fp16):  # type: ignore[misc,name-defined]
        @classmethod
        def compress(cls, tensor: Any) -> Any:
            return super().compress(tensor.clamp(-1, 1))

    weight = weight_of()
    optimizer = sgd(weight, compression=Clipping)
    weight.grad = torch.full((3,), 100.0)
    optimizer.synchronize()
    assert weight.grad.tolist() == [1.0 if world.size > 1 else 100.0] * 3  # alone nothing travels


def test_tensors_of_inference_mode_may_be_scaled(world: rr.Communicator) -> None:
    """On a rank whose tensor was made in inference mode, scaling raised on the wrong thread and ended the world."""
    with torch.inference_mode(world.rank == 0):
        tensor = torch.ones(2)
    hvd.allreduce_(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    assert tensor.tolist() == [world.size] * 2


class Minimizing(torch.optim.SGD):  # type: ignore[misc,name-defined]
    """An optimizer with a method of its own that steps."""

    def minimize(self, loss: Any) -> None:
        self.zero_grad()
        loss.backward()
        self.step()


def test_methods_of_the_wrapped_class_reduce_gradients(world: rr.Communicator) -> None:
    """Their ``self.step()`` was the wrapped optimizer's, which reduces nothing."""
    weight = weight_of()
    optimizer = hvd.DistributedOptimizer(Minimizing([weight], lr=1.0))
    optimizer.minimize((weight * (world.rank + 1.0)).sum())
    assert weight.tolist() == [-(world.size + 1) / 2] * 3
    assert isinstance(optimizer, Minimizing)
    assert isinstance(optimizer, hvd.DistributedOptimizer)


def test_wrapping_twice_and_senseless_factors_are_refused(world: rr.Communicator) -> None:
    """The one reduced gradients twice, the other divided by zero in the first step."""
    optimizer = sgd(weight_of())
    assert isinstance(caught(hvd.DistributedOptimizer, optimizer), rr.ConfigError)
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        assert isinstance(caught(sgd, weight_of(), gradient_predivide_factor=factor), rr.ConfigError)


def test_a_tensor_that_occurs_twice_in_an_object_arrives_as_one(world: rr.Communicator) -> None:
    """Two copies arrived, and what was written to one was not seen in the other."""
    tensor = torch.arange(3.0)
    found = hvd.broadcast_object({"first": tensor, "second": [tensor]})
    assert found["first"] is found["second"][0]


def test_parameters_may_come_in_another_order(world: rr.Communicator) -> None:
    """Mappings with the same names were a mismatch when they were filled in another order."""
    first, second = torch.full((2,), float(world.rank)), torch.full((3,), world.rank + 10.0)
    named = {"a": first, "b": second} if world.rank else {"b": second, "a": first}
    hvd.broadcast_parameters(named)
    assert (first.tolist(), second.tolist()) == ([0.0] * 2, [10.0] * 3)


def test_a_sparse_gradient_without_rows(world: rr.Communicator) -> None:
    """A sparse gradient that was cleared to zeros has no rows; it counts as zeros, on some ranks or all."""
    embedding = torch.nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), embedding)
    hvd.broadcast_parameters(embedding, root_rank=0)
    before = embedding.weight.detach().clone()
    for users in (world.size, world.size - 1, 0):
        optimizer.zero_grad(set_to_none=False)
        if world.rank < users:
            embedding(torch.tensor([3])).sum().backward()
        optimizer.step()
        before[3] -= users / world.size
        assert torch.allclose(embedding.weight, before, atol=1e-12)


def test_averages_of_sparse_integers_are_integers(world: rr.Communicator) -> None:
    """They came back as floats; dense ones are averaged toward zero."""
    sparse = torch.tensor([0, -3, 5]).to_sparse()
    result = hvd.sparse_allreduce_async(sparse)()
    assert result.dtype is torch.int64
    assert result.to_dense().tolist() == [0, -3, 5]


@pytest.mark.parametrize("node_size", [None, 1])
def test_averages_of_integers_whose_sum_overflows(nodes_of: Any, node_size: int | None) -> None:
    """The sum of such numbers wrapped around before it was divided."""
    nodes_of(node_size)
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        limits = torch.iinfo(dtype)
        wanted = [limits.max - size // 2, limits.min, -3]
        mine = torch.tensor([limits.max - rank, limits.min, -3], dtype=dtype)
        assert hvd.allreduce(mine, op=hvd.Average).tolist() == wanted
        assert [each.tolist() for each in hvd.grouped_allreduce([mine, mine[:1]])] == [wanted, wanted[:1]]
        assert hvd.synchronize(hvd.allreduce_async(mine, name=f"{dtype}")).tolist() == wanted
        assert hvd.reducescatter(mine[:1].repeat(size), op=hvd.Average).tolist() == wanted[:1]
        assert hvd.sparse_allreduce_async(mine.to_sparse(), op=hvd.Average)().to_dense().tolist() == wanted
        assert hvd.allreduce_(mine, op=hvd.Average).tolist() == wanted
        assert mine.tolist() == wanted


def test_a_default_device_changes_nothing() -> None:
    """Programs may let torch make tensors elsewhere; what travels is made on the CPU all the same."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 40), hvd.SyncBatchNorm(40), torch.nn.Linear(40, 2))
    batch = torch.randn(6, 3)
    for compression in (hvd.Compression.none, hvd.Compression.powersgd(rank=1), hvd.Compression.topk(fraction=0.5)):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.device("meta"):
            optimizer = hvd.DistributedOptimizer(inner, compression=compression, overlap=True)
            for _ in range(3):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    with torch.device("meta"):
        rows = torch.ones(2 * hvd.size(), 2, device="cpu", requires_grad=True)
        hvd.allgather(rows).sum().backward()
        _, counts = hvd.alltoall(rows.detach(), [2] * hvd.size())
    assert counts.tolist() == [2] * hvd.size()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


#: What rounding to a wire format changes at most in an average, as a part of the largest value: twice half a scale, or
#: a part of the value, in each direction, as the errors of the step before are added.
ROUNDING = {"fp16": 2**-9, "bf16": 2**-6, "fp8": 2**-2, "int8": 2.1 / 127, "int4": 2.1 / 7}
MODES: tuple[dict[str, Any], ...] = (
    *({}, {"overlap": True}, {"reduce_in": "backward"}, {"num_groups": 1}, {"gradient_predivide_factor": 2.0}),
    *({"bucket_nbytes": 1}, {"staleness": 1}, {"split_updates": True}, {"shard": "node"}, {"shard": "all"}),
)


@pytest.mark.spread("options")
@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("wire", ROUNDING)
def test_an_overflow_ends_with_its_step(nodes_of_one: None, wire: str, options: dict[str, Any]) -> None:
    """A NaN stayed in the padding of a bucket, and a block that has one is NaN as a whole: in each later step, too."""
    lengths = (3, 1, 5, 300)
    overflow = 2

    def gradients(rank: int, step: int) -> list[Any]:
        return [torch.cos(torch.arange(length) + 10.0 * rank + step) for length in lengths]

    parameters = [torch.nn.Parameter(torch.zeros(length)) for length in lengths]
    optimizer = sgd(*parameters, compression=getattr(hvd.Compression, wire), **options)
    for step in range(7):
        with optimizer.writing() if "shard" in options else nullcontext(), torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
        optimizer.zero_grad()
        mine = gradients(hvd.rank(), step)
        if step == overflow and hvd.rank() == hvd.size() - 1:
            mine[0] *= torch.inf
        sum((parameter * each).sum() for parameter, each in zip(parameters, mine, strict=True)).backward()
        optimizer.step()
        averaged = step - options.get("staleness", 0)
        if averaged in (-1, overflow):
            continue
        of_ranks = [gradients(rank, averaged) for rank in range(hvd.size())]
        for parameter, *each in zip(parameters, *of_ranks, strict=True):
            average = torch.stack(each).mean(0)
            torch.testing.assert_close(-parameter.detach(), average, rtol=0, atol=ROUNDING[wire])
