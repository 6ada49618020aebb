"""What is seen of a rank from outside, all of it: a list of watchers, and a thread in which they tick."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, RingReduceError
from ringreduce.observe.job.host_uses import uses_of
from ringreduce.observe.job.job_report import JobReport, figures_of, report_of, say
from ringreduce.observe.job.job_view import last_values
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.recorder import FlightRecorder, Observed
from ringreduce.observe.seen.timeline import JobClock, Program
from ringreduce.observe.watchers import (
    Beginning,
    Collection,
    Collector,
    DiskKeys,
    Page,
    Stalls,
    Status,
    Traces,
    WorldWatcher,
)
from ringreduce.transport.messages import StepFailedError

_log = logging.getLogger(__name__)

_EVERY_S = 1.0  # how often watchers tick
_PATIENCE_S = 5.0  # in the end, with a disk that is slow


class Observer:
    """Observes a rank in all that it is a member of.

    Args:
        rank, size: of this rank, and of its world.
        clock: the job's.
        config: the settings in force.
        neighbours: the processes of the other ranks of this node.
        followers: of traces; see `Traces`.
        more: further watchers, which begin before this rank says anything of itself.

    Attributes:
        recorder: what this rank does, and has done last.
        traces: the trace of this rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        clock: JobClock,
        config: Config,
        neighbours: Sequence[int],
        followers: Sequence[Callable[[Program | None], object]],
        more: Sequence[WorldWatcher] = (),
    ) -> None:
        self.recorder = FlightRecorder(rank, size, folder=config.dump, neighbours=neighbours)
        self.traces = Traces(clock, rank, size, self.recorder, followers)
        self._rank = rank
        self._config = config
        self._collection = Collection(self.recorder)
        status = Status(self.recorder, clock.job[:8])
        of_job = [Stalls(self._collection), Page(self._collection), Collector(self._collection)]
        self._watchers = [DiskKeys(self.recorder), self.traces, *more, status, self._collection, *of_job]
        self._begun: list[WorldWatcher] = []
        self._ticking: list[WorldWatcher] = []
        self._began_s = time.perf_counter()
        self._ends = threading.Event()
        self._ticker: threading.Thread | None = None

    def begin(self, world: Beginning) -> None:
        """Begin what the settings ask for; where a rank cannot, none of them does. Collective.

        Raises:
            ConfigError: the trace or the record cannot be written, the key for the disk cannot be read, the library for
                OTLP is missing, or what ranks do would go to other hosts in the open while messages are sealed.
        """
        try:
            for each in self._watchers:
                self._begun.append(each)
                if each.begin(world):
                    self._let_tick(each)
        except ConfigError as error:
            self.end(str(error))
            raise
        except StepFailedError as error:
            self.end(str(error))
            raise ConfigError(str(error)) from None

    def watch(self, observed: Observed) -> None:
        """Observe this rank as a member of one thing more."""
        self.recorder.watch(observed)
        self.traces.attach(observed)

    def start_timeline(self, path: str | os.PathLike[str], *, mark_batches: bool) -> None:
        """Begin to write a trace; see `ringreduce.start_timeline`."""
        self.traces.start(path, mark_batches=mark_batches)
        self._let_tick(self.traces)

    def forked(self) -> None:
        """Observe nothing in a process that this rank has forked; what it serves stays the rank's."""
        for each in self._begun:
            each.forked()

    def end(self, error: str | None = None) -> None:
        """Observe nothing more, as this world ends; ``error``: why, if something went wrong."""
        self._ends.set()
        if self._ticker is not None:
            self._ticker.join(_PATIENCE_S)
        while self._begun:
            self._begun.pop().end(error)
        # Watchers refer to this observer: without them, its world gives memory and files back at once.
        self._watchers.clear()
        self._ticking.clear()

    def last_values(self, fails: bool) -> dict[int, dict[str, float]]:
        """Return the last values that the program has reported, by rank, as far as they are known here.

        Args:
            fails: whether the world ends by an error: it may come from a signal handler, and leave a device that does
                not answer.
        """
        values = last_values(self._collection.latest())
        own = self.recorder.values
        values[self._rank] = own.last_read() if fails else own.last()
        return values

    def report(self, metrics: Metrics, nodes: Sequence[Sequence[int]]) -> JobReport | None:
        """Return what the steps of this job took, and why; None: there were too few.

        Args:
            metrics: of this rank.
            nodes: the ranks of each host.
        """
        recorder = self.recorder
        now = self._collection.latest()
        laps = [] if recorder.step_clock is None else [*recorder.step_clock.laps]
        hosts = {each.rank: each.host for each in now}
        figures = figures_of(metrics, laps, nodes, self._began_s, recorder.steps, hosts, uses_of(now))
        return report_of(figures, laps, recorder.values.last())

    def conclude(self, report: Callable[[], JobReport | None]) -> None:
        """Let rank 0 say what the steps took, and why, if the settings ask for that and this world ends well."""
        wanted = self._config.verdict or self._config.report
        if self._rank or not wanted or getattr(sys, "last_value", None) is not None:
            return
        try:
            say(report(), self._config)
        except Exception:  # whatever it is, this world is to end
            _log.exception("there is no verdict")

    def _let_tick(self, watcher: WorldWatcher) -> None:
        if watcher not in self._ticking:
            self._ticking.append(watcher)
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, name="ringreduce observer", daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        while not self._ends.wait(_EVERY_S):
            for each in list(self._ticking):
                # The program goes on meanwhile, and may change what is looked at; then the next time will do.
                with suppress(RuntimeError, OSError, RingReduceError):
                    each.tick()
