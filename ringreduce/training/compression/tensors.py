"""What is sent in place of a tensor, in any framework: itself, or the same in fewer bits.

A `Compressor` is what Horovod has: it turns a tensor into another one, which is reduced, and back.
"""

from __future__ import annotations

from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.training.compression import WireFormat, wire_format
from ringreduce.training.compression.powersgd import PowerSGD
from ringreduce.training.compression.topk import TopK


class Compressor:
    """Base of all compressions, yours too: override both methods; they need no instance."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what travels, and what `decompress` has to know."""
        raise NotImplementedError  # subclasses know how

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its own form."""
        raise NotImplementedError  # subclasses know how


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
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


class Compressions:
    """The compressions that are the same in all frameworks; a binding adds ``fp16`` and ``bf16``.

    ``powersgd`` and ``topk`` are for gradients alone, and take settings: ``Compression.powersgd(rank=4)``.
    """

    none = NoneCompressor
    fp8 = Float8Compressor
    int8 = Int8Compressor
    int4 = Int4Compressor
    powersgd = PowerSGD
    topk = TopK


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


def wire_format_of(compression: Any) -> type[WireFormat] | None:
    """Return the wire format that a compression has or names, in any binding; None: arrays travel as they are.

    Raises:
        ConfigError: it has none.
    """
    wire = getattr(compression, "wire", compression)
    if wire is None or getattr(wire, "compress", None) is NoneCompressor.compress:
        return None
    return wire_format(wire)
