"""`DistributedOptimizer(shard="node")`: bits as without it, on ranks that have parameters and state in common."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import ringreduce as rr
from ringreduce.training.strategies import parts

torch = pytest.importorskip("torch")
from torch_models import Model, Optimizer, Own, mlp, take_steps  # noqa: E402

import ringreduce.torch as hvd  # noqa: E402

PRIVATE = MPI.COMM_WORLD.Dup()

make_model = partial(mlp, 13, 17, 17, 3)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda given: torch.optim.SGD(given, lr=0.1),
    "nesterov": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda given: torch.optim.Adam(given, lr=0.01),
    "adamw fused": lambda given: torch.optim.AdamW(given, lr=0.01, fused=True),
    "adamw amsgrad": lambda given: torch.optim.AdamW(given, lr=0.01, amsgrad=True),
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda given: torch.optim.RMSprop(given, centered=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}


class Lamb(Own):
    """Steps of a length that depends on the norm of the whole parameter, and state that is no tensor.

    Y. You et al., "Large Batch Optimization for Deep Learning" (ICLR 2020), without the second moment.
    """

    def update(self, parameter: Any, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state.setdefault("moment", torch.zeros_like(parameter))
        state["moment"] = 0.9 * state["moment"] + parameter.grad
        state["norm"], state["step"] = float(parameter.norm()), state.get("step", 0) + 1
        state["shape"], state["is_even"] = (*parameter.shape,), state["step"] % 2 == 0
        parameter -= group["lr"] / group["steps"] * state["norm"] * state["moment"]


def matrices(model: Any) -> Any:
    return [each for each in model.parameters() if each.dim() == 2]


WHOLE: dict[str, Callable[[Any], Optimizer]] = {
    "lamb": lambda model: Lamb(model.parameters()),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
    "muon": lambda model: torch.optim.Muon(matrices(model), lr=0.01),
}


def convolutions() -> Model:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 7, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(7 * 36, 5)
    return torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)


def batch(step: int, *shape: int, dtype: Any = torch.float32) -> Any:
    """Return data of this rank for a step."""
    torch.manual_seed(1000 * rr.rank() + step)
    return torch.randn(4, *(shape or (13,)), dtype=dtype)


def loss_of(model: Model, step: int) -> Any:
    return model(batch(step, dtype=next(model.parameters()).dtype)).square().mean()


def wrap(model: Model, optimizer: Optimizer, shard: str | None, **options: Any) -> Optimizer:
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), shard=shard, **options)


def begun(kind: Any = torch.optim.SGD, steps: int = 2) -> tuple[Model, Optimizer]:
    """Return a model and its optimizer with ``shard="node"``, which has made steps."""
    model = make_model()
    optimizer = wrap(model, kind(model.parameters(), lr=0.01), "node")
    take_steps(model, optimizer, range(steps), loss_of)
    return model, optimizer


def tensors_of(model: Model, optimizer: Optimizer) -> Iterator[Any]:
    yield from model.parameters()
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        yield from (torch.as_tensor(each) for _, each in sorted(state.items()))


def require_same(run: Callable[[str | None], tuple[Model, Optimizer]]) -> None:
    """Check that a run ends with the same weights and the same state, bit by bit, with ``shard`` and without."""
    even = len(set(map(len, rr.world().topology.nodes))) == 1
    plain, *sharded = (list(tensors_of(*run(shard))) for shard in (None, "node", *(["all"] if even else [])))
    for each in sharded:
        assert len(each) == len(plain)
        assert all(map(torch.equal, plain, each))


@pytest.mark.spread
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_of_every_optimizer(name: str):
    """A scheduler changes the learning rate meanwhile."""

    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = convolutions()
        optimizer = wrap(model, OPTIMIZERS[name](model.parameters()), shard)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(5):
            optimizer.zero_grad()
            model(batch(step, 3, 8, 8).to(memory_format=torch.channels_last)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        return model, optimizer

    require_same(run)


@pytest.mark.spread
@pytest.mark.parametrize("bucket_nbytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("name", WHOLE)
def test_bits_of_optimizers_that_need_whole_parameters(name: str, bucket_nbytes: int):
    """Their state of any kind is complete on every rank, and goes on in another optimizer."""

    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = make_model()
        optimizer = wrap(model, WHOLE[name](model), shard, bucket_nbytes=bucket_nbytes)
        take_steps(model, optimizer, range(4), loss_of)
        again = make_model()
        again.load_state_dict(model.state_dict())
        other, state = wrap(again, WHOLE[name](again), shard), copy.deepcopy(optimizer.state_dict())
        other.load_state_dict(copy.deepcopy(state))  # torch's optimizers change tensors that they have loaded
        take_steps(again, other, range(4, 7), loss_of)
        other.load_state_dict(state)
        take_steps(again, other, range(7, 9), loss_of)
        assert_equal_state(optimizer.state_dict()["state"])
        return again, other

    require_same(run)


def assert_equal_state(state: dict[int, dict[str, Any]]) -> None:
    """Check that all ranks have the same state."""
    for other in hvd.allgather_object(state):
        assert other.keys() == state.keys()
        for number, values in state.items():
            assert other[number].keys() == values.keys()
            for name, value in values.items():
                same = torch.equal if torch.is_tensor(value) else type(value).__eq__
                assert same(value, other[number][name])


@pytest.mark.spread
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float64", {}),
        ("bfloat16", {}),
        ("float16", {}),
        ("float32", {"bucket_nbytes": 600}),
        ("float32", {"num_groups": 2}),
        ("float32", {"gradient_predivide_factor": 2.0}),
        ("float32", {"compression": hvd.Compression.fp16}),
        ("float32", {"op": hvd.Sum}),
        ("float32", {"reduce_in": "backward"}),
    ],
)
def test_bits_of_dtypes_and_options(dtype: str, options: dict[str, Any]):
    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = make_model(dtype=getattr(torch, dtype))
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), shard, **options)
        take_steps(model, optimizer, range(5), loss_of)
        return model, optimizer

    require_same(run)


def accumulate(model: Model, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    with optimizer.no_sync():
        loss_of(model, 2 * step).backward()
    loss_of(model, 2 * step + 1).backward()
    optimizer.step()


def look(model: Model, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with optimizer.skip_synchronize():
        optimizer.step()


def evaluate(model: Model, optimizer: Optimizer, step: int) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    optimizer.step(closure)


def thaw(model: Model, optimizer: Optimizer, step: int) -> None:
    for parameter in model[2].parameters():
        parameter.requires_grad_(step >= 3)
    take_steps(model, optimizer, range(step, step + 1), loss_of)


def use_some(model: Model, optimizer: Optimizer, step: int) -> None:
    """Use all layers on all ranks, on the first, or on none."""
    used = model if step % 3 == 0 or (rr.rank() == 0 and step % 2) else model[:2]
    optimizer.zero_grad()
    loss_of(used, step).backward()
    optimizer.step()


def keep(model: Model, optimizer: Optimizer, step: int) -> None:
    """Hold gradients of earlier steps, on one rank."""
    take_steps(model, optimizer, range(step, step + 1), loss_of)
    if rr.rank() == 0:
        model.kept = [*getattr(model, "kept", ()), model[0].weight.grad]


@pytest.mark.spread
@pytest.mark.parametrize("make_step", [accumulate, look, evaluate, thaw, use_some, keep])
def test_bits_of_steps(make_step: Callable[[Model, Optimizer, int], None]):
    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = make_model()
        optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01), shard)
        for step in range(6):
            make_step(model, optimizer, step)
        return model, optimizer

    require_same(run)


@pytest.mark.spread("make")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf"), 0.0])
@pytest.mark.parametrize("make", [OPTIMIZERS["adam"], OPTIMIZERS["sgd"], lambda given: torch.optim.Adafactor(given)])
def test_clipped_gradients(make: Callable[[Any], Optimizer], norm_type: float):
    """The norm is that of all gradients, to rounding."""
    models = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    one, other = (make(model.parameters()) for model in models)
    plain, sharded = wrap(models[0], one, None), wrap(models[1], other, "node")
    for step in range(4):
        norms = []
        for model, optimizer in zip(models, (plain, sharded), strict=True):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            norms.append(optimizer.clip_grad_norm_(0.01, norm_type))
            optimizer.step()
        torch.testing.assert_close(*norms)
    for one, other in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.spread
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("dtypes", [["float64"], ["bfloat16", "float32"], ["float32", "float64"], ["bfloat16"]])
def test_norms_of_any_dtypes(dtypes: list[str], norm_type: float):
    """All ranks get the value and the dtype of torch, also those without a part, and clip by the same factor."""
    torch.manual_seed(3)
    shapes = [3] if dtypes == ["float64"] else [4099, 16, 1]
    given = [torch.randn(n).to(getattr(torch, dtypes[k % len(dtypes)])) for k, n in enumerate(shapes)]
    alone = [torch.nn.Parameter(torch.zeros_like(each)) for each in given]
    for parameter, gradient in zip(alone, given, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(alone, 0.5, norm_type)
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in given]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), shard="node")
    for step in range(2):
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        norm = optimizer.clip_grad_norm_(0.5, norm_type)
        assert norm.dtype == expected.dtype
        torch.testing.assert_close(norm, expected, rtol=0.005 if "bfloat16" in dtypes else 1e-6, atol=0)
        optimizer.step()
        for parameter, one in zip(parameters, alone, strict=True):
            torch.testing.assert_close(parameter.detach(), -(step + 1.0) * one.grad, rtol=0.02, atol=1e-5)


def test_norms_that_are_not_finite_raise_on_all_ranks():
    model, optimizer = begun()
    (loss_of(model, 2) * (float("inf") if rr.rank() == 0 else 1.0)).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_schedulers_of_the_wrapped_optimizer():
    """They were made before it was wrapped; a warning that they come before its steps would be an error."""

    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = make_model()
        wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 2, 0.5)
        optimizer = wrap(model, wrapped, shard)
        for step in range(5):
            take_steps(model, optimizer, range(step, step + 1), loss_of)
            scheduler.step()
        return model, optimizer

    require_same(run)


def test_overflows_of_one_rank():
    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = make_model()
        optimizer, scaler = wrap(model, torch.optim.Adam(model.parameters()), shard), torch.amp.GradScaler("cpu", 16.0)
        for step in range(5):
            optimizer.zero_grad()
            factor = float("inf") if step == 2 and rr.rank() == rr.size() - 1 else 1.0
            scaler.scale(loss_of(model, step) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return model, optimizer

    require_same(run)


def test_groups_that_are_added():
    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model[:2].parameters(), lr=0.01), shard=shard)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": list(model[2:].parameters()), "lr": 0.1})
            take_steps(model, optimizer, range(step, step + 1), loss_of)
        return model, optimizer

    require_same(run)


def test_parameters_that_are_numbers_and_tied():
    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = make_model()
        model[2].bias = model[0].bias
        model.factor = torch.nn.Parameter(torch.tensor(1.5))
        optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=0.01), shard)
        for step in range(4):
            optimizer.zero_grad()
            (loss_of(model, step) * model.factor).backward()
            optimizer.step()
        return model, optimizer

    require_same(run)


def test_sparse_gradients():
    """Such parameters are each rank's own, with the same values on all."""

    def run(shard: str | None) -> tuple[Model, Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(11, 4, sparse=True), torch.nn.Linear(4, 2))
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), shard)
        for step in range(4):
            torch.manual_seed(100 * rr.rank() + step)
            optimizer.zero_grad()
            model(torch.randint(0, 11, (5,))).square().mean().backward()
            optimizer.step()
        return model, optimizer

    require_same(run)


