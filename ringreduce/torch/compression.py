"""What is sent in place of a tensor: itself, the same in fewer bits, or a smaller approximation.

A `Compressor` is what Horovod has: it turns a tensor into another one, which is reduced, and back. Those that reduce
whole buckets of gradients, and keep the error for the next step, are in `ringreduce.training.compression`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ringreduce.common.errors import ConfigError
from ringreduce.training.compression import BucketCompression, Reducer, WireFormat
from ringreduce.training.compression.powersgd import PowerSGD
from ringreduce.training.compression.topk import TopK

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
    "wire_of",
]


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


class WireCompressor(WireFormat, NoneCompressor):
    """Floats travel in a wire format between nodes, and are summed up in float32; all else travels as it is."""


class Float8Compressor(WireCompressor):
    """8-bit floats of 4 significant bits; see `ringreduce.buffers.codecs`."""

    wire = "fp8"


class Int8Compressor(WireCompressor):
    """8-bit integers, 256 of which share a scale; see `ringreduce.buffers.codecs`."""

    wire = "int8"


class Int4Compressor(WireCompressor):
    """4-bit integers, 64 of which share a scale; see `ringreduce.buffers.codecs`."""

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


def wire_of(compression: type[Compressor]) -> str | None:
    """Return the wire format of a compression that leaves tensors as they are.

    Raises:
        ConfigError: it is no compression, or one of buckets.
    """
    if not hasattr(compression, "compress"):
        raise ConfigError(
            f"compression={compression!r} is not for single tensors; give one of hvd.Compression but powersgd and topk"
        )
    return None if compression.compress is not WireCompressor.compress else getattr(compression, "wire", None)


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
