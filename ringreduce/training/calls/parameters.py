"""Checks and broadcasts of what must agree before ranks train: parameters, their values, hyper-parameters.

Ranks that step with equal gradients still end with different weights if they began with different ones, or if their
learning rates differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.pickles import gather
from ringreduce.common.errors import ConfigError, MismatchError
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.framework import Arrays, Named
from ringreduce.training.binding.identity import ScopedName, agree
from ringreduce.training.calls.requests import RequestBuilder, dtype_name


def require_same_arrays(
    arrays: Arrays,
    communicator: Communicator,
    caller: str,
    named: Named,
    *,
    devices: bool = False,
    options: Mapping[str, object] | None = None,
) -> None:
    """Check that the named arrays have equal names, shapes and dtypes, in equal order, on all ranks. Collective.

    Names that are `ScopedName`s agree, too, if some ranks lack outer scopes.

    Args:
        arrays: the framework's.
        communicator: the ranks to compare.
        caller: what the error says it comes from.
        named: name and array; their values are not compared.
        devices: whether each must be on the CPU or on a GPU on all ranks alike.
        options: what else must be equal, by name; compared as it is printed.

    Raises:
        MismatchError: something differs. Raised on all ranks, with the first difference.
    """
    mine = [_Line(f"{name}={value}") for name, value in (options or {}).items()]
    for index, (name, array) in enumerate(named):
        place = f", on {arrays.place(array)}" if devices else ""
        rest = f", shape {tuple(array.shape)}, {dtype_name(array.dtype)}{place}"
        mine.append(_Line(f"tensor {index} is ", str(name), end=rest, scoped=isinstance(name, ScopedName)))
    digest = np.frombuffer(hashlib.sha256(repr(list(map(tuple, mine))).encode()).digest(), np.uint8)
    digests = communicator.allgather(digest[None])
    if (digests == digests[0]).all():
        return
    for lines in zip_longest(*gather(communicator, mine), fillvalue=_Line("a tensor is missing")):
        others = {(each.begin, each.end, each.scoped) for each in lines}
        if len(others) > 1 or not agree([each.name for each in lines], lines[0].scoped):
            said = {rank: f"{caller}: {''.join(each[:3])}" for rank, each in enumerate(lines)}
            raise MismatchError(said)


class _Line(NamedTuple):
    """What must agree between ranks, in words.

    Attributes:
        begin, end: the words before a name and after it.
        name: of an array.
        scoped: whether the name may lack scopes on some ranks.
    """

    begin: str
    name: str = ""
    end: str = ""
    scoped: bool = False


def broadcast_parameters(arrays: Arrays, params: Any, root_rank: int, process_set: ProcessSet) -> None:
    """Overwrite arrays with the root's. Collective.

    Args:
        arrays: the framework's.
        params: an array, or arrays, or (name, array) pairs, or a dict of arrays by name; the same names, shapes and
            dtypes on all ranks, in the same order. Entries that are None are skipped.
        root_rank: whose values count, as a rank of the world; must agree.
        process_set: the ranks that take part. Nothing is done on the others, so that a script may call this on all.

    Raises:
        ConfigError: something in ``params`` is neither an array nor a pair, or the names cannot be ordered.
        MismatchError: the arrays differ between ranks in more than their values; nothing was overwritten then.
    """

    def run(communicator: Communicator) -> None:
        require_same_arrays(arrays, communicator, caller="broadcast_parameters", named=named)
        for _, array in named:
            communicator.broadcast(array, root, out=array)

    with RequestBuilder("broadcast_parameters", None, process_set=process_set, arrays=arrays) as prepare:
        named = _named(arrays, params)
        root = process_set.rank_of(root_rank)
        if not process_set.included():
            return
        values = [array for _, array in named]
        prepare.require_usable([], values)
        request = prepare.call(f"broadcast_parameters(root {root})", run, values)
    request.carry_out()
    for value in values:
        arrays.changed(value)


def _named(arrays: Arrays, params: Any) -> Named:
    if arrays.is_array(params) or not isinstance(params, Iterable):
        params = [params]
    named = []
    for index, entry in enumerate(_in_order(params) if isinstance(params, Mapping) else params):
        if isinstance(entry, tuple) and len(entry) != 2:
            raise ConfigError(
                f"broadcast_parameters takes tensors or (name, tensor) pairs, but number {index} is a tuple of "
                f"length {len(entry)}"
            )
        name, array = entry if isinstance(entry, tuple) else (str(index), entry)
        if array is None:
            continue
        if not arrays.is_array(array):
            raise ConfigError(
                f"broadcast_parameters takes tensors, but {name!r} is of type {type(array).__name__}; "
                "use broadcast_object for other things and broadcast_optimizer_state for optimizers"
            )
        named.append((name, arrays.without_graph(array)))
    return named


def _in_order(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the entries sorted by name: ranks may have entered them in different orders."""
    try:
        return sorted(params.items(), key=lambda entry: entry[0])
    except TypeError as error:
        kinds = ", ".join(sorted({type(name).__name__ for name in params}))
        raise ConfigError(f"the names of parameters must be str, got names of the types {kinds}") from error


def hyperparameters(optimizer: Any) -> dict[str, str]:
    """Return an optimizer's class and the hyper-parameters of its groups, as text, by name.

    Only numbers, booleans, strings, tuples of these and arrays of one element: other objects print differently on each
    rank.

    Args:
        optimizer: has ``param_groups``, dicts, and ``defaults``, whose keys are the names of the hyper-parameters.
    """
    said = {"the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        values = {f"{name} of group {number}": group.get(name) for name in getattr(optimizer, "defaults", ())}
        said |= in_words(values)
    return said


def in_words(values: Mapping[str, Any]) -> dict[str, str]:
    """Return hyper-parameters as text, by name; those that `hyperparameters` leaves out are left out."""
    return {name: words for name, value in values.items() if (words := _words_of(value)) is not None}


def _words_of(value: Any) -> str | None:
    with suppress(Exception):  # an array of several elements: frameworks raise different errors
        if hasattr(value, "numpy") and not hasattr(value, "item"):
            value = value.numpy()
        if hasattr(value, "item"):
            single = str(value.dtype).endswith("float32")
            value = value.item()
            if single:  # 0.1, and not its digits in float64
                return str(np.float32(value))
    if isinstance(value, (tuple, list)):
        parts = [_words_of(each) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return str(value) if value is None or isinstance(value, (bool, int, float, complex, str)) else None
