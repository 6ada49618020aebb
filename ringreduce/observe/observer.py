"""What is seen of a rank from outside: its trace, the record of the run, and what it has done last."""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from ringreduce.common import processes
from ringreduce.common.config import Config
from ringreduce.common.errors import CollectiveTimeoutError, ConfigError
from ringreduce.common.instruments import Instruments
from ringreduce.observe import flight_recorder
from ringreduce.observe.audit import AuditRecord, versions
from ringreduce.observe.flight_recorder import Watched
from ringreduce.observe.metrics import Metrics
from ringreduce.observe.status import StatusFile, folder, resident_nbytes
from ringreduce.observe.timeline import Clock, Program, Timeline, Track
from ringreduce.transport.messages import Messages, StepFailedError, exchange_json, together

__all__ = ["Observation"]

_log = logging.getLogger(__name__)

#: How long ranks of a node have to write down what they do, before one that waited in vain ends them.
_DUMPING_S = 0.5


class Observation:
    """Observes a rank in all that it is a member of.

    Args:
        rank, size: of this rank, and of its world.
        clock: the job's.
        config: the settings in force.
        neighbours: the processes of the other ranks of this node.
        followers: called when a trace begins, with the row of the program, and with None before it ends. May grow.

    Attributes:
        audit: the record of this run; on rank 0, if the settings ask for one.
        failure: the first error after which no call was possible in something that this rank is a member of.
        steps, samples: how many training steps and samples the program has told of.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        clock: Clock,
        config: Config,
        neighbours: list[int],
        followers: Sequence[Callable[[Program | None], object]],
    ) -> None:
        self.audit = AuditRecord(config.audit) if config.audit is not None and rank == 0 else None
        self.failure: BaseException | None = None
        self.steps = self.samples = 0
        self._status: StatusFile | None = None
        self._began = time.time()
        self._rank, self._size = rank, size
        self._clock = clock
        self._config = config
        self._neighbours = neighbours
        self._followers = followers
        self._watched: list[Watched] = []
        self._timeline: Timeline | None = None
        self._ntimelines = 0  # that were started, or tried to; ranks that write to one file count alike
        self._stopped = True  # whether `stop_timeline` was called since
        self._tracks: list[tuple[Instruments, Track]] = []  # of the timeline, and where they are attached
        self._dumped_s: float | None = None  # when it was last written down what this rank has done

    def begin(self, messages: Messages, library: str, metrics: Callable[[], Metrics]) -> None:
        """Begin what the settings ask for; where a rank cannot, none of them does. Collective.

        Args:
            messages: between all ranks.
            library: what carries them.
            metrics: returns what this rank's calls add up to.

        Raises:
            ConfigError: the trace or the record cannot be written.
        """

        def start() -> None:
            if self._config.timeline is not None:
                self.start_timeline(self._config.timeline, mark_batches=self._config.timeline_marks_batches)

        try:
            together(messages, start)
        except StepFailedError as error:
            raise ConfigError(str(error)) from None
        if self._config.audit is not None:
            self._begin_audit(messages, library)
        if self._config.status:
            self._begin_status(metrics)

    def watch(self, watched: Watched) -> None:
        """Observe this rank as a member of one thing more."""
        self._watched = [each for each in self._watched if each.is_open()] + [watched]
        for communicator in watched.communicators.values():
            communicator.instruments.on_failure = self._failed
        self._attach(watched)

    def detach(self) -> None:
        """Observe nothing more."""
        for instruments, track in self._tracks:
            instruments.remove(track)
        self._tracks.clear()

    def end(self, error: str | None = None) -> None:
        """Observe nothing more, as this world ends; ``error``: why, if something went wrong."""
        self.end_audit(error)
        if self._status is not None:
            self._status.close()
        self.stop_timeline()

    # ---- what is done now ----

    def _begin_status(self, metrics: Callable[[], Metrics]) -> None:
        """Let `ringreduce top` see this rank, if it can have a file; local."""
        job = self._clock.job[:8]
        common = {
            "job": job,
            "rank": self._rank,
            "size": self._size,
            "host": platform.node(),
            "pid": os.getpid(),
            "command": sys.orig_argv,
            "began": self._began,
        }

        def describe() -> tuple[dict[str, Any], list[float]]:
            now, total = time.time(), metrics()
            open_ones = [each for each in self._watched if each.is_open()]
            calls = [last for each in open_ones if (last := flight_recorder.last_call(each))]
            tallies = [tally for each in open_ones for tally in each.communicators["blocking"].tallies.values()]
            spent_s = total.waited_s + sum(tally.seconds for tally in tallies)
            spent_s += sum(now - since for *_, since in calls if since is not None)
            more = {
                "now": now,
                "nbytes": resident_nbytes(),
                "late": None if total.late_rank is None else [total.late_rank, total.late_s],
                "sets": calls,
                "operations": [oldest for each in open_ones if (oldest := flight_recorder.oldest_pending(each))],
                "error": None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}",
            }
            return {**common, **more}, [now, self.steps, self.samples, spent_s]

        try:
            path = folder() / f"{job}.{self._rank}.json"
            self._status = StatusFile(path, describe, tidies=self._rank == 0)
        except (ConfigError, OSError) as error:
            _log.info("`ringreduce top` does not see this rank: %s", error)

    # ---- the trace ----

    def start_timeline(self, path: str | os.PathLike[str], *, mark_batches: bool) -> None:
        """Begin to write a trace; see `ringreduce.start_timeline`."""
        if self._timeline is not None:
            raise ConfigError("a timeline is being written already; call stop_timeline() first")
        if self._stopped:  # else it is the last one that is tried again on this rank
            self._ntimelines, self._stopped = self._ntimelines + 1, False
        host = platform.node()
        self._timeline = Timeline(path, self._clock, self._ntimelines, self._rank, host, mark_batches=mark_batches)
        for each in self._watched:
            self._attach(each)
        for follow in self._followers:
            follow(self._timeline.program())

    def stop_timeline(self) -> None:
        """Finish the trace; does nothing if there is none."""
        self._stopped = True
        if self._timeline is not None:
            for follow in self._followers:
                follow(None)
            self.detach()
            finished, self._timeline = self._timeline, None
            finished.flush()

    def program(self) -> Program | None:
        """Return the row of the program in the trace that is being written; None: there is none."""
        return None if self._timeline is None else self._timeline.program()

    def flush_timeline(self) -> None:
        """Write what this rank has seen so far to the trace, if there is one."""
        if self._timeline is not None:
            self._timeline.flush()

    def _attach(self, watched: Watched) -> None:
        """Let the timeline, if there is one, see what this rank does as a member of something."""
        if self._timeline is None or not watched.is_open():
            return
        for kind, communicator in watched.communicators.items():
            name = f"{watched.name}: {kind}"
            place = f"{watched.name} {list(watched.ranks)}: {kind}"
            track = self._timeline.track(name, place, communicator.rank, communicator.size)
            communicator.instruments.add(track)
            self._tracks.append((communicator.instruments, track))

    # ---- the record of the run ----

    def _begin_audit(self, messages: Messages, library: str) -> None:
        """Record what this world is. Collective."""
        hosts: dict[str, list[int]] = {}
        for rank, host in enumerate(exchange_json(messages, platform.node())):
            hosts.setdefault(host, []).append(rank)
        facts = {
            "command": sys.orig_argv,
            "versions": versions(library),
            "settings": {each.name: getattr(self._config, each.name) for each in fields(Config)},
            "size": self._size,
            "hosts": hosts,
        }
        try:
            together(messages, lambda: None if self.audit is None else self.audit.begin(facts))
        except StepFailedError as error:
            raise ConfigError(f"RINGREDUCE_AUDIT={self._config.audit} cannot be written: {error}") from None

    def end_audit(self, error: str | None) -> None:
        """Record that this world ends, and why; the first reason counts."""
        if self.audit is not None:
            self.audit.end(error)

    # ---- what was done last ----

    def dump(self, folder: str | os.PathLike[str]) -> Path:
        """Write down what this rank has done last; see `ringreduce.observe.flight_recorder`."""
        self._dumped_s = time.monotonic()
        return flight_recorder.write(folder, self._rank, self._size, self._watched, self.failure)

    def _failed(self, error: BaseException) -> None:
        """Take note that a call has failed for good, and write down what was done last, if that was asked for."""
        if self.failure is not None:
            return
        self.failure = error
        if self._config.dump is None:
            return
        if self._dumped_s is not None and time.monotonic() - self._dumped_s > 2 * _DUMPING_S:
            return  # others have asked where this rank was, and that tells more than where it is now
        with suppress(OSError):
            _log.error("what this rank has done last is in %s", self.dump(self._config.dump))
        if isinstance(error, CollectiveTimeoutError):
            # Who is late does not know; those of this machine can be asked.
            for pid in self._neighbours:
                with suppress(OSError):
                    if processes.handles(pid, signal.SIGUSR1):
                        os.kill(pid, signal.SIGUSR1)
            # This error may end the job, and nothing says when those that were asked have written.
            time.sleep(_DUMPING_S)
