"""Check that all ranks speak of the same tensors, before the first of them is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import zip_longest

import numpy as np
import torch

from ringreduce.communicator import Communicator
from ringreduce.errors import MismatchError
from ringreduce.torch.objects import gather

__all__ = ["require_same_tensors"]


def require_same_tensors(
    communicator: Communicator,
    caller: str,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    devices: bool = False,
    options: Mapping[str, object] | None = None,
) -> None:
    """Return if the named tensors have equal names, shapes and dtypes, in equal order, on all ranks. Collective.

    Args:
        communicator: the ranks to compare.
        caller: what the error says it comes from.
        tensors: name and tensor; only the looks of the tensors are compared, not their values.
        devices: whether each must be on the CPU or on a GPU on all ranks alike.
        options: what else must be equal, by name; compared as it is printed.

    Raises:
        MismatchError: something differs. Raised on all ranks, with the first difference.
    """
    mine = [f"{name}={value}" for name, value in (options or {}).items()]
    for index, (name, tensor) in enumerate(tensors):
        device = f", on {tensor.device.type}" if devices else ""
        mine.append(f"tensor {index} is {name}, shape {tuple(tensor.shape)}, {str(tensor.dtype)[6:]}{device}")
    digest = np.frombuffer(hashlib.sha256("\n".join(mine).encode()).digest(), np.uint8)
    digests = communicator.allgather(digest[None])
    if (digests == digests[0]).all():
        return
    everyone = list(zip_longest(*gather(communicator, mine), fillvalue="a tensor is missing"))
    different = next(lines for lines in everyone if len(set(lines)) > 1)
    raise MismatchError({rank: f"{caller}: {line}" for rank, line in enumerate(different)})
