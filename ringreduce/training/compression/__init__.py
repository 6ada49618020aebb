"""Compressions that reduce whole buckets of gradients, on flat NumPy views, and what they keep from step to step."""

from ringreduce.training.compression.powersgd import PowerSGD
from ringreduce.training.compression.reducers import (
    BucketCompression,
    Ranks,
    Reducer,
    State,
    WireFormat,
    has_reducers,
    is_wire,
    reduces,
    signature_of,
)
from ringreduce.training.compression.topk import TopK

__all__ = [
    "BucketCompression",
    "PowerSGD",
    "Ranks",
    "Reducer",
    "State",
    "TopK",
    "WireFormat",
    "has_reducers",
    "is_wire",
    "reduces",
    "signature_of",
]