def test_used_optimizers_and_saved_states():
    """A state goes on where it was saved: into a new optimizer, into one that has stepped, and into plain torch."""

    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = make_model()
        used = torch.optim.Adam(model.parameters(), lr=0.01)
        loss_of_all = model(torch.ones(4, 13)).square().mean()
        loss_of_all.backward()
        used.step()
        optimizer = wrap(model, used, shard)
        take_steps(model, optimizer, range(3), loss_of)
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        again = make_model()
        loaded = wrap(again, torch.optim.Adam(again.parameters()), shard)
        for context in (nullcontext, loaded.writing):
            file.seek(0)
            weights, state = torch.load(file)
            with context():
                again.load_state_dict(weights)
            loaded.load_state_dict(state)
            take_steps(again, loaded, range(3, 6), loss_of)
        return again, loaded

    require_same(run)


def test_one_rank_saves_a_complete_state_which_plain_torch_loads():
    model, optimizer = begun(torch.optim.Adam, steps=3)
    if rr.rank() == 0:
        alone = make_model()
        plain = torch.optim.Adam(alone.parameters(), lr=0.01)
        alone.load_state_dict(model.state_dict())
        plain.load_state_dict(optimizer.state_dict())
        state = plain.state_dict()["state"]
        assert len(state) == len(list(model.parameters()))
        assert all(each["exp_avg"].abs().sum() > 0 and each["step"] == 3 for each in state.values())
    take_steps(model, optimizer, range(3, 5), loss_of)


