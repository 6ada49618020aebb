"""Arguments that people pass: what is meant is done, and what cannot be is refused on all ranks, which then go on."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_models import Model, Optimizer, assert_equal_on_ranks, mlp, weights  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402
from ringreduce.testing import caught  # noqa: E402

make_model = partial(mlp, 3, 2, 2, seed=2)


several = pytest.mark.sizes(2, 3, 4)


def sgd(model: Model) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def train(model: Model, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((1, 3), float(rr.rank()))).square().sum().backward()
    optimizer.step()


def assert_usable() -> None:
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [rr.size()] * 2
    assert rr.allreduce(rr.rank()) == sum(range(rr.size()))
    model = make_model()
    train(model, hvd.DistributedOptimizer(sgd(model)))
    assert_equal_on_ranks(model)


def refused(call: Callable[[Any], Any], wrong: Any, right: Any, message: str) -> None:
    """Call with what is wrong on rank 0 and right on the others: all raise, with the message, and go on."""
    error = caught(lambda: call(wrong if rr.rank() == 0 else right))
    own = rr.ConfigError, rr.UnsupportedBufferError
    assert isinstance(error, own if rr.rank() == 0 else rr.MismatchError), error
    assert re.search(message, str(error)), error
    assert_usable()


# ---- DistributedOptimizer ----

WRONG: dict[str, tuple[Callable[[Model], dict[str, Any]], str]] = {
    "model": (
        lambda model: {"optimizer": model},
        r"a model, of type Sequential; call it as .*model.named_parameters\(\)",
    ),
    "parameters": (lambda model: {"optimizer": model.parameters()}, "something else, of type generator"),
    "class": (lambda model: {"optimizer": torch.optim.SGD}, "something else, of type type"),
    "names left out": (lambda model: {"named_parameters": model[:1].named_parameters()}, "leaves 2 of"),
    "a name twice": (
        lambda model: {"named_parameters": [("w", each) for each in model.parameters()]},
        "more than once: w",
    ),
    "no names": (lambda model: {"named_parameters": 3}, "must be .name, parameter. pairs"),
    "foreign group": (lambda model: {"groups": [[torch.nn.Parameter(torch.ones(1))]]}, "is no parameter of"),
    "flat groups": (lambda model: {"groups": list(model.parameters())}, "groups are lists of parameters"),
    "in two groups": (lambda model: {"groups": [[model[0].weight], [model[0].weight]]}, "can be in one"),
    "less than no group": (lambda model: {"num_groups": -1}, "at least 0"),
    "divided sums": (lambda model: {"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "part of averaging"),
    "half a group": (lambda model: {"num_groups": 1.5}, "must be a whole number, got 1.5"),
    "compression": (lambda model: {"compression": "fp16"}, "got 'fp16'"),
    "op": (lambda model: {"op": hvd.Max}, r"op Average or Sum\), or use Adasum; got op max"),
    "number as op": (lambda model: {"op": 3}, r"op Average or Sum\), or use Adasum; got op 3"),
    "exact sum": (lambda model: {"op": hvd.ReproducibleSum}, "or use Adasum; got op reproducible sum; RINGREDUCE_DET"),
    "passes": (lambda model: {"backward_passes_per_step": 1.5}, "whole number, got 1.5"),
    "no pass": (lambda model: {"backward_passes_per_step": 0}, "at least 1, got 0"),
    "bucket": (lambda model: {"bucket_nbytes": 1e6}, "bucket_nbytes must be a whole number, got 1000000.0"),
    "factor": (lambda model: {"gradient_predivide_factor": "two"}, "must be a number, got 'two'"),
    "process set": (lambda model: {"process_set": [0]}, r"process_set must be a ProcessSet, .* got \[0\]"),
    "unregistered process set": (
        lambda model: {"process_set": hvd.ProcessSet([0])},
        r"the process set of ranks \[0\] is not registered; call add_process_set first",
    ),
    "lazy": (
        lambda model: {"optimizer": torch.optim.SGD(torch.nn.LazyLinear(2).parameters(), lr=0.1)},
        "parameter 0 has no shape yet",
    ),
}


@pytest.mark.spread
@several
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_of_the_optimizer_on_one_rank_are_refused_on_all(what: str) -> None:
    """The rank says what is wrong, the others hear it at once, and all train with the next one."""
    model = make_model()
    make, message = WRONG[what]
    refused(lambda options: hvd.DistributedOptimizer(**{"optimizer": sgd(model), **options}), make(model), {}, message)


@several
def test_a_group_that_cannot_be_added_on_one_rank_is_added_on_none() -> None:
    """All raise, keep the groups that they had, and go on."""
    model, more = make_model(), torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(sgd(model))
    group = {"params": [model[0].weight if rr.rank() == 0 else more]}
    with pytest.raises(ValueError, match="more than one parameter group") as raised:
        optimizer.add_param_group(group)
    assert isinstance(raised.value, rr.MismatchError) == (rr.rank() != 0)
    with pytest.raises(rr.MismatchError, match="tensor 4 is parameter 4, shape"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1 + rr.rank()))]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer)
    assert_equal_on_ranks(model)


def test_names_may_come_from_a_model_or_a_dict() -> None:
    """Either says what the parameters are called."""
    model = make_model()
    for named in (model, dict(model.named_parameters())):
        optimizer = hvd.DistributedOptimizer(sgd(model), named)
        assert list(optimizer._parameter_names.values()) == [name for name, _ in model.named_parameters()]


def test_numbers_of_any_library_are_numbers() -> None:
    """Arguments that were computed with NumPy or torch count; None stands for what a call without them does."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model),
        backward_passes_per_step=torch.tensor(2),
        num_groups=torch.tensor(1),
        bucket_nbytes=torch.tensor(1 << 20),
        gradient_predivide_factor=None,
    )
    train(model, optimizer)
    assert_equal_on_ranks(model)
    values = torch.arange(2.0)
    for none in ({"prescale_factor": None}, {"postscale_factor": None}):
        assert hvd.allreduce(values, op=hvd.Sum, **none).tolist() == [0.0, rr.size()]


