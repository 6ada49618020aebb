"""What is sent in place of a tensor: itself, the same in fewer bits, or a smaller approximation.

Compressors are as in `ringreduce.training.compression.tensors`. Those that reduce whole buckets of gradients, and keep
the error for the next step, are in `ringreduce.training.compression`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from ringreduce.training.compression import BucketCompression as BucketCompression
from ringreduce.training.compression import Reducer as Reducer
from ringreduce.training.compression.tensors import Compressions
from ringreduce.training.compression.tensors import Compressor as Compressor
from ringreduce.training.compression.tensors import Float8Compressor as Float8Compressor
from ringreduce.training.compression.tensors import Int4Compressor as Int4Compressor
from ringreduce.training.compression.tensors import Int8Compressor as Int8Compressor
from ringreduce.training.compression.tensors import NoneCompressor as NoneCompressor
from ringreduce.training.compression.tensors import WireCompressor as WireCompressor
from ringreduce.training.compression.tensors import wire_of as wire_of


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


class Compression(Compressions):
    """The compressions to choose from; see `ringreduce.training.compression.tensors.Compressions`."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor


def each_array(convert: Callable[[Any], Any], buckets: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Convert what compression keeps, by bucket and name."""
    return {number: {name: convert(each) for name, each in kept.items()} for number, kept in buckets.items()}
