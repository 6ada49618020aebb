"""Batch normalisation over all ranks: what one process computes in float64 on the batches put together."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
hvd = pytest.importorskip("ringreduce.torch")
from ringreduce.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm  # noqa: E402  # needs torch

CHANNELS = 3
#: Rows of each rank: as many everywhere, different numbers, and none at the last rank.
ROWS = {"equal": (4, 4, 4, 4), "uneven": (5, 1, 3, 2), "empty": (3, 0, 0, 0)}


def batches(world: rr.Communicator, rows: tuple[int, ...], *rest: int, offset: float = 0.0) -> list[Any]:
    """Return the batches of all ranks, the same everywhere, in float64."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(rows[rank], CHANNELS, *rest, generator=generator, dtype=torch.float64) * (rank + 1) + offset
        for rank in range(world.size)
    ]


def reference(norm: Any, parts: list[Any]) -> tuple[Any, Any, list[Any], list[Any]]:
    """Run torch's own layer in float64 on all batches; return it, outputs and input gradients per rank."""
    kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
    theirs = kind[parts[0].dim()](
        CHANNELS, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, dtype=torch.float64
    )
    theirs.load_state_dict(norm.state_dict())
    theirs.train(norm.training)
    whole = torch.cat(parts).detach().requires_grad_()
    outputs = theirs(whole)
    (outputs * weights(whole)).sum().backward()
    counts = [len(part) for part in parts]
    return theirs, whole, list(outputs.detach().split(counts)), list(whole.grad.split(counts))


def weights(batch: Any) -> Any:
    """Return what makes a loss of outputs: a factor for each element that depends on its content alone."""
    return torch.sin(3 * batch.detach().double() + 1)


def check(world: rr.Communicator, norm: Any, parts: list[Any], tolerance: float = 1e-12, **layout: Any) -> None:
    """Compare forward, backward and running statistics with the reference."""
    mine = parts[world.rank].clone(**layout).requires_grad_()
    theirs, _, outputs, grads = reference(norm, parts)
    result = norm(mine)
    assert (result.dtype, result.shape) == (mine.dtype, mine.shape)
    (result * weights(parts[world.rank]).to(result.dtype)).sum().backward()
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(result.detach().double(), outputs[world.rank], **close)
    torch.testing.assert_close(mine.grad.double(), grads[world.rank], **close)
    if norm.affine:
        for ours, expected in ((norm.weight, theirs.weight), (norm.bias, theirs.bias)):
            total = hvd.allreduce(ours.grad, op=hvd.Sum)
            torch.testing.assert_close(total.double(), expected.grad, **close)
    if norm.track_running_stats:
        torch.testing.assert_close(norm.running_mean.double(), theirs.running_mean, **close)
        torch.testing.assert_close(norm.running_var.double(), theirs.running_var, **close)
        assert norm.num_batches_tracked == theirs.num_batches_tracked


def made(**options: Any) -> Any:
    """Return a layer in float64 whose parameters are not all alike."""
    norm = SyncBatchNorm(CHANNELS, dtype=torch.float64, **options)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, -2.0, 3.0]))
            norm.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    return norm


@pytest.mark.spread("rows")
@pytest.mark.parametrize("rest", [(), (5,), (3, 2), (2, 1, 3)], ids=["2d", "3d", "4d", "5d"])
@pytest.mark.parametrize("rows", ROWS)
def test_equals_one_process_with_all_batches(world: rr.Communicator, rows: str, rest: tuple[int, ...]) -> None:
    """Outputs, gradients and running statistics over several steps, whatever number of rows the ranks have."""
    norm = made()
    for step in range(3):
        norm.zero_grad()
        check(world, norm, batches(world, ROWS[rows], *rest, offset=float(step)))


@pytest.mark.spread
@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"momentum": 0.3}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}],
    ids=str,
)
def test_options_mean_what_they_mean_in_torch(world: rr.Communicator, options: dict[str, Any]) -> None:
    """Each option has the effect that it has on torch's layer, in training over two steps and in evaluation."""
    norm = made(**options)
    for _ in range(2):
        norm.zero_grad()
        check(world, norm, batches(world, ROWS["uneven"], 2))
    norm.eval()
    norm.zero_grad()
    check(world, norm, batches(world, ROWS["equal"], 2))


def test_evaluation_with_running_statistics_talks_to_nobody(world: rr.Communicator) -> None:
    """One rank alone can evaluate."""
    norm = made().eval()
    if world.rank == 0:
        rows = torch.ones(2, CHANNELS, dtype=torch.float64)
        torch.testing.assert_close(norm(rows), rows / (1 + norm.eps) ** 0.5 * norm.weight + norm.bias)


def test_no_rows_anywhere_leave_the_statistics_alone(world: rr.Communicator) -> None:
    """Batches that are all empty give empty outputs and gradients, and change what torch's layer would change."""
    check(world, made(), [torch.empty(0, CHANNELS, 2, 2, dtype=torch.float64)] * world.size)


