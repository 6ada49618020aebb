"""Checkpoints: what a training needs to go on, in one file that rank 0 writes and reads."""

from __future__ import annotations

import io
import logging
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.files import open_file, replace_file
from ringreduce.common.sealed_files import KeyFile, disk_keys
from ringreduce.runtime import config, is_initialized, rank_and_size, record_refusal
from ringreduce.torch.elastic.generators import Generators
from ringreduce.torch.functions import allgather_object, broadcast_object
from ringreduce.torch.resumable import warn_of_lost_place
from ringreduce.training.data.epochs import EpochDivision
from ringreduce.training.data.resumable import ResumableLoader, is_loader

_log = logging.getLogger(__name__)

_FORMAT = "ringreduce checkpoint 1"
_PURPOSE = "a checkpoint"  # of a file that is sealed
#: What names the calls that one call is made of, where a rank waits for the others in vain.
_SAVING = "of save_checkpoint"
_LOADING = "of load_checkpoint"

T = TypeVar("T")


def save_checkpoint(path: str | os.PathLike[str], **parts: Any) -> None:
    """Write what a training needs to go on to a file, whole or not at all. Collective.

    The random numbers of every rank, of Python, NumPy and torch, are kept with it, and each rank's place in its data:
    what it has processed of an epoch that an `ElasticSampler` divides, and the state of loaders. Rank 0 writes; the
    others wait until the file is there. `load_checkpoint` reads it; so does ``torch.load``, unless
    RINGREDUCE_DISK_KEY_FILE is set, which seals it.

    Args:
        path: of the file, on rank 0; its folder is made if need be.
        **parts: models, optimizers, schedulers, samplers and whatever else has a ``state_dict``; and plain values that
            ``torch.load(weights_only=True)`` reads again: numbers, text, tensors, lists and dicts of these. Used on
            rank 0 alone, but for `ElasticSampler`s, optimizers that share state (``shard``), and loaders, which can be
            iterated and have a ``state_dict`` (`ResumableLoader`, torchdata's ``StatefulDataLoader``): all ranks pass
            these.

    Raises:
        ConfigError: on all ranks: the file cannot be written, or holds what could not be read again; or a rank lacks a
            sampler, or has one of another dataset.
    """
    complaint = f"the checkpoint {os.fspath(path)} cannot be written"
    samplers = {name: each for name, each in sorted(parts.items()) if isinstance(each, EpochDivision)}
    mine = {name: each.progress() for name, each in samplers.items()}
    loaders = {name: each for name, each in parts.items() if is_loader(each)}
    warn_of_lost_place(parts.values())
    everyone = _everyone((Generators().state_dict(), mine, _places(loaders)), _SAVING)
    generators, progress, places = zip(*everyone, strict=True)
    known = {**_of_rank_0(places, complaint), **_joined(samplers, progress, complaint)}
    with suppress(Exception):  # rank 0 raises it below, if it concerns the file
        for each in parts.values() if rank_and_size()[0] else ():
            if getattr(each, "needs_whole_commits", False):
                each.state_dict()  # for rank 0, where it is collective

    def write() -> None:
        others = {name: each for name, each in parts.items() if name not in known}
        states = {name: each.state_dict() if hasattr(each, "state_dict") else each for name, each in others.items()}
        states |= known
        content = {"format": _FORMAT, "parts": states, "generators": list(generators), "loaders": list(places)}
        buffer = io.BytesIO()
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="meta", weights_only=True)  # what cannot be read again is no checkpoint
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        keys = _keys()
        replace_file(target, lambda file: keys.write(file, _PURPOSE, lambda inner: inner.write(buffer.getbuffer())))

    _on_rank_0(write, complaint, _SAVING)


