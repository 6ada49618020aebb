"""Batch normalisation over the batches of all ranks, on any device whose tensors collectives take."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch

from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM
from ringreduce.runtime import global_process_set, is_initialized
from ringreduce.runtime.process_sets import ProcessSet, require_process_set
from ringreduce.torch.private import BatchNorm, children_of
from ringreduce.torch.reductions import allreduce
from ringreduce.training.calls.moments import gather_moments, require_variance
from ringreduce.training.calls.requests import RequestBuilder


class SyncBatchNorm(BatchNorm):
    """Normalise each channel by its mean and variance over the batches of all ranks of a process set.

    While training, every forward pass and every backward pass is a collective: all ranks of the set call them, in the
    same order; a batch requires gradients on all of them or on none. There are no second derivatives. The batches may
    have different numbers of rows, and none at all; each element counts the same. Moments are taken in float32 (in
    float64 for float64 inputs) and merged by `ringreduce.training.calls.moments`. In evaluation, with running
    statistics, nothing is communicated. A process that has nobody to talk to does what `torch.nn.BatchNorm1d` to 3d do.

    Parameters, buffers and state dict are those of `torch.nn.BatchNorm1d` to 3d. Gradients of weight and bias are this
    rank's own, to be averaged like all others by `DistributedOptimizer`. A deep copy belongs to the same process set;
    one that comes out of a pickle to all ranks if the original did, else to a set of the same ranks, to be registered.

    Args:
        num_features: channels: the size of the second dimension.
        eps: is added to the variance.
        momentum: of the running statistics; None: they are averages over all batches so far.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics; if not, batches are used in evaluation too.
        process_set: the ranks that normalise together. Without a world, this process alone.

    Raises:
        ConfigError: ``process_set`` is none; an input has less than two dimensions or the wrong number of channels; or,
            while training, the batches of all ranks together hold one value per channel, on all ranks; or, in a
            backward pass between several ranks, a graph of it is asked for.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        require_process_set(process_set)
        self.process_set = process_set

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised batch, of the shape, dtype and memory format of ``input``: (rows, channels, ...)."""
        of_batch = self.training or self.running_mean is None
        ranks = self._ranks() if of_batch else None
        with nullcontext() if ranks is None else RequestBuilder("allgather", None, ranks):
            self._check_input_dim(input)
        if ranks is None:
            if of_batch:
                require_variance(_values(input))
            return super().forward(input)
        mean, variance, count = _moments(input.detach(), ranks)
        if self.training and self.running_mean is not None:
            self._track(mean, variance, count)
        scale = torch.rsqrt(variance + self.eps)
        return cast(
            torch.Tensor,
            _Normalize.apply(input, self.weight, self.bias, mean, scale, count, ranks),  # type: ignore[no-untyped-call]
        )

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """See the function of this name."""
        return convert_sync_batchnorm(module, process_set)

    def _ranks(self) -> ProcessSet | None:
        """Return the ranks to talk to, None if there are no others."""
        if not is_initialized():
            return None
        return self.process_set if self.process_set.size() > 1 else None

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ConfigError(
                f"expected a batch of shape (rows, {self.num_features} channels, ...), got {tuple(input.shape)}"
            )

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            if not count:
                return
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / (count - 1.0))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def convert_sync_batchnorm(module: torch.nn.Module, process_set: ProcessSet = global_process_set) -> torch.nn.Module:
    """Replace all batch normalisations in a model by `SyncBatchNorm`.

    Args:
        module: a model, changed in place, or a batch normalisation: torch's of any number of dimensions, or its
            ``SyncBatchNorm``. Parameters and buffers stay the same objects, so that an optimizer that has them goes on.
        process_set: the ranks that normalise together.

    Returns:
        The model; if it is a batch normalisation itself, its replacement.
    """
    made: dict[torch.nn.Module, torch.nn.Module] = {}
    for each in module.modules():
        is_ours = isinstance(each, SyncBatchNorm)
        made[each] = _like(each, process_set) if isinstance(each, BatchNorm) and not is_ours else each
    for each, converted in made.items():
        for name, child in children_of(each):
            if child is not None:
                setattr(converted, name, made[child])
    return made[module]


def _like(norm: BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
    if norm.num_features == 0:
        raise ConfigError("a lazy batch normalisation knows its channels only after its first batch; convert it then")
    made = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        momentum=norm.momentum,
        affine=norm.affine,
        track_running_stats=norm.track_running_stats,
        process_set=process_set,
    )
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(made, name, getattr(norm, name))
    made.train(norm.training)
    return made


def _moments(batch: torch.Tensor, ranks: ProcessSet) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return mean and (biased) variance of each channel over all ranks, and how many values each is of."""
    exact = _exact(batch)
    count = _values(batch)
    if count:
        variance, mean = torch.var_mean(exact, _but_channels(batch), correction=0)
    else:
        mean = exact.new_zeros(batch.shape[1])
        variance = torch.zeros_like(mean)
    mine = torch.stack([mean, variance]).double().cpu().numpy()
    *everyone, total = gather_moments(count, mine[0], variance=mine[1], process_set=ranks)
    mean, variance = torch.from_numpy(np.stack(everyone)).to(exact.device, exact.dtype)
    return mean, variance, total


def _values(batch: torch.Tensor) -> int:
    """Return how many values each channel has."""
    return batch[:, :1].numel()


def _but_channels(batch: torch.Tensor) -> list[int]:
    return [dim for dim in range(batch.dim()) if dim != 1]


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _along_channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Give one value per channel the dimensions and the dtype of a batch."""
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))


class _Normalize(torch.autograd.Function):
    """Normalise by moments that depend on the inputs of all ranks, as the backward pass takes into account.

    It keeps the batch and not the normalised one, as torch does: it takes no memory then that is not in use already,
    and what comes next may overwrite the output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        batch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        scale: torch.Tensor,
        count: float,
        ranks: ProcessSet,
    ) -> torch.Tensor:
        gain = scale if weight is None else scale * weight
        ctx.save_for_backward(batch, weight, mean, scale, gain)
        ctx.count = count
        ctx.ranks = ranks
        exact = _exact(batch)
        result = exact - _along_channels(mean, exact)
        if bias is None:
            result.mul_(_along_channels(gain, exact))
        else:
            result = torch.addcmul(_along_channels(bias, exact), result, _along_channels(gain, exact))
        return result.to(batch.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # by create_graph=True; what follows would give wrong numbers and no error
            raise ConfigError("SyncBatchNorm over several ranks has no second derivatives; leave out create_graph=True")
        batch, weight, mean, scale, gain = ctx.saved_tensors
        grad = _exact(grads[0])
        exact = _exact(batch)
        centred = exact - _along_channels(mean, exact)
        dims = _but_channels(grad)
        sum_grad = grad.sum(dims)
        sum_product = (grad * centred).sum(dims) * scale
        of_batch = None
        if ctx.needs_input_grad[0]:
            both = torch.stack([sum_grad, sum_product]) / max(ctx.count, 1.0)
            mean_grad, mean_product = allreduce(both, op=SUM, process_set=ctx.ranks)
            centred.mul_(_along_channels(scale * mean_product, grad)).add_(_along_channels(mean_grad, grad))
            of_batch = torch.sub(grad, centred, out=centred).mul_(_along_channels(gain, grad)).to(batch.dtype)
        of_weight = sum_product.to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = sum_grad if ctx.needs_input_grad[2] else None
        return of_batch, of_weight, of_bias, None, None, None, None
