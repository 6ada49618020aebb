"""What travels in place of a tensor: nothing else, the same in fewer bits, or something smaller that stands for it.

A `Compressor` is what Horovod has: it turns a tensor into another one, which is reduced, and back. A `Reducer` does all
of it, for a bucket of gradients, in the way that suits it, and keeps what was lost to add it in the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from ringreduce.communicator import Communicator
from ringreduce.paths import Feedback
from ringreduce.reduce_ops import AVERAGE, SUM
from ringreduce.torch.lowrank import PowerSGD
from ringreduce.torch.topk import TopK

__all__ = [
    "BF16Compressor",
    "BucketCompression",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "Float8Compressor",
    "Int4Compressor",
    "Int8Compressor",
    "NoneCompressor",
    "Reducer",
    "WireCompressor",
]


class Reducer(Protocol):
    """Reduces one bucket of gradients, step after step."""

    @property
    def error(self) -> float:
        """The relative error that compressing made on this rank in the last call, in the Euclidean norm; 0.0 before."""
        ...

    def reduce(self, communicator: Communicator, flat: torch.Tensor, average: bool) -> None:
        """Replace a bucket by its approximate sum or average over the ranks, of the same bits on all. Collective."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what has to survive a restart, as copies."""
        ...

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what `state_dict` has returned."""
        ...


@runtime_checkable
class BucketCompression(Protocol):
    """What a `DistributedOptimizer` takes as its ``compression`` besides `Compressor` classes."""

    def reducer(self, shapes: Sequence[torch.Size], places: Sequence[slice]) -> Reducer:
        """Return what reduces the float32 bucket in which gradients of these shapes lie at these places."""
        ...


class Compressor:
    """Base of all compressions, yours too: override both methods; they need no instance."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what travels, and what `decompress` has to know."""
        raise NotImplementedError  # subclasses know how

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its own form."""
        raise NotImplementedError  # subclasses know how


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class WireCompressor(NoneCompressor):
    """Floats travel in a wire format between nodes, and are summed up in float32; all else travels as it is.

    Attributes:
        wire: a name in `ringreduce.wire.CODECS`.
        error_feedback: whether an optimizer adds what rounding lost in the next step.
    """

    wire: ClassVar[str]
    error_feedback: ClassVar[bool] = True

    @classmethod
    def reducer(cls, shapes: Sequence[torch.Size], places: Sequence[slice]) -> Reducer:
        return _WireReducer(cls.wire, Feedback(keep=cls.error_feedback))


class Float8Compressor(WireCompressor):
    """8-bit floats of 4 significant bits; see `ringreduce.wire`."""

    wire = "fp8"


class Int8Compressor(WireCompressor):
    """8-bit integers, 256 of which share a scale; see `ringreduce.wire`."""

    wire = "int8"


class Int4Compressor(WireCompressor):
    """4-bit integers, 64 of which share a scale; see `ringreduce.wire`."""

    wire = "int4"


class _HalfCompressor(WireCompressor):
    """Floating-point tensors travel in a 16-bit type; all others as they are."""

    dtype: ClassVar[torch.dtype]
    error_feedback = False

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(_HalfCompressor):
    """Floating-point tensors travel as float16: 11 significant bits, nothing above 65504."""

    dtype = torch.float16
    wire = "fp16"


class BF16Compressor(_HalfCompressor):
    """Floating-point tensors travel as bfloat16: 8 significant bits, the range of float32."""

    dtype = torch.bfloat16
    wire = "bf16"


class Compression:
    """The compressions to choose from.

    ``powersgd`` and ``topk`` are for optimizers alone, and take settings: ``Compression.powersgd(rank=4)``.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    fp8 = Float8Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor
    powersgd = PowerSGD
    topk = TopK


class _WireReducer:
    """Reduces a bucket in a wire format."""

    def __init__(self, wire: str, feedback: Feedback) -> None:
        self._wire = wire
        self._feedback = feedback

    @property
    def error(self) -> float:
        return self._feedback.error

    def reduce(self, communicator: Communicator, flat: torch.Tensor, average: bool) -> None:
        op = AVERAGE if average else SUM
        communicator.allreduce(flat, op, out=flat, wire=self._wire, feedback=self._feedback)

    def state_dict(self) -> dict[str, torch.Tensor]:
        kept = {"sent": self._feedback.sent, "summed": self._feedback.summed} if self._feedback.keep else {}
        return {name: torch.from_numpy(array.copy()) for name, array in kept.items() if array is not None}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._feedback.sent = state["sent"].numpy().copy() if "sent" in state else None
        self._feedback.summed = state["summed"].numpy().copy() if "summed" in state else None
