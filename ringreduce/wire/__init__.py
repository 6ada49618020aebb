"""What float32 values look like between two hosts: fewer bits each, and how much is lost by that."""

from ringreduce.wire.codecs import CODECS, Codec, relative_error

__all__ = ["CODECS", "Codec", "relative_error"]
