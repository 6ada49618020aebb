"""What is sent in place of a tensor; see `ringreduce.training.compression.tensors`."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from ringreduce.training.compression.tensors import Compressions, Compressor, NoneCompressor, WireCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _HalfCompressor(WireCompressor):
    """Floating-point tensors travel in a 16-bit type; all others as they are."""

    dtype: ClassVar[tf.DType]
    error_feedback = False

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        tensor = tf.convert_to_tensor(tensor)
        return (tf.cast(tensor, cls.dtype) if tensor.dtype.is_floating else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tf.cast(tensor, ctx)


class FP16Compressor(_HalfCompressor):
    """Floating-point tensors travel as float16: 11 significant bits, nothing above 65504."""

    dtype = tf.float16
    wire = "fp16"


class BF16Compressor(_HalfCompressor):
    """Floating-point tensors travel as bfloat16: 8 significant bits, the range of float32."""

    dtype = tf.bfloat16
    wire = "bf16"


class Compression(Compressions):
    """The compressions to choose from; see `ringreduce.training.compression.tensors.Compressions`."""

    fp16 = FP16Compressor
    bf16 = BF16Compressor
