"""Batch normalisation over the batches of all ranks, on any device whose tensors collectives take."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ringreduce.errors import ConfigError
from ringreduce.process_sets import ProcessSet
from ringreduce.reduce_ops import SUM
from ringreduce.runtime import global_process_set, is_initialized
from ringreduce.torch.ops import allgather, allreduce

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


class SyncBatchNorm(_BatchNorm):
    """Normalise each channel by its mean and variance over the batches of all ranks of a process set.

    While training, every forward pass and every backward pass is a collective: all ranks of the set call them, in the
    same order. The batches may have different numbers of rows, and none at all; each element counts the same. Moments
    are taken in float32 (in float64 for float64 inputs) and put together as in T. F. Chan, G. H. Golub, R. J. LeVeque,
    "Algorithms for computing the sample variance", The American Statistician 37 (1983), which keeps the digits that
    ``E[x^2] - E[x]^2`` loses. In evaluation, with running statistics, nothing is communicated.

    Parameters, buffers and state dict are those of `torch.nn.BatchNorm1d` to 3d. Gradients of weight and bias are this
    rank's own, to be averaged like all others by `DistributedOptimizer`.

    Args:
        num_features: channels: the size of the second dimension.
        eps: is added to the variance.
        momentum: of the running statistics; None: they are averages over all batches so far.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics; if not, batches are used in evaluation too.
        process_set: the ranks that normalise together. Without a world, this process alone.

    Raises:
        ConfigError: an input has less than two dimensions or the wrong number of channels; or, while training, the
            batches of all ranks hold less than two values per channel together, on all ranks.
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
        self.process_set = process_set

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised batch, of the shape, dtype and memory format of ``input``: (rows, channels, ...)."""
        self._check_input_dim(input)
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        mean, variance, count = _moments(input.detach(), self._ranks())
        if self.training and self.running_mean is not None:
            self._track(mean, variance, count)
        scale = torch.rsqrt(variance + self.eps)
        return cast(
            torch.Tensor,
            _Normalize.apply(input, self.weight, self.bias, mean, scale, count, self._ranks()),  # type: ignore[no-untyped-call]
        )

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """See the function of this name."""
        return _converted(module, process_set, {})

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
        The model; if it is a batch normalisation itself, what stands for it.
    """
    return _converted(module, process_set, {})


def _converted(
    module: torch.nn.Module, process_set: ProcessSet, known: dict[torch.nn.Module, torch.nn.Module]
) -> torch.nn.Module:
    """Convert a module once, however often it occurs."""
    if module in known:
        return known[module]
    known[module] = made = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        known[module] = made = _like(module, process_set)
    for name, child in list(module.named_children()):
        setattr(made, name, _converted(child, process_set, known))
    return made


def _like(norm: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
    if norm.num_features == 0:
        raise ConfigError("a lazy batch normalisation knows its channels only after its first batch; convert it then")
    made = SyncBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, process_set=process_set
    )
    made.weight, made.bias = norm.weight, norm.bias
    made.running_mean, made.running_var = norm.running_mean, norm.running_var
    made.num_batches_tracked = norm.num_batches_tracked
    made.train(norm.training)
    return made


def _moments(batch: torch.Tensor, ranks: ProcessSet | None) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return mean and (biased) variance of each channel over all ranks, and how many values each is of."""
    exact = _exact(batch)
    dims = [dim for dim in range(batch.dim()) if dim != 1]
    count = batch.numel() // batch.shape[1]
    if count:
        variance, mean = torch.var_mean(exact, dims, correction=0)
    else:
        mean = exact.new_zeros(batch.shape[1])
        variance = torch.zeros_like(mean)
    if ranks is None:
        total = float(count)
    else:
        mine = torch.cat([exact.new_tensor([float(count)]).to(torch.float64), mean.double(), variance.double()])
        everyone = allgather(mine.unsqueeze(0), process_set=ranks)
        counts, means, variances = torch.tensor_split(everyone, [1, 1 + batch.shape[1]], dim=1)
        total = float(counts.sum())
        if total > 1:
            weights = counts / total
            together = (weights * means).sum(0)
            variance = (weights * (variances + (means - together).square())).sum(0).to(exact.dtype)
            mean = together.to(exact.dtype)
    if total < 2:
        raise ConfigError(f"to train, more than one value per channel is needed; all batches together have {total:g}")
    return mean, variance, total


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _spread(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Give one value per channel the dimensions of a batch."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


class _Normalize(torch.autograd.Function):
    """Normalise by moments that depend on the inputs of all ranks, as the backward pass takes into account."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        scale: torch.Tensor,
        count: float,
        ranks: ProcessSet | None,
    ) -> torch.Tensor:
        normal = (_exact(batch) - _spread(mean, batch)) * _spread(scale, batch)
        ctx.save_for_backward(normal, weight, scale)
        ctx.count, ctx.ranks, ctx.dtype = count, ranks, batch.dtype
        result = normal
        if weight is not None:
            result = result * _spread(weight, batch)
        if bias is not None:
            result = result + _spread(bias, batch)
        return result.to(batch.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = map(_exact, grads)
        normal, weight, scale = ctx.saved_tensors
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        sum_grad, sum_product = grad.sum(dims), (grad * normal).sum(dims)
        of_batch = None
        if ctx.needs_input_grad[0]:
            both = torch.stack([sum_grad, sum_product]) / ctx.count
            if ctx.ranks is not None:
                both = allreduce(both, op=SUM, process_set=ctx.ranks)
            mean_grad, mean_product = both
            of_batch = grad - _spread(mean_grad, grad) - normal * _spread(mean_product, grad)
            of_batch = of_batch * _spread(scale if weight is None else scale * weight, grad)
            of_batch = of_batch.to(ctx.dtype)
        of_weight = sum_product.to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = sum_grad.to(grads[0].dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        return of_batch, of_weight, of_bias, None, None, None, None
