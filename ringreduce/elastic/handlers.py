"""A state of values and of objects with a state dict, each kept in the way of its kind.

See `ringreduce.elastic` for the states and the loop that they serve.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO

from ringreduce.audit.fingerprints import fingerprint
from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import launch
from ringreduce.elastic.commits import DiskCommits, LostCommitsError, SealedCommitsError, require_seen_by_all
from ringreduce.elastic.kinds import (
    LoaderStateHandler,
    OwnStateHandler,
    ResumableStateHandler,
    SamplerStateHandler,
    StateHandler,
)
from ringreduce.elastic.runs import ReplacedError
from ringreduce.elastic.state import HostsUpdatedInterrupt, ObjectState
from ringreduce.runtime import audited, collect_records, config, rank, record
from ringreduce.training.calls.objects import allgather_object, broadcast_object
from ringreduce.training.data.epochs import EpochDivision
from ringreduce.training.data.generators import Generators
from ringreduce.training.data.resumable import ResumableLoader, is_loader

__all__ = ["HandlingState", "LoaderStateHandler", "OwnStateHandler", "SamplerStateHandler", "StateHandler"]

_log = logging.getLogger(__name__)

_OF_RANK_0 = " of rank 0"  # Ends the name of its loader's state in a commit, for other numbers of ranks.


class HandlingState(ObjectState):
    """Attributes: a `StateHandler` keeps those that are objects with a state; the others are kept by value.

    When the program assigns another object to an attribute, the state keeps that one.

    Args:
        **kwargs: the attributes; None: skipped.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._handlers: dict[str, StateHandler] = {}
        self._whole_every = 1
        self._whole = 0  # The commit that was copied whole last.
        self._number_being_saved: int | None = None  # The commit that is being copied.
        self._whole_is_due = False
        # Handlers and values of the last commit, if it was not copied whole.
        self._small: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._places: dict[str, Any] = {}  # Places of rank 0's loaders in the commit that the job has begun with.
        self._stays_apart = False  # Until the next sync: all ranks have begun with objects of their own.
        self._own: dict[int, dict[str, Any]] = {}  # This rank's own objects, by the commits that others may go on from.
        super().__init__(broadcast_object, rank, **{name: value for name, value in kwargs.items() if value is not None})

    def keep_in_memory(self, every: int) -> None:
        """Copy the weights, and the state of optimizers, only in each ``every``-th commit.

        The commits between copy everything else, and rely on only the optimizers of the state changing weights, in
        their steps. After a failure, training goes on from the last commit if one of the survivors has not stepped
        since, as its weights are still those of the commit: the interrupted step is repeated. If all have, training
        goes back to the last whole copy. The first commit copies everything, and so does the first after an object was
        assigned.

        Args:
            every: copy everything in one of so many commits; commits to disk copy everything, too. Must agree on all
                ranks.

        Raises:
            ConfigError: it is not a positive whole number; there is no optimizer in the state, or one that does not
                report its steps; or a handler overrides `save` and not `copy_small`. Also raised where such an object
                is assigned later.
        """
        every = whole_number("every", every, 1)
        if every > 1:
            _require_steps_are_noted(self._handlers)
        self._whole_every = every

    def keep_on_disk(
        self, folder: str | os.PathLike[str], every: int = 1, keep: int = 3, replicas: int = 1
    ) -> int | None:
        """Write commits to a folder from now on, and load the last whole commit that is there. Collective.

        Rank 0 reads and writes what the ranks have in common, in the background; each rank reads and writes what is its
        own (`ringreduce.training.data.generators.Generators`), and all objects where replicas train by themselves
        (`DiLoCo`): if there are as many ranks again, each goes on from its own weights. If a commit is truncated or was
        changed, an error that names it is logged, and the commit before it is used. `ringreduce.elastic.CommitStore`
        says what is in the folder.

        Args:
            folder: the same on the ranks of a host; made if need be. With one replica, it is the same on all ranks, and
                those of all machines see it, if parts of their own count.
            every: one of so many commits is written. A commit is skipped while the one before is still being written.
            keep: number of commits that stay on disk; at least 2 with replicas.
            replicas: the disks of so many hosts hold each commit: hosts need no folder in common, and fewer than these
                may be lost. What the ranks have in common, the first ranks of so many hosts write; what is a rank's own
                goes to the next hosts in each commit that is written. A job that begins again takes each part from a
                host that has it. Values that differ between ranks are those of the rank whose copy is read, as after a
                death. Ranks that see the same files write one copy. Must agree on all ranks, as `every` does.

        Returns:
            The number of the commit with which training begins; None if there is none.

        Raises:
            ConfigError: on all ranks, if a rank cannot use the folder, what is there is another program's, an argument
                makes no sense, something in the state could not be read again, too many hosts with copies are lost, or
                a commit is sealed by another key than that of RINGREDUCE_DISK_KEY_FILE.
        """
        every = whole_number("every", every, 1)
        keep = whole_number("keep", keep, 1)
        replicas = whole_number("replicas", replicas, 1)
        hidden = [name for name, handler in self._handlers.items() if handler._saved is None]
        reason = f"the handlers of {', '.join(hidden)} keep their copies elsewhere than in _saved" if hidden else ""
        disk = DiskCommits(
            folder,
            every,
            keep=keep,
            write=self._write,
            read=self._read,
            replicas=replicas,
            key_file=config().disk_key_file,
        )
        disk.open(self._saved, has_own=bool(self._own_parts()), reason=reason)
        if disk.number is not None:
            disk.begin(self._begin_with)
            self._commits = disk.number
            self.sync()
            own = disk.own()
            if own is not None:
                self._take(own)
                self._stays_apart = True
            if loaders := _loaders(self._handlers):
                _place(loaders, {} if own is None else own["objects"], self._places)
        self._disk = disk
        return disk.number

    def _keep_as_launched(self) -> None:
        folder = launch().commits
        if folder is None or self._disk is not None:
            return
        replicas = launch().commit_replicas
        if replicas == 1:
            require_seen_by_all(folder)
        try:
            HandlingState.keep_on_disk(self, folder, replicas=replicas)
        except (LostCommitsError, ReplacedError, SealedCommitsError):
            raise
        except ConfigError as error:  # All ranks have it; the program trains on as one that does not grow.
            if rank() == 0:
                _log.error("the job cannot grow: %s", error)

    def _begin_with(self, content: dict[str, Any]) -> str:
        """Take the part of all ranks of a commit; return its fault, or an empty text."""
        names = {*self._names, *(name for name, handler in self._handlers.items() if not handler.own)}
        lacking = names - set(content["objects"]) - set(content["values"])
        if lacking:
            return f"lacks {', '.join(sorted(lacking))}; is it another program's?"
        objects = content["objects"]
        for name in _loaders(self._handlers):
            objects.pop(name, None)  # Older commits have rank 0's there, as if it were that of all.
            if name + _OF_RANK_0 in objects:
                self._places[name] = objects[name + _OF_RANK_0]
        try:
            self._take(content)
        except Exception as error:  # A framework may raise anything for another model's state.
            return f"does not fit: {error}"
        return ""

    def _keep_for_next_job(self, *, committed: bool = False) -> bool:
        if self._disk is None:
            return False
        if not committed:
            _share(self._handlers)
            self._commit_here(to_disk=True)
        return self._disk.is_whole(self._commits)

    def _take(self, content: dict[str, Any]) -> None:
        """Go on from a commit that was read."""
        for name, saved in content["objects"].items():
            if name in self._handlers:
                self._handlers[name]._saved = saved
                self._handlers[name].restore()
        for name, value in content["values"].items():
            if name in self._names:
                setattr(self, name, value)
        ObjectState.save(self)

    def _write(self, content: Any, file: BinaryIO) -> None:
        pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)

    def _read(self, file: BinaryIO) -> Any:
        return pickle.load(file)  # This program has written it; a binding that has a safer form overrides both.

    def _find_handler(self, value: Any) -> StateHandler | None:
        """Return a handler for an object; None: it is kept by value."""
        if isinstance(value, EpochDivision):
            return SamplerStateHandler(value)
        if isinstance(value, Generators):
            return OwnStateHandler(value)
        if isinstance(value, ResumableLoader):
            return ResumableStateHandler(value)
        if is_loader(value):
            return LoaderStateHandler(value)
        return StateHandler(value) if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else None

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.prepare_save()
        for handler in self._handlers.values():
            handler.save()
        super().save()
        # A rank that fails from here on goes on from this commit.
        if self._number_being_saved is not None:
            self._commits = self._number_being_saved
            self._number_being_saved = None
        self._whole = self._commits
        self._whole_is_due = False
        self._small = None
        self._own = {}
        for handler in self._handlers.values():
            handler.finish_save()

    def restore(self) -> None:
        if not self._own:
            self._own = self._copied_own()
        if self._small is not None and all(handler.is_unchanged() for handler in self._handlers.values()):
            handlers, values = self._small
            for name, handler in self._handlers.items():
                handler.restore_small(handlers[name])
            self._take_values(values)
            return
        for handler in self._handlers.values():
            handler.restore()
        super().restore()
        self._commits = self._whole
        self._small = None

    def _own_parts(self) -> dict[str, StateHandler]:
        """Return the objects that each rank writes itself: its own, and all if replicas train by themselves."""
        apart = any(handler.differs for handler in self._handlers.values())
        return {
            name: handler
            for name, handler in self._handlers.items()
            if handler.own or (apart and not isinstance(handler, SamplerStateHandler))
        }

    def _copied_own(self) -> dict[int, dict[str, Any]]:
        """Return this rank's own at its last commit, and now: as the next one has it, if another rank has made that."""
        own = {name: handler for name, handler in self._handlers.items() if handler.own}
        last = {name: handler._saved if self._small is None else self._small[0][name] for name, handler in own.items()}
        return {self._commits: last, self._commits + 1: {name: handler.copy_small() for name, handler in own.items()}}

    def sync(self) -> None:
        if rank() != 0:
            self._small = None  # Nobody counts the changes that arrive.
        # Nothing is saved, and no number of commits taken over, before all is there: rank 0 may die in the midst.
        apart = self._own_parts() if self._stays_apart else {}
        for name, handler in self._handlers.items():
            if name not in apart:
                handler.sync()
        self._stays_apart = False
        self._sync_values()
        for name, copied in self._own.get(self._commits, {}).items():
            self._handlers[name].restore_small(copied)
        HandlingState.save(self)

    def commit(self) -> None:
        stops = self._is_to_stop()
        _share(self._handlers)
        self._commit_here(to_disk=stops)
        if stops:
            self._stop(committed=True)
        self._check_hosts()

    def _commit_here(self, *, to_disk: bool = False) -> None:
        """Make a commit that the ranks have agreed on; ``to_disk``: write it, whether or not that is due."""
        number = self._commits + 1
        disk = self._disk
        if disk is not None and not (to_disk or disk.is_due(number)):
            disk = None
        if number % self._whole_every == 0 or self._whole_is_due or disk is not None:
            self._number_being_saved = number
            try:
                self.save()
            finally:
                self._number_being_saved = None
        else:
            self._small = None  # Invalid once the first handler has noted something new.
            handlers = {name: handler.copy_small() for name, handler in self._handlers.items()}
            self._small = (handlers, self._copied_values())
            self._own = {}
            self._commits = number
        if audited() and self._small is None:
            _audit(self._commits, self._handlers)
        if number % self._whole_every == 0 or disk is not None:  # This is so on all ranks.
            collect_records(allgather_object)
        if disk is not None:
            objects = {name: handler for name, handler in self._handlers.items() if handler._saved is not None}
            common = {name: handler for name, handler in objects.items() if not handler.own}
            common |= {name + _OF_RANK_0: handler for name, handler in _loaders(self._handlers).items()}
            own = {name: handler.for_disk() for name, handler in self._own_parts().items() if name in objects}
            disk.put_all(
                number,
                lambda: {name: handler.for_disk() for name, handler in common.items()},
                own,
                values=self._saved,
                forced=to_disk,
            )

    def _check_hosts(self) -> None:
        try:
            super()._check_hosts()
        except HostsUpdatedInterrupt:
            # Now, while ranks that will go can still say what they have processed, and because a sync may be skipped.
            for handler in self._handlers.values():
                if isinstance(handler, SamplerStateHandler):
                    handler.sync()
                elif isinstance(handler, LoaderStateHandler):
                    handler.leave()
            raise

    def reset(self) -> None:
        """Let all handlers prepare for the new ranks: divide the rest of the epoch, rejoin."""
        self._stays_apart = False
        for handler in self._handlers.values():
            handler.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        handled = None if name.startswith("_") else self._handlers.get(name)
        if name.startswith("_") or (handled is not None and handled.value is value):
            return
        handler = self._find_handler(value)
        if handler is not None and self._whole_every > 1:
            _require_steps_are_noted({**self._handlers, name: handler})
        if handler is not None:
            self._whole_is_due = True
            self._small = None
            self._handlers[name] = handler
            handler.save()
            if name in self._names:
                self._names.remove(name)
        elif self._handlers.pop(name, None) is not None:
            self._whole_is_due = True
            self._small = None
            self._names.append(name)


