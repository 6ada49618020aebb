"""The audit record of a run: a file with a line of JSON for each thing that happens, in a chain of hashes.

Each line has the entries of `ringreduce.audit.chain`, and event, world (a token that all lines of one world
have), time (ISO 8601, UTC), ranks (a list), host, pid, facts. Events:

    begin     of a world; facts: command (a list), versions, settings, size, hosts (host -> ranks), restart (how often
              the launcher has started the job before), allocation (the scheduler's), and what
              `ringreduce.audit.origins` finds: script, repository, packages
    commit    of an elastic training, one that copies the weights; facts: number, and sha256 of models, optimizers and
              the like, by name, or why there is none
    written   of a commit, to disk; facts: number, file, sha256
    values    that the program reports; facts: by name, the mean of the last ones of those ranks that are in ``ranks``,
              or text where JSON has no number for it. With each commit of an elastic training that the ranks make
              together, and before the end: of rank 0, and of others as far as they are gathered there
    exported  a model, by ``ringreduce export``; facts: file, sha256, name, commit, folder
    refused   facts: what (init, message, or the call or command), and the error
    any       what the program says itself (`ringreduce.audit`)
    failed    of another rank than 0; facts: error
    end       of a world, by rank 0; facts: error, null if it was shut down, or its only process has ended with an exit
              code

Rank 0 appends its lines at once. Other ranks keep theirs until the next commit, in which rank 0 gets and appends them;
what they have left at their end, those of rank 0's host append themselves. Of what several ranks say, there is one
line, of the first of them that says it. Ranks exchange lines in no other call.

A world without an end was cut off: by SIGKILL, or with its machine. After the death of rank 0 the new one appends to
the same path, on its machine; so does a job that is started again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import secrets
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any

from ringreduce.audit.chain import ChainedFile
from ringreduce.common.config import VERSION, Config
from ringreduce.common.errors import ChangedMessageError, ConfigError, RingReduceError
from ringreduce.common.instruments import mean_values
from ringreduce.common.keys import KEY_VARIABLE, read_secret
from ringreduce.common.launch import allocation, launch
from ringreduce.common.libraries import loaded_versions
from ringreduce.transport.messages import Messages, StepFailedError, exchange_json, together
from ringreduce.transport.waiting import Waiter

_log = logging.getLogger(__name__)

_TO_RECORD_S = 3.0  # that rank 0 has to write down why a world does not begin, before other ranks end the job
_MOST_KEPT = 1000  # lines of a rank, until the next commit
#: Events that programs do not name.
_OWN = {"", "begin", "commit", "written", "values", "exported", "refused", "failed", "end"}


class AuditRecord:
    """The lines of one world that a rank has to say.

    Args:
        path: the file; made if need be, for this user alone. A link is refused, and so is what is no file.
        world: the token of the world.
        rank: of this process.
        with_rank_0: whether it runs on rank 0's host.
    """

    def __init__(self, path: str, world: str, rank: int = 0, *, with_rank_0: bool = True) -> None:
        self._file = ChainedFile(path, alone=rank == 0)
        self._world = world
        self._rank = rank
        self._with_rank_0 = with_rank_0
        self._kept: deque[dict[str, Any]] = deque(maxlen=_MOST_KEPT)
        self._refused = ""  # what was last
        self._running = True

    @classmethod
    def of_world(cls, config: Config, messages: Messages, library: str) -> AuditRecord | None:
        """Begin the record that the settings ask for; None: they ask for none. Collective.

        Args:
            config: the settings in force.
            messages: between all ranks.
            library: what carries them, with its version.

        Raises:
            ConfigError: it cannot be written.
        """
        if config.audit is None:
            return None
        everyone = exchange_json(messages, [platform.node(), secrets.token_hex(8)])
        host, world = everyone[0]
        record = cls(config.audit, world, messages.rank, with_rank_0=everyone[messages.rank][0] == host)
        hosts: dict[str, list[int]] = {}
        for rank, (name, _) in enumerate(everyone):
            hosts.setdefault(name, []).append(rank)
        try:
            together(messages, lambda: record._begin(config, library, hosts))
        except StepFailedError as error:
            raise ConfigError(f"RINGREDUCE_AUDIT={config.audit} cannot be written: {error}") from None
        return record

    @staticmethod
    def add_alone(config: Config, event: str, facts: Mapping[str, Any], rank: int = 0) -> None:
        """Append a line of no world to the record that the settings ask for, if they do; an error is logged."""
        if config.audit is None:
            return
        record = AuditRecord(config.audit, secrets.token_hex(8), rank)
        try:
            record._take_key(config)
        except ConfigError as error:
            _log.error("a line of the audit record %s is not signed: %s", config.audit, error)
        record._append([record._entry(event, facts)])

    def _take_key(self, config: Config) -> None:
        if config.key_file is not None:
            self._file.key = read_secret(config.key_file, KEY_VARIABLE)

    def _begin(self, config: Config, library: str, hosts: Mapping[str, list[int]]) -> None:
        self._take_key(config)
        if self._rank:
            return
        from ringreduce.audit.origins import origins  # reads all packages' versions: what needs no record is without

        versions = {"ringreduce": VERSION, "Python": platform.python_version(), **loaded_versions(), "MPI": library}
        facts = {
            "command": sys.orig_argv,
            "versions": versions,
            "settings": {each.name: getattr(config, each.name) for each in fields(Config)},
            "size": sum(map(len, hosts.values())),
            "hosts": hosts,
            "restart": launch().restarts,
            "allocation": allocation(),
            **origins(),
        }
        self._file.append([self._entry("begin", facts)])

    def _entry(self, event: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "event": event,
            "world": self._world,
            "time": datetime.now(timezone.utc).isoformat(),
            "ranks": [self._rank],
            "host": platform.node(),
            "pid": os.getpid(),
            "facts": json.loads(json.dumps(facts, default=str)),  # as they are now
        }

    def append(self, event: str, facts: Mapping[str, Any]) -> None:
        """Record; an error is logged, as the training shall not fail for it."""
        if self._rank:
            self._kept.append(self._entry(event, facts))
        else:
            self._append([self._entry(event, facts)])

    def refuse(self, what: str, error: BaseException) -> None:
        """Record that something was refused; once, where several say so one after the other.

        Args:
            what: the call, ``"init"`` or ``"message"``.
            error: why.
        """
        facts = refusal(what, error)
        if facts["error"] != self._refused:
            self._refused = facts["error"]
            self.append("refused", facts)

    @property
    def leaves_refusals(self) -> bool:
        """Whether this rank has refused something that only rank 0, on another host, can record."""
        return bool(self._refused and self._rank and not self._with_rank_0)

    def _append(self, entries: Sequence[Mapping[str, Any]], new_in: str | None = None) -> None:
        """Append lines (see `ChainedFile.append`), or log which ones are missing, and why."""
        try:
            if not self._with_rank_0:
                raise OSError("rank 0, which keeps it, is on another host, and no commit has come since")
            self._file.append(entries, new_in)
        except OSError as error:
            events = " and ".join(dict.fromkeys(each["event"] for each in entries))
            _log.error("the audit record %s lacks a line (%s): %s", self._file.path, events, error.strerror or error)

    def collect(self, gather: Callable[[Any], list[Any]], values: Mapping[str, float]) -> None:
        """Let rank 0 append what other ranks have kept; an error of the file is logged. Collective.

        Args:
            gather: gives a value to all ranks and returns everyone's, in rank order.
            values: the last ones that the program has reported on this rank.
        """
        kept = list(self._kept)
        try:
            everyone = gather((kept, values))
        except ConfigError as error:  # on all ranks: the lines are larger than the limit for objects
            _log.error("the audit record %s lacks lines of other ranks: %s", self._file.path, error)
            everyone = []
        for _ in kept:
            self._kept.popleft()
        if self._rank:
            return
        if entries := [entry for kept_there, _ in everyone for entry in kept_there]:
            self._append(entries, self._world)
        self._append_values({rank: said for rank, (_, said) in enumerate(everyone)})

    def _append_values(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Append the means of what ranks have reported, if they have."""
        said = {rank: each for rank, each in values.items() if each}
        if said:
            means = mean_values(said.values())
            facts = {name: each if math.isfinite(each) else str(each) for name, each in means.items()}
            self._append([self._entry("values", facts) | {"ranks": sorted(said)}])

    def end(self, error: str | None, values: Mapping[int, Mapping[str, float]] = {}) -> None:
        """Record that the world has ended; does nothing the second time.

        Args:
            error: why; None: it was shut down.
            values: on rank 0, the last ones that the program has reported, by rank, as far as they are known.
        """
        if not self._running:
            return
        self._running = False
        if not self._rank:
            self._append_values(values)
            self.append("end", {"error": error})
            return
        if error is not None:
            self.append("failed", {"error": error})
        if self._kept:
            self._append([*self._kept], self._world)