def test_a_node_has_parameters_and_state_once():
    """Needs ranks of one node: what one stores, the others see."""
    model, optimizer = begun(torch.optim.Adam)
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    rr.barrier()
    if rr.rank() == 0:
        model[0].weight.data[0, 0] = 123.0
        moment[0, 0] = 321.0
    rr.barrier()
    if rr.size() > 1:
        assert model[0].weight[0, 0].item() == 123.0
        assert moment[0, 0].item() == 321.0


def test_memory_of_a_saved_layer_is_its_own():
    model, _ = begun(steps=1)
    file = io.BytesIO()
    torch.save(model[4].state_dict(), file)
    assert file.tell() < 4000


def write(model: Model) -> None:
    """Write on one rank, as torch counts it."""
    if rr.rank() == rr.size() - 1:
        with torch.no_grad():
            model[0].weight.mul_(0.5)


def write_data(model: Model) -> None:
    """Write to all parameters on one rank, as torch does not count it."""
    if rr.rank() == 0:
        for parameter in model.parameters():
            parameter.data.mul_(0.5)


def move(model: Model) -> None:
    if rr.rank() == 0:
        model.double().float()


@pytest.mark.parametrize("change", [write, write_data, move])
def test_changes_between_steps_raise_on_all_ranks(change: Callable[[Model], None]):
    if rr.size() == 1:
        pytest.skip("the parameters of one rank are its own")
    model, optimizer = begun()
    rr.barrier()
    change(model)
    rr.barrier()
    loss_of(model, 2).backward()
    with pytest.raises((rr.ConfigError, rr.MismatchError), match=r"optimizer\.writing"):
        optimizer.step()
    if change is not move:
        with optimizer.writing():
            pass
        take_steps(model, optimizer, range(3, 4), loss_of)