def _loaders(handlers: Mapping[str, StateHandler]) -> dict[str, LoaderStateHandler]:
    return {name: handler for name, handler in handlers.items() if isinstance(handler, LoaderStateHandler)}


def _place(loaders: Mapping[str, LoaderStateHandler], own: Mapping[str, Any], places: Mapping[str, Any]) -> None:
    """Let loaders go on of which not all ranks have found their own parts in the commit. Collective.

    Args:
        loaders: by name.
        own: the objects of this rank's part.
        places: of rank 0's loaders, which rank 0 has read.
    """
    kept_by_rank = allgather_object([*own])
    places = broadcast_object(places)
    for name, loader in loaders.items():
        if all(name in names for names in kept_by_rank):
            continue
        if name in places:
            loader.begin_elsewhere(places[name])
        elif rank() == 0:
            _log.warning("the commit keeps no place of %s in its data, which begins an epoch", name)


def _share(handlers: Mapping[str, StateHandler]) -> None:
    """Give all ranks the samples that each has processed. Collective."""
    for handler in handlers.values():
        if isinstance(handler, SamplerStateHandler):
            handler.share()


def _copies_by_itself(kind: type[StateHandler]) -> bool:
    """Return whether a kind of handler overrides `save`, and not `copy_small`."""
    changed = kind.save is not StateHandler.save or kind.restore is not StateHandler.restore
    return changed and kind.copy_small is StateHandler.copy_small


def _require_steps_are_noted(handlers: Mapping[str, StateHandler]) -> None:
    opaque = [name for name, handler in handlers.items() if _copies_by_itself(type(handler))]
    if opaque:
        raise ConfigError(f"the handlers of {', '.join(opaque)} have a save() of their own, but no copy_small()")
    silent = [name for name, handler in handlers.items() if handler.notes_steps is False]
    if silent or all(handler.notes_steps is None for handler in handlers.values()):
        who = (
            f"{', '.join(silent)} does not tell when weights change" if silent else "there is no optimizer in the state"
        )
        raise ConfigError(f"{who}; weights have to be copied in each commit, which is keep_in_memory(every=1)")


def _audit(number: int, handlers: Mapping[str, StateHandler]) -> None:
    """Record a commit."""
    hashes = {}
    for name, handler in handlers.items():
        # The indices that a sampler holds are many, and say nothing about the model.
        if handler._saved is None or handler.own or isinstance(handler, SamplerStateHandler):
            continue
        try:
            hashes[name] = fingerprint(handler._saved)
        except ConfigError as error:
            hashes[name] = str(error)
    record("commit", {"number": number, "sha256": hashes})