def test_layers_in_a_row_and_side_by_side(world: rr.Communicator) -> None:
    """Of a model with several layers, in which gradients join, inputs and weights get what one process computes."""

    def run(layers: list[Any], batch: Any) -> Any:
        first, left, right, last = layers
        hidden = first(batch)
        return last(torch.tanh(left(hidden)) * right(hidden.square()))

    parts = batches(world, ROWS["uneven"], 2)
    theirs = [torch.nn.BatchNorm1d(CHANNELS, dtype=torch.float64) for _ in range(4)]
    ours = [convert_sync_batchnorm(copy.deepcopy(each)) for each in theirs]
    whole, mine = torch.cat(parts).requires_grad_(), parts[world.rank].clone().requires_grad_()
    (run(theirs, whole) * weights(whole)).sum().backward()
    (run(ours, mine) * weights(mine)).sum().backward()
    expected = whole.grad.split([len(part) for part in parts])[world.rank]
    torch.testing.assert_close(mine.grad, expected, rtol=1e-10, atol=1e-10)
    for our, their in zip(ours, theirs, strict=True):
        total = hvd.allreduce(our.weight.grad, op=hvd.Sum)
        torch.testing.assert_close(total, their.weight.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=str)
def test_what_follows_may_overwrite_the_output(world: rr.Communicator, options: dict[str, Any]) -> None:
    """An activation in place after the layer gives the gradient of one that is not."""
    part = batches(world, ROWS["equal"], 2)[world.rank]
    grads = []
    for activation in (torch.relu, torch.relu_):
        mine = part.clone().requires_grad_()
        (activation(made(**options)(mine)) * weights(part)).sum().backward()
        grads.append(mine.grad)
    torch.testing.assert_close(*grads, rtol=0.0, atol=0.0)