def refusal(what: str, error: BaseException) -> dict[str, str]:
    """Return the facts of a line that says what was refused, and why."""
    return {"what": what, "error": f"{type(error).__name__}: {error}"}


def require_facts(event: Any, facts: Mapping[str, Any]) -> None:
    """Check what a program wants to have recorded.

    Raises:
        ConfigError: JSON cannot say it, or the event is one of ringreduce's own.
    """
    if type(event) is not str or event in _OWN:
        raise ConfigError(f"the event of an audit is a word of the program's own, got {event!r}")
    for name, fact in facts.items():
        try:
            json.dumps(fact, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{name} cannot be recorded as JSON ({error}); give numbers, texts, lists and dicts, and of arrays and "
                "files ringreduce.fingerprint(...)"
            ) from None


def record_no_begin(messages: Messages, config: Config, error: RingReduceError) -> None:
    """Record why no world begins. Other ranks wait for rank 0 to do so: the first one that ends is the end of the job.

    A changed message may have come to a single rank, which then records that itself.
    """
    rank = messages.rank
    if rank == 0 or isinstance(error, ChangedMessageError):
        AuditRecord.add_alone(config, "refused", refusal("init", error), rank)
    with suppress(RingReduceError):
        if rank:
            Waiter(_TO_RECORD_S).until(messages.poll, lambda: "rank 0")
        for peer in range(1, messages.size if rank == 0 else 0):
            messages.post(b"", peer)