@several
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_gradients_of_sparse_adam_stay_sparse(sparse_as_dense: bool) -> None:
    """It takes no others, dense on the way or not; a parameter that no rank used keeps none, in place of zeros."""
    torch.manual_seed(0)
    used, unused = (torch.nn.Embedding(5, 2, sparse=True) for _ in range(2))
    before = unused.weight.detach().clone()
    adam = torch.optim.SparseAdam([used.weight, unused.weight], lr=0.1)
    optimizer = hvd.DistributedOptimizer(adam, sparse_as_dense=sparse_as_dense)
    for _ in range(2):
        optimizer.zero_grad()
        used(torch.tensor([rr.rank()])).sum().backward()
        optimizer.step()
        assert used.weight.grad.is_sparse
    assert_equal_on_ranks(used)
    assert unused.weight.equal(before)


def test_what_holds_an_optimizer_and_is_pickled_is_told_how() -> None:
    """The error says what to put in the place of the optimizer, and that works."""
    trainer = {"optimizer": hvd.DistributedOptimizer(sgd(make_model()))}
    with pytest.raises(TypeError, match=r"pickled while `wrapped` is in its place"):
        pickle.dumps(trainer)
    pickle.dumps({"optimizer": trainer["optimizer"].wrapped})


# ---- process sets ----


@pytest.fixture
def some() -> Iterator[rr.ProcessSet]:
    """All ranks but the last."""
    made = hvd.add_process_set(range(rr.size() - 1))
    yield made
    hvd.remove_process_set(made)


@several
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=str)
def test_ranks_outside_a_process_set_train_alone(some: rr.ProcessSet, op: Any) -> None:
    """A script wraps and broadcasts on all ranks; those outside the set do what the optimizer does by itself."""
    model, alone = make_model(), make_model()
    with torch.no_grad():
        model[0].weight.add_(rr.rank())
        alone[0].weight.add_(rr.rank())
    inner, plain = sgd(model), sgd(alone)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), process_set=some, op=op)
    hvd.broadcast_parameters(model, root_rank=0, process_set=some)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, process_set=some)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(3):
        train(model, optimizer)
        train(alone, plain)
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    plain.zero_grad()
    alone(torch.ones(1, 3)).sum().backward()
    plain.step()
    if not some.included():
        assert weights(model).equal(weights(alone))
        assert optimizer.communication_s == 0.0
        assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
        inner.step()  # alone nothing drifts
    everyone = hvd.allgather(weights(model)[None])
    assert all(each.equal(everyone[0]) for each in everyone[:-1])
    assert not everyone[-1].equal(everyone[0])