def test_writing_counts_once():
    """All ranks write; the node has what the first has written."""

    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = make_model()
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), shard)
        take_steps(model, optimizer, range(2), loss_of)
        with optimizer.writing(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        take_steps(model, optimizer, range(2, 4), loss_of)
        return model, optimizer

    require_same(run)


def test_what_a_forked_process_writes_is_its_own():
    model, optimizer = begun()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        os._exit(0)
    os.waitpid(child, 0)
    rr.barrier()
    assert all(map(torch.equal, before, model.parameters()))
    take_steps(model, optimizer, range(2, 3), loss_of)


@pytest.mark.spread
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda given: wrap_parameters(torch.optim.LBFGS(given), shard="node"), "LBFGS needs all of them"),
        (lambda given: wrap_parameters(torch.optim.SparseAdam(given), shard="node"), "SparseAdam takes sparse ones"),
        (lambda given: wrap_parameters(torch.optim.SGD(given, lr=0.1), shard="rank"), 'shard is "node", "all" or None'),
        (lambda given: wrap_parameters(torch.optim.SGD(given, lr=0.1), shard="node", op=hvd.Adasum), "Adasum"),
    ],
)
def test_what_cannot_be_sharded(make: Callable[[Any], object], words: str):
    with pytest.raises(rr.ConfigError, match=words):
        make(list(make_model().parameters()))


def wrap_parameters(optimizer: Optimizer, **options: Any) -> Optimizer:
    return hvd.DistributedOptimizer(optimizer, **options)


def test_joined_ranks_are_refused():
    if rr.size() == 1:
        pytest.skip("nobody waits for a rank that is alone")
    model, optimizer = begun()
    if rr.rank():
        loss_of(model, 2).backward()
        with pytest.raises(rr.MismatchError, match="joined"):
            optimizer.step()
    hvd.join()


def test_training_goes_on_in_another_world():
    model, optimizer = begun(torch.optim.Adam)
    hvd.shutdown()
    hvd.init()
    take_steps(model, optimizer, range(2, 4), loss_of)
    alone = make_model()
    plain = wrap(alone, torch.optim.Adam(alone.parameters(), lr=0.01), None)
    take_steps(alone, plain, range(4), loss_of)
    assert all(map(torch.equal, model.parameters(), alone.parameters()))


@pytest.fixture(params=[1, 2])
def nodes(begin_world: Callable[..., None], request: pytest.FixtureRequest) -> None:
    """A world of nodes of one and of two ranks, in which reductions add in the order of ranks."""
    begin_world(NODE_SIZE=str(request.param), DETERMINISTIC="1")