def _places(loaders: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the state of each loader; a text: why one has none."""
    try:
        return {name: each.state_dict() for name, each in loaders.items()}
    except Exception as error:  # of somebody's class; the other ranks must not wait
        return f"{type(error).__name__}: {error}"


def _of_rank_0(places: Sequence[dict[str, Any] | str], complaint: str) -> dict[str, Any]:
    """Return the states of rank 0's loaders; raise a ConfigError if some rank has none of one."""
    states = []
    for each in places:
        if isinstance(each, str):
            raise ConfigError(f"{complaint}: {each}")
        states.append(each)
    lacking = {name for each in states for name in each if any(name not in other for other in states)}
    if lacking:
        raise ConfigError(
            f"{complaint}: all ranks have to pass their loaders, and some lack {', '.join(sorted(lacking))}"
        )
    return states[0]


def load_checkpoint(path: str | os.PathLike[str], **parts: Any) -> dict[str, Any]:
    """Go on from a file that `save_checkpoint` has written. Collective.

    Rank 0 reads it, and the others get from rank 0 what it holds. Where there are as many ranks as there were, each
    gets its random numbers back; otherwise they go on as they are, and the log says so.

    Args:
        path: of the file, on rank 0.
        **parts: what has a ``load_state_dict``, by the names under which it was saved; the same names on all ranks.

    Returns:
        All other values that were saved, by name.

    Raises:
        ConfigError: on all ranks: the file is missing, no such checkpoint, or lacks a part.
    """

    def read() -> dict[str, Any]:
        with open_file(path) as file, _keys().opened(file, _PURPOSE) as opened:
            _require_plain_zip(opened)
            content = torch.load(opened, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ConfigError("save_checkpoint has not written it")
        missing = sorted(set(parts) - set(content["parts"]))
        if missing:
            raise ConfigError(f"it holds {', '.join(sorted(content['parts']))}, and not {', '.join(missing)}")
        return content

    complaint = f"the checkpoint {os.fspath(path)} cannot be read"
    me, ranks = rank_and_size()
    names = _everyone(sorted(parts), _LOADING)
    if any(each != names[0] for each in names):
        raise ConfigError(f"{complaint}: the ranks ask for different parts, {names}")
    content = _on_rank_0(read, complaint, _LOADING)
    values = dict(content["parts"])
    error = None
    try:
        places = content.get("loaders", [])
        for name, each in parts.items():
            state = values.pop(name)
            if places and name in places[0]:
                if len(places) != ranks and not isinstance(each, ResumableLoader):
                    raise ConfigError(
                        f"{name} was saved by {len(places)} ranks, each has a place of its own in its data, and there "
                        f"are {ranks}: start as many, or use ResumableLoader, with DistributedSampler"
                    )
                state = places[me if len(places) == ranks else 0][name]
            each.load_state_dict(state)
    except Exception as caught:  # of somebody's class; the others must not go on as if it had gone well
        error = caught
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    failed = None if error is None else f"{kind}{error}"
    if failures := [said for said in _everyone(failed, _LOADING) if said]:
        raise ConfigError(f"{complaint}: {failures[0]}") from error
    generators = content["generators"]
    if len(generators) == ranks:
        Generators().load_state_dict(generators[me])
    elif me == 0:
        _log.warning(
            "the checkpoint was saved by %d ranks, and there are %d: random numbers go on as they are",
            len(generators),
            ranks,
        )
    return values


def _require_plain_zip(file: BinaryIO) -> None:
    """Raise a ConfigError unless a file is of torch's format, and takes no more memory than its own size."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile:
        raise ConfigError("save_checkpoint has not written it") from None
    nbytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    if any(each.compress_type != zipfile.ZIP_STORED for each in members) or nbytes < sum(
        each.file_size for each in members
    ):
        raise ConfigError("it would unpack to more than its own size, which nothing does that save_checkpoint writes")


def _keys() -> KeyFile:
    settings = config() if is_initialized() else Config.from_environ()
    return disk_keys(settings.disk_key_file)


def _joined(
    samplers: Mapping[str, EpochDivision], everyone: Sequence[Mapping[str, tuple[int, bytes]]], complaint: str
) -> dict[str, Any]:
    """Return the states of samplers that know what all ranks have processed, and let these know it.

    Raises:
        ConfigError: a rank lacks a sampler, or has one of another dataset. On all ranks.
    """
    for number, progress in enumerate(everyone):
        for name in sorted({name for each in everyone for name in each} - set(progress)):
            raise ConfigError(
                f"{complaint}: rank {number} passes no sampler {name}, and what it has processed would be lost; "
                "pass it on all ranks"
            )
    states = {}
    for name, sampler in samplers.items():
        try:
            states[name] = sampler.together([progress[name] for progress in everyone])
        except ConfigError as error:
            raise ConfigError(f"{complaint}: {name}: {error}") from None
        if sampler.epoch == states[name]["epoch"]:
            sampler.learn(states[name]["processed_indices"])
    return states


def _on_rank_0(do: Callable[[], T], complaint: str, call: str) -> T:
    """Return on all ranks what a function returns on rank 0; raise on all what it raises. Collective."""
    result, error, (me, ranks) = None, None, rank_and_size()
    if me == 0:
        try:
            result = do()
        except Exception as caught:  # whatever a foreign file, a full disk or a strange object leads to
            error = caught
            if isinstance(caught, ForeignFileError):
                record_refusal(call.removeprefix("of "), caught)
    said = None if error is None else f"{complaint}: {str(error) or type(error).__name__}"
    if ranks > 1:
        said, result = broadcast_object((said, result), name=call)
    if said is not None:
        raise ConfigError(said) from error
    return result  # type: ignore[return-value]


def _everyone(mine: Any, call: str) -> list[Any]:
    """Return what all ranks pass. Collective."""
    return allgather_object(mine, name=call) if rank_and_size()[1] > 1 else [mine]