@several
def test_the_root_must_belong_to_the_set_on_all_ranks(some: rr.ProcessSet) -> None:
    """Ranks outside the set, for which nothing is done, notice the mistake, too."""
    with pytest.raises(rr.ConfigError, match=f"rank {rr.size() - 1} does not belong"):
        hvd.broadcast_parameters(make_model(), root_rank=rr.size() - 1, process_set=some)


@several
def test_outsiders_follow_when_worlds_change(no_world: None) -> None:
    """A set that is registered again in the next world takes its optimizers with it, those outside it, too."""
    rr.init()
    some = hvd.ProcessSet(range(rr.size() - 1))
    hvd.add_process_set(some)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), process_set=some)
    train(model, optimizer)
    hvd.shutdown()
    hvd.init()
    hvd.add_process_set(some)
    train(model, optimizer)
    everyone = hvd.allgather(weights(model)[None])
    assert all(each.equal(everyone[0]) for each in everyone[:-1])


@several
@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda ranks: hvd.add_process_set(ranks), "a rank of a process set must be a whole number, got 0.0"),
        (lambda ranks: hvd.remove_process_set(ranks), r"takes what add_process_set returned, got \[0.0\]"),
    ],
)
def test_sets_that_are_none_on_one_rank(add: Callable[[Any], Any], message: str) -> None:
    """Nobody waits for the rank that has named one."""
    error = caught(lambda: add([0.0] if rr.rank() == 0 else hvd.ProcessSet([0])))
    assert isinstance(error, rr.ConfigError if rr.rank() == 0 else rr.MismatchError)
    assert rr.rank() or re.search(message, str(error))
    assert_usable()


# ---- collectives ----

COLLECTIVES: dict[str, tuple[Callable[[Any], Any], Any, Any, str]] = {
    "root": (lambda root: hvd.broadcast(torch.ones(2), root), 0.0, 0, "root must be a whole number, got 0.0"),
    "root in place": (lambda root: hvd.broadcast_(torch.ones(2), root), "0", 0, "root must be a whole number, got '0'"),
    "root of parameters": (lambda root: hvd.broadcast_parameters(make_model(), root), 0.5, 0, "whole number, got 0.5"),
    "root of state": (
        lambda root: hvd.broadcast_optimizer_state(sgd(make_model()), root),
        None,
        0,
        "whole number, got None",
    ),
    "root of object": (lambda root: hvd.broadcast_object(1, root), 0.0, 0, "whole number, got 0.0"),
    "process set": (
        lambda group: hvd.allreduce(torch.ones(2), process_set=group),
        [0, 1],
        hvd.global_process_set,
        r"process_set must be a ProcessSet, .* got \[0, 1\]",
    ),
    "process set of a barrier": (hvd.barrier, 5, hvd.global_process_set, "must be a ProcessSet, .* got 5"),
    "process set of objects": (
        lambda group: hvd.allgather_object(1, process_set=group),
        None,
        hvd.global_process_set,
        "must be a ProcessSet, .* got None",
    ),
    "unregistered process set": (
        lambda group: hvd.allreduce(torch.ones(2), process_set=group),
        rr.ProcessSet([0]),
        hvd.global_process_set,
        r"the process set of ranks \[0\] is not registered; call add_process_set first",
    ),
    "op": (lambda op: hvd.allreduce(torch.ones(2), op=op), 3, hvd.Average, "unknown reduce operation 3"),
    "splits": (
        lambda splits: hvd.alltoall(torch.ones(4), splits),
        [1.9, 2.1],
        [4] + [0] * (rr.size() - 1 if rr.is_initialized() else 0),
        "each of the splits must be a whole number, got 1.9",
    ),
    "factor": (lambda factor: hvd.allreduce(torch.ones(2), prescale_factor=factor), "two", 1.0, "a number, got 'two'"),
    "huge factor": (
        lambda factor: hvd.allreduce(torch.ones(2), postscale_factor=factor),
        10**400,
        1.0,
        "postscale_factor must be a number that a float can hold, got 1000",
    ),
    "factor of a reducescatter": (
        lambda factor: hvd.reducescatter(torch.ones(2), prescale_factor=factor),
        "2",
        None,
        "prescale_factor must be a number, got '2'",
    ),
    "sparse op": (
        lambda op: hvd.synchronize(hvd.sparse_allreduce_async(torch.ones(2).to_sparse(), op=op)),
        hvd.Max,
        hvd.Sum,
        r"sparse_allreduce_async averages or sums \(op Average or Sum\), got op max",
    ),
    "mixed names of parameters": (
        hvd.broadcast_parameters,
        {"a": torch.ones(1), 1: torch.ones(1)},
        {"a": torch.ones(1), "b": torch.ones(1)},
        "the names of parameters must be str, got names of the types int, str",
    ),
    "triples as parameters": (
        hvd.broadcast_parameters,
        [("a", torch.ones(1), 1)],
        [("a", torch.ones(1))],
        r"\(name, tensor\) pairs, but number 0 is a tuple of length 3",
    ),
    "number": (hvd.allreduce, 3.0, torch.ones(2), r"got float; pass torch.as_tensor\(...\)"),
    "optimizer as parameters": (
        hvd.broadcast_parameters,
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1),
        [torch.ones(1)],
        "of type SGD; use .*broadcast_optimizer_state",
    ),
    "model as optimizer": (
        hvd.broadcast_optimizer_state,
        make_model(),
        sgd(make_model()),
        "Sequential; use broadcast_parameters",
    ),
    "tensor as group": (hvd.grouped_allreduce, torch.ones(2), [torch.ones(2)], r"a group is a list .*pass \[tensor\]"),
}


