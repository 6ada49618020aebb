"""`DistributedOptimizer(shard="node")`: bits as without it, on ranks that have parameters and state in common."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402

Model = Any
Optimizer = Any

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


def mlp(dtype: Any = torch.float32) -> Model:
    """Return a model of odd sizes, equal on all ranks."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(13, 17), torch.nn.Tanh(), torch.nn.Linear(17, 17), torch.nn.Tanh(), torch.nn.Linear(17, 3)
    return torch.nn.Sequential(*layers).to(dtype)


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


def train(optimizer: Optimizer, model: Model, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def tensors_of(model: Model, optimizer: Optimizer) -> Iterator[Any]:
    yield from model.parameters()
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        yield from (torch.as_tensor(each) for _, each in sorted(state.items()))


def require_same(run: Callable[[str | None], tuple[Model, Optimizer]]) -> None:
    """Check that a run ends with the same weights and the same state, bit by bit, with ``shard`` and without."""
    plain, sharded = (list(tensors_of(*run(shard))) for shard in (None, "node"))
    assert len(plain) == len(sharded)
    for one, other in zip(plain, sharded, strict=True):
        assert torch.equal(one, other)


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
        model = mlp(getattr(torch, dtype))
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), shard, **options)
        train(optimizer, model, range(5))
        return model, optimizer

    require_same(run)


def accumulate(model: Model, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    with optimizer.no_sync():
        loss_of(model, 2 * step).backward()
    loss_of(model, 2 * step + 1).backward()
    optimizer.step()


def clip(model: Model, optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.clip_grad_norm_(0.01)
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
    train(optimizer, model, range(step, step + 1))


def use_some(model: Model, optimizer: Optimizer, step: int) -> None:
    """Use all layers on all ranks, on the first, or on none."""
    used = model if step % 3 == 0 or (rr.rank() == 0 and step % 2) else model[:2]
    optimizer.zero_grad()
    loss_of(used, step).backward()
    optimizer.step()


def keep(model: Model, optimizer: Optimizer, step: int) -> None:
    """Hold gradients of earlier steps, on one rank."""
    train(optimizer, model, range(step, step + 1))
    if rr.rank() == 0:
        model.kept = [*getattr(model, "kept", ()), model[0].weight.grad]


@pytest.mark.parametrize("make_step", [accumulate, clip, look, evaluate, thaw, use_some, keep])
def test_bits_of_steps(make_step: Callable[[Model, Optimizer, int], None]):
    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = mlp()
        optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01), shard)
        for step in range(6):
            make_step(model, optimizer, step)
        return model, optimizer

    require_same(run)


def test_schedulers_of_the_wrapped_optimizer():
    """They were made before it was wrapped; a warning that they come before its steps would be an error."""

    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = mlp()
        wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 2, 0.5)
        optimizer = wrap(model, wrapped, shard)
        for step in range(5):
            train(optimizer, model, range(step, step + 1))
            scheduler.step()
        return model, optimizer

    require_same(run)


def test_overflows_of_one_rank():
    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = mlp()
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
        model = mlp()
        optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model[:2].parameters(), lr=0.01), shard=shard)
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": list(model[2:].parameters()), "lr": 0.1})
            train(optimizer, model, range(step, step + 1))
        return model, optimizer

    require_same(run)


def test_parameters_that_are_numbers_and_tied():
    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = mlp()
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
        model = mlp()
        used = torch.optim.Adam(model.parameters(), lr=0.01)
        loss_of_all = model(torch.ones(4, 13)).square().mean()
        loss_of_all.backward()
        used.step()
        optimizer = wrap(model, used, shard)
        train(optimizer, model, range(3))
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        again = mlp()
        loaded = wrap(again, torch.optim.Adam(again.parameters()), shard)
        for context in (nullcontext, loaded.writing):
            file.seek(0)
            weights, state = torch.load(file)
            with context():
                again.load_state_dict(weights)
            loaded.load_state_dict(state)
            train(loaded, again, range(3, 6))
        return again, loaded

    require_same(run)


def test_one_rank_saves_a_complete_state_which_plain_torch_loads():
    model = mlp()
    optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=0.01), "node")
    train(optimizer, model, range(3))
    if rr.rank() == 0:
        alone = mlp()
        plain = torch.optim.Adam(alone.parameters(), lr=0.01)
        alone.load_state_dict(model.state_dict())
        plain.load_state_dict(optimizer.state_dict())
        state = plain.state_dict()["state"]
        assert len(state) == len(list(model.parameters()))
        assert all(each["exp_avg"].abs().sum() > 0 and each["step"] == 3 for each in state.values())
    train(optimizer, model, range(3, 5))


def test_a_node_has_parameters_and_state_once():
    """Needs ranks of one node: what one stores, the others see."""
    model = mlp()
    optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=0.01), "node")
    train(optimizer, model, range(2))
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
    model = mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), "node")
    train(optimizer, model, range(1))
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
    model = mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), "node")
    train(optimizer, model, range(2))
    rr.barrier()
    change(model)
    rr.barrier()
    loss_of(model, 2).backward()
    with pytest.raises((rr.ConfigError, rr.MismatchError), match=r"optimizer\.writing"):
        optimizer.step()
    if change is not move:
        with optimizer.writing():
            pass
        train(optimizer, model, range(3, 4))


def test_writing_counts_once():
    """All ranks write; the node has what the first has written."""

    def run(shard: str | None) -> tuple[Model, Optimizer]:
        model = mlp()
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), shard)
        train(optimizer, model, range(2))
        with optimizer.writing(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        train(optimizer, model, range(2, 4))
        return model, optimizer

    require_same(run)


def test_what_a_forked_process_writes_is_its_own():
    model = mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), "node")
    train(optimizer, model, range(2))
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
    train(optimizer, model, range(2, 3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda given: wrap_parameters(torch.optim.LBFGS(given), shard="node"), "LBFGS may need whole ones"),
        (lambda given: wrap_parameters(torch.optim.SparseAdam(given), shard="node"), "SparseAdam may need whole ones"),
        (lambda given: wrap_parameters(torch.optim.SGD(given, lr=0.1), shard="rank"), 'shard is "node" or None'),
        (lambda given: wrap_parameters(torch.optim.SGD(given, lr=0.1), shard="node", op=hvd.Adasum), "Adasum"),
    ],
)
def test_what_cannot_be_sharded(make: Callable[[Any], object], words: str):
    with pytest.raises(rr.ConfigError, match=words):
        make(list(mlp().parameters()))


def wrap_parameters(optimizer: Optimizer, **options: Any) -> Optimizer:
    return hvd.DistributedOptimizer(optimizer, **options)


def test_joined_ranks_are_refused():
    if rr.size() == 1:
        pytest.skip("nobody waits for a rank that is alone")
    model = mlp()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.01), "node")
    train(optimizer, model, range(2))
    if rr.rank():
        loss_of(model, 2).backward()
        with pytest.raises(rr.MismatchError, match="joined"):
            optimizer.step()
    hvd.join()


def test_training_goes_on_in_another_world():
    model = mlp()
    optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=0.01), "node")
    train(optimizer, model, range(2))
    hvd.shutdown()
    hvd.init()
    train(optimizer, model, range(2, 4))
    alone = mlp()
    plain = wrap(alone, torch.optim.Adam(alone.parameters(), lr=0.01), None)
    train(plain, alone, range(4))
    assert all(map(torch.equal, model.parameters(), alone.parameters()))