@pytest.mark.spread("nodes")
@pytest.mark.parametrize("name", ["adamw amsgrad", "lamb", "adafactor"])
def test_bits_between_nodes(nodes: None, name: str):
    """Also as parameters get places in the midst of the training, and in another optimizer that goes on."""

    def run(shard: str | None) -> tuple[Model, Optimizer]:
        def make(model: Model) -> Optimizer:
            made = WHOLE[name](model) if name in WHOLE else OPTIMIZERS[name](model.parameters())
            return wrap(model, made, shard, bucket_nbytes=1000)

        model = make_model()
        optimizer = make(model)
        for step in range(5):
            thaw(model, optimizer, step)
        again = make_model()
        other, state = make(again), copy.deepcopy(optimizer.state_dict())
        again.load_state_dict(model.state_dict())
        other.load_state_dict(state)
        take_steps(again, other, range(5, 8), loss_of)
        assert_equal_state(other.state_dict()["state"])
        return again, other

    require_same(run)


def commit_and_restore(shard: str | None) -> tuple[Model, Optimizer]:
    """Make steps from a commit twice, after some steps that change memory of the node, and from another one."""
    model = make_model()
    optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=0.01), shard, bucket_nbytes=1000)
    state = hvd.elastic.TorchState(model, optimizer)
    for step in range(6):
        thaw(model, optimizer, step)
        if step in (1, 4):
            state.commit()
    for _ in range(2):
        with optimizer.writing():
            state.restore()
        take_steps(model, optimizer, range(6, 8), loss_of)
    state.commit()
    take_steps(model, optimizer, range(8, 9), loss_of)
    with optimizer.writing():
        state.restore()
    return model, optimizer


def test_commits_stay_as_they_are():
    require_same(commit_and_restore)


def test_commits_between_nodes(nodes: None):
    require_same(commit_and_restore)


def test_commits_on_disk(tmp_path: Path):
    """A later commit, made while this one waits to be written, changes nothing in it."""
    folder = Path(rr.broadcast_object(str(tmp_path)))
    model, again = make_model(), make_model()
    optimizer, other = (wrap(each, torch.optim.Adam(each.parameters(), lr=0.01), "node") for each in (model, again))
    take_steps(model, optimizer, range(2), loss_of)
    state = hvd.elastic.TorchState(model, optimizer)
    state.keep_on_disk(folder, every=2)
    for step in range(2, 5):
        take_steps(model, optimizer, range(step, step + 1), loss_of)
        state.commit()
    state._disk.settle()
    rr.barrier()
    assert hvd.elastic.TorchState(again, other).keep_on_disk(folder) == 2
    take_steps(again, other, range(4, 5), loss_of)
    for one, two in zip(tensors_of(model, optimizer), tensors_of(again, other), strict=True):
        assert torch.equal(one, two)


def test_clipping_between_nodes(nodes: None):
    models = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    shards = None, "all" if len(set(map(len, rr.world().topology.nodes))) == 1 else "node"
    plain, sharded = (
        wrap(model, torch.optim.Adam(model.parameters()), shard) for model, shard in zip(models, shards, strict=True)
    )
    for step in range(3):
        for model, optimizer in ((models[0], plain), (models[1], sharded)):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.clip_grad_norm_(0.01)
            optimizer.step()
    for one, other in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.spread
def test_what_one_rank_saves_of_all_nodes(nodes: None, monkeypatch: pytest.MonkeyPatch):
    """Where a node has all state, it needs no other rank; else it raises on all, while the others make a step."""
    if len(set(map(len, rr.world().topology.nodes))) > 1:
        pytest.skip("needs nodes of equal size")
    model = make_model()
    optimizer = wrap(model, torch.optim.Adam(model.parameters()), "all", overlap=False)
    take_steps(model, optimizer, range(4), loss_of)
    if rr.world().topology.single_node:
        return
    if rr.rank() == 0:
        with pytest.raises(rr.ConfigError, match="on all ranks"):
            optimizer.state_dict()
    else:
        loss_of(model, 4).backward()
        with pytest.raises(rr.MismatchError, match="on all ranks"):
            optimizer.step()
    take_steps(model, optimizer, range(5, 7), loss_of)
    if rr.rank() == 0:
        monkeypatch.setattr(parts, "_PATIENCE_S", 1.0)
        with pytest.raises(rr.ConfigError, match="have not called it within 1 s"):
            optimizer.state_dict()
    PRIVATE.Barrier()
    take_steps(model, optimizer, range(7, 8), loss_of)
    assert_equal_state(optimizer.state_dict()["state"])


@pytest.mark.sizes(3)
def test_nodes_of_unequal_size_are_refused(nodes_of_two: None):
    with pytest.raises(rr.ConfigError, match="as many ranks on each node"):
        wrap_parameters(torch.optim.SGD(make_model().parameters(), lr=0.1), shard="all")