@pytest.mark.spread
@several
@pytest.mark.parametrize("what", COLLECTIVES)
def test_wrong_arguments_on_one_rank_are_refused_on_all(what: str) -> None:
    """The rank says what is wrong, the others hear it at once, and all go on."""
    call, wrong, right, message = COLLECTIVES[what]
    if what == "splits":
        right = [4] + [0] * (rr.size() - 1)
    refused(call, wrong, right, message)


def operations_with(parameter: str) -> list[str]:
    functions = [each for each in hvd.__all__ if inspect.isfunction(getattr(hvd, each))]
    return [each for each in functions if parameter in inspect.signature(getattr(hvd, each)).parameters]


def call_named(operation: str, name: Any) -> Any:
    """Call an operation with a name, and wait for its result."""
    values = torch.ones(rr.size())
    given = [values] if operation.startswith("grouped") else values
    arguments = [values.to_sparse() if operation.startswith("sparse") else given]
    arguments += [0] if operation.startswith("broadcast") else []
    result = getattr(hvd, operation)(*arguments, name=name)
    return hvd.synchronize(result) if "async" in operation else result


@pytest.mark.spread
@several
@pytest.mark.parametrize("operation", operations_with("name"))
def test_names_are_text(operation: str) -> None:
    """A list is no name: the others, who gave none, hear of it."""
    message = r"the name of an operation must be a str or None, got \[3\]"
    refused(lambda name: call_named(operation, name), [3], None, message)
    for error in (caught(call_named, operation, 3), caught(call_named, operation, b"x")):
        assert isinstance(error, rr.ConfigError)  # on all ranks alike
    call_named(operation, "a name")


@pytest.mark.parametrize("operation", operations_with("average"))
def test_an_operation_in_the_place_of_average_is_refused(operation: str) -> None:
    """As the second argument any text is true, and would average; True, False and what NumPy makes of them may be."""
    values = torch.ones(2)
    call = getattr(hvd, operation)
    tensors = [values] if operation.startswith("grouped") else values
    for given in ("sum", hvd.Sum, hvd.Adasum, 2.0):
        with pytest.raises(rr.ConfigError, match=r"average= is True or False, got .*say op= for an operation"):
            call(tensors, given)
    for each in (True, False, 1, np.True_):
        with pytest.warns(DeprecationWarning, match="average= is deprecated"):
            result = call(tensors, each)
        if "async" in operation:
            hvd.synchronize(result)


@pytest.mark.parametrize(
    "operation", [each for each in hvd.__all__ if "reducescatter" in each and inspect.isfunction(getattr(hvd, each))]
)
def test_an_operation_as_the_name_of_an_average_is_refused(operation: str) -> None:
    """The second argument of a reducescatter is a name: an average of the name ``sum`` is none that is meant."""
    values = torch.ones(rr.size())
    tensors = [values] if operation.startswith("grouped") else values
    with pytest.raises(rr.ConfigError, match=r"its name is 'sum': .* say op='sum'"):
        getattr(hvd, operation)(tensors, "sum")
    result = getattr(hvd, operation)(tensors, name="sum", op=hvd.Sum)
    part = hvd.synchronize(result) if "async" in operation else result
    assert (part[0] if operation.startswith("grouped") else part).tolist() == [rr.size()]