def test_a_second_derivative_is_right_or_refused(world: rr.Communicator) -> None:
    """Over several ranks there is none: the first one with a graph is an error on all, and later passes work."""
    mine = batches(world, ROWS["equal"])[world.rank].requires_grad_()
    norm = made(track_running_stats=False)
    loss = norm(mine).pow(3).sum()
    if world.size == 1:
        assert torch.autograd.gradgradcheck(norm, mine.detach().requires_grad_())
    else:
        with pytest.raises(rr.ConfigError, match="second derivatives"):
            torch.autograd.grad(loss, mine, create_graph=True)
    check(world, made(), batches(world, ROWS["uneven"]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
def test_narrow_inputs_are_normalised_in_float32(world: rr.Communicator, dtype: Any, tolerance: float) -> None:
    """The result has the dtype of the input and the error of its rounding alone; statistics have that of float32."""
    norm = made()
    norm.float()
    parts = [part.to(dtype).double() for part in batches(world, ROWS["equal"], 5)]
    mine = parts[world.rank].to(dtype).requires_grad_()
    theirs, _, outputs, grads = reference(norm, parts)
    result = norm(mine)
    (result.double() * weights(parts[world.rank])).sum().backward()
    assert (result.dtype, mine.grad.dtype) == (dtype, dtype)
    torch.testing.assert_close(result.detach().double(), outputs[world.rank], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mine.grad.double(), grads[world.rank], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(norm.running_var.double(), theirs.running_var, rtol=1e-5, atol=1e-5)


def test_a_large_mean_costs_no_digits(world: rr.Communicator) -> None:
    """With values around 10 000 in float32 the variance is right to the digits that the inputs have."""
    norm = SyncBatchNorm(CHANNELS)
    parts = [part.float() for part in batches(world, ROWS["equal"], 64, offset=1e4)]
    theirs, _, outputs, _ = reference(norm, [part.double() for part in parts])
    result = norm(parts[world.rank])
    torch.testing.assert_close(norm.running_var.double(), theirs.running_var, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(result.double(), outputs[world.rank], rtol=1e-3, atol=2e-3)


def test_any_memory_format(world: rr.Communicator) -> None:
    """Inputs may be channels_last, or have any other strides; channels_last comes out as it came in."""
    parts = batches(world, ROWS["equal"], 4, 5)
    check(world, made(), parts, memory_format=torch.channels_last)
    mine = parts[world.rank].to(memory_format=torch.channels_last)
    assert made()(mine).is_contiguous(memory_format=torch.channels_last)
    transposed = [part.transpose(2, 3) for part in parts]
    check(world, made(), transposed)


@pytest.mark.sizes(2, 3, 4)  # of one, the set of all ranks but the last would be empty
def test_a_process_set_normalises_by_itself(world: rr.Communicator) -> None:
    """Members use the batches of the set; the other ranks do nothing."""
    members = hvd.add_process_set(range(world.size - 1))
    parts = batches(world, ROWS["uneven"], 2)[:-1]
    if members.included():
        norm = copy.deepcopy(made(process_set=members))
        theirs, _, outputs, _ = reference(norm, parts)
        torch.testing.assert_close(norm(parts[world.rank]).detach(), outputs[world.rank])
        torch.testing.assert_close(norm.running_var, theirs.running_var)
    hvd.remove_process_set(members)


def test_without_a_world_a_layer_normalises_its_own_batch(
    world: rr.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before `init` a layer is torch's, with the same error for one value per channel."""
    monkeypatch.setattr(hvd.sync_batch_norm, "is_initialized", lambda: False)
    norm = made()
    part = batches(world, ROWS["equal"], 2)[world.rank]
    theirs, _, (outputs,), _ = reference(norm, [part])
    torch.testing.assert_close(norm(part).detach(), outputs)
    torch.testing.assert_close(norm.running_var, theirs.running_var)
    with pytest.raises(rr.ConfigError, match="expected more than 1 value per channel"):
        norm(part[:1, :, 0])
    assert norm.num_batches_tracked == 1


def test_too_few_values_are_an_error_on_all_ranks(world: rr.Communicator) -> None:
    """One value per channel over all ranks has no variance: all ranks say so, and go on."""
    norm = made()
    rows = 1 if world.rank == 0 else 0
    with pytest.raises(rr.ConfigError, match="expected more than 1 value per channel"):
        norm(torch.ones(rows, CHANNELS, dtype=torch.float64))
    assert norm.num_batches_tracked == 0
    check(world, norm, batches(world, ROWS["uneven"]))


@pytest.mark.parametrize("shape", [(4,), (4, CHANNELS + 1), (4, CHANNELS + 1, 2, 2)])
def test_inputs_of_the_wrong_shape_are_refused(world: rr.Communicator, shape: tuple[int, ...]) -> None:
    """The error says what was expected and what came."""
    with pytest.raises(rr.ConfigError, match=str(CHANNELS)):
        made()(torch.ones(shape, dtype=torch.float64))


def test_a_model_is_converted_in_place(world: rr.Communicator) -> None:
    """Every batch normalisation is replaced; parameters and buffers stay, and what is shared stays shared."""
    shared = torch.nn.BatchNorm2d(CHANNELS, eps=0.01, momentum=None)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, CHANNELS, 1),
        shared,
        torch.nn.Sequential(torch.nn.BatchNorm2d(CHANNELS, affine=False), shared, torch.nn.SyncBatchNorm(CHANNELS)),
        torch.nn.BatchNorm3d(2, track_running_stats=False).eval(),
    )
    shared.weight.requires_grad_(False)
    before = model.state_dict(keep_vars=True)
    modes = [module.training for module in model.modules()]
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert [type(module) for module in model[2]] == [SyncBatchNorm] * 3
    assert model[1] is model[2][1]
    assert (model[1].eps, model[1].momentum, model[1].training) == (0.01, None, True)
    assert not model[1].weight.requires_grad
    after = model.state_dict(keep_vars=True)
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert [module.training for module in model.modules()] == modes
    model[:3](torch.randn(2, 1, 4, 4))


def test_a_layer_alone_is_converted(world: rr.Communicator) -> None:
    """What is no model but a batch normalisation gives the one that stands for it; ours stays as it is."""
    norm = torch.nn.BatchNorm1d(CHANNELS)
    converted = convert_sync_batchnorm(norm)
    assert isinstance(converted, SyncBatchNorm)
    assert converted.weight is norm.weight
    assert convert_sync_batchnorm(converted) is converted
    linear = torch.nn.Linear(2, 2)
    assert convert_sync_batchnorm(linear) is linear


def test_a_state_dict_fits_torch(world: rr.Communicator) -> None:
    """What one saves the other loads."""
    norm = made()
    theirs = torch.nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
    theirs.load_state_dict(norm.state_dict())
    norm.load_state_dict(theirs.state_dict())


def test_a_layer_can_be_copied_and_pickled(world: rr.Communicator) -> None:
    """A deep copy and a pickle have values of their own and work with the same ranks as the original."""
    norm = made()
    parts = batches(world, ROWS["uneven"])
    norm(parts[world.rank])
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    for other in (copy.deepcopy(norm), torch.load(file, weights_only=False)):
        assert other.process_set is hvd.global_process_set
        assert other.weight is not norm.weight
        check(world, other, parts)
    assert norm.num_batches_tracked == 1


def test_a_pickle_names_the_ranks_of_its_process_set(world: rr.Communicator) -> None:
    """What comes out of a pickle works once the set is registered again, and says so before."""
    norm = made(process_set=hvd.ProcessSet(range(world.size)))
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert other.process_set == norm.process_set
    with pytest.raises(rr.ConfigError, match="not registered"):
        other(batches(world, ROWS["equal"])[world.rank])
