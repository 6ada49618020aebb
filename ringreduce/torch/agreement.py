"""Check that all ranks speak of the same tensors, before the first of them is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import zip_longest

import numpy as np
import torch

from ringreduce.communicator import Communicator
from ringreduce.errors import MismatchError
from ringreduce.torch.objects import gather

__all__ = ["require_same_tensors"]


def require_same_tensors(
    communicator: Communicator, caller: str, tensors: Iterable[tuple[str, torch.Tensor]], *, devices: bool = False
) -> None:
    """Return if the named tensors have equal names, shapes and dtypes, in equal order, on all ranks. Collective.

    Args:
        communicator: the ranks to compare.
        caller: what the error says it comes from.
        tensors: name and tensor; only the looks of the tensors are compared, not their values.
        devices: whether each must be on the CPU or on a GPU on all ranks alike.

    Raises:
        MismatchError: they differ. Raised on all ranks, with the first difference.
    """
    mine = [
        f"{name}, shape {tuple(tensor.shape)}, {str(tensor.dtype)[6:]}{f', on {tensor.device.type}' if devices else ''}"
        for name, tensor in tensors
    ]
    digest = np.frombuffer(hashlib.sha256("\n".join(mine).encode()).digest(), np.uint8)
    digests = communicator.allgather(digest[None])
    if (digests == digests[0]).all():
        return
    everyone = list(zip_longest(*gather(communicator, mine), fillvalue="missing"))
    index = next(index for index, looks in enumerate(everyone) if len(set(looks)) > 1)
    raise MismatchError({rank: f"{caller}: tensor {index} is {look}" for rank, look in enumerate(everyone[index])})