def test_a_factor_of_none_is_one_in_a_reducescatter() -> None:
    """As in an allreduce, and backwards too."""
    for none in ({"prescale_factor": None}, {"postscale_factor": None, "prescale_factor": None}):
        values = torch.ones(rr.size(), requires_grad=True)
        part = hvd.reducescatter(values, op=hvd.Sum, **none)
        assert part.tolist() == [rr.size()]
        part.sum().backward()
        assert values.grad.tolist() == [1.0] * rr.size()


@several
def test_an_optimizer_whose_state_cannot_be_read_is_broadcast_to_nobody() -> None:
    """The root's optimizer raises; the others hear why, and go on."""

    class Secretive(torch.optim.SGD):
        def state_dict(self) -> Any:
            raise RuntimeError("it is mine")

    made = Secretive([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(RuntimeError, match="it is mine") as raised:
        hvd.broadcast_optimizer_state(made)
    assert isinstance(raised.value, rr.MismatchError) == (rr.rank() != 0)
    assert_usable()


def test_parameters_of_a_model_are_broadcast() -> None:
    """A model stands for its state dict, buffers included; a tensor for itself."""
    model = torch.nn.BatchNorm1d(3)
    with torch.no_grad():
        model.weight.add_(rr.rank())
        model.running_mean.add_(rr.rank())
    hvd.broadcast_parameters(model, root_rank=rr.size() - 1)
    assert model.weight.tolist() == [rr.size()] * 3
    assert model.running_mean.tolist() == [rr.size() - 1] * 3
    for shape in ((), (2, 2)):
        tensor = torch.full(shape, float(rr.rank()))
        hvd.broadcast_parameters(tensor, root_rank=0)
        assert not tensor.any()


def test_groups_may_come_from_generators() -> None:
    """A generator is gone once it was looked at; it is looked at once."""
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_):
        assert [each.tolist() for each in call(torch.full((2,), each) for each in (1.0, 2.0))] == [[1.0] * 2, [2.0] * 2]
    for call in (hvd.grouped_allgather, hvd.grouped_reducescatter):
        assert len(call(torch.ones(rr.size()) for _ in range(3))) == 3
    for start in (hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_, hvd.grouped_allgather_async):
        assert len(hvd.synchronize(start(torch.ones(2) for _ in range(3)))) == 3


# ---- tensors of other frameworks ----


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Torch's own process group, of this process alone, and a mesh on it."""
    tensors = pytest.importorskip("torch.distributed.tensor")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tensors.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters_are_refused(mesh: Any) -> None:
    """Parameters of FSDP are reduced by FSDP; the error says so, and how to reduce shards."""
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model, mesh=mesh)
    with pytest.raises(
        rr.UnsupportedBufferError, match=r"parameter 0 is sharded \(DTensor\).*use the optimizer as it is"
    ):
        hvd.DistributedOptimizer(sgd(model))
    with pytest.raises(rr.UnsupportedBufferError, match=r"DTensor are not supported; .*tensor.to_local\(\)"):
        hvd.broadcast_parameters(model)
    assert_usable()


@pytest.mark.spread
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allgather,
        lambda tensor: hvd.broadcast(tensor, 0),
        hvd.reducescatter,
        rr.allreduce,
        lambda tensor: hvd.allreduce(tensor, op=hvd.Adasum),
    ],
)
def test_distributed_tensors_are_refused_and_their_parts_taken(
    mesh: Any, call: Callable[[Any], Any], dtype: Any
) -> None:
    """On one rank alone, too: the others hear of it."""
    tensors = pytest.importorskip("torch.distributed.tensor")
    whole = tensors.distribute_tensor(torch.ones(4, 3, dtype=dtype), mesh, [tensors.Shard(0)])
    message = r"tensors of type DTensor are not supported; pass the part that is here, tensor.to_local\(\)"
    if rr.size() > 1:
        refused(call, whole, whole.to_local(), message)
    else:
        with pytest.raises(rr.UnsupportedBufferError, match=message):
            call(whole)
    call(whole.to_local())
