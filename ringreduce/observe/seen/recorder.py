"""What a rank has done last and does now: shown by `ringreduce top`, and written down when something goes wrong.

The last calls and operations of every communicator are kept as they come (`Instruments`), at the cost of a list each.
When something goes wrong, ranks write a snapshot with the stacks of their threads into a folder, ``rank-3.json``, for
`ringreduce doctor --dump FOLDER` and for people. For `ringreduce top`, each rank announces one (`Announcement`), until
its world ends.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ringreduce.collectives.communicator import Communicator
from ringreduce.common import processes
from ringreduce.common.call_sites import place_of
from ringreduce.common.errors import CollectiveTimeoutError, ConfigError
from ringreduce.common.files import replace_file
from ringreduce.common.processes import Announcement
from ringreduce.common.sealed_files import PLAIN
from ringreduce.observe.seen.activity import Activity, main_thread_place
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.reported_values import ReportedValues
from ringreduce.observe.seen.resources import Resources
from ringreduce.observe.seen.snapshots import (
    RateSample,
    SeenCall,
    SeenFrame,
    SeenOperation,
    SeenSet,
    SeenThread,
    SlowRank,
    Snapshot,
    UsedResources,
)
from ringreduce.observe.seen.step_clock import Spent, StepClock

_log = logging.getLogger(__name__)

#: How long ranks of a node have to write down what they do, before one that waited in vain ends them.
_DUMPING_S = 0.5
#: The name by which ranks announce their snapshots.
_STATUS = "ringreduce-status"
_REMEMBERED = 11  # samples, one a second, so that rates are those of ten seconds

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Observed:
    """Something that a rank is a member of: a process set, or a group.

    Attributes:
        id: the number of a process set; text for a group, the same on all its ranks.
        name: for people.
        ranks: of the world.
        communicators: by how they are called, ``"blocking"`` or ``"asynchronous"``.
        is_open: returns whether it still can be used.
    """

    id: int | str
    name: str
    ranks: Sequence[int]
    communicators: Mapping[str, Communicator]
    is_open: Callable[[], bool]


class FlightRecorder:
    """Takes snapshots of a rank: writes one down when a call has failed for good, and others for `ringreduce top`.

    Args:
        rank, size: of this rank, and of its world.
        folder: where it is written then; None: nowhere.
        neighbours: the processes of the other ranks of this node.

    Attributes:
        keys: seals what is written down.
        observed: what this rank is a member of.
        steps, samples: how many the program has counted.
        values: what the program has reported.
        activity: what a watchdog needs to know.
        step_clock: when it has made these steps; None: nothing was said about its time.
        told: the last snapshot for `ringreduce top`; None: there is none yet.
        failure: the first error after which no call was possible in one of these.
    """

    def __init__(self, rank: int, size: int, folder: str | None, neighbours: Sequence[int]) -> None:
        self.keys = PLAIN
        self.observed: list[Observed] = []
        self.steps = self.samples = 0
        self.values = ReportedValues()
        self.step_clock: StepClock | None = None
        self.activity = Activity()
        self.told: Snapshot | None = None
        self.failure: BaseException | None = None
        self._rank = rank
        self._size = size
        self._folder = folder
        self._neighbours = neighbours
        self._dumped_s: float | None = None  # when it was last written down
        self._status: Announcement | None = None  # for `ringreduce top`
        self._metrics: Callable[[], Metrics] | None = None
        self._pid = os.getpid()
        self._samples: deque[RateSample] = deque(maxlen=_REMEMBERED)
        self._stepped = 0.0
        self._resources = Resources()
        self._first: UsedResources | None = None  # until the end of the first step
        self._last: tuple[int, UsedResources | None] = 0, None  # the steps at the last look that found new ones

    def watch(self, observed: Observed) -> None:
        """Record what this rank does as a member of something more."""
        self.observed = [each for each in self.observed if each.is_open()] + [observed]
        for communicator in observed.communicators.values():
            communicator.lifetime.listen_while_held("failed", self._failed)

    def count(self, steps: int, samples: int) -> None:
        """Take note of steps and samples that the program has finished."""
        self.steps += steps
        self.samples += samples
        if not steps:
            return
        self._stepped = time.time()
        if self._first is None and self._metrics is not None:
            self._first = self._used()
        if self.step_clock is not None:
            self.step_clock.look(self.steps, self.samples)

    def spent(self, waited_s: float, loading_s: float) -> Spent:
        """Return how this rank has spent its time, in ended calls; arguments as the attributes of `Spent`."""
        blocking = [each.communicators["blocking"] for each in self.observed if each.is_open()]
        blocking_s = sum(tally.seconds for each in blocking for tally in each.tallies.values())
        return Spent(blocking_s, waited_s, loading_s, processes.delayed_s())

    def snapshot(self, *, brief: bool) -> Snapshot:
        """Return what this rank does. Local; takes no lock.

        Args:
            brief: leave out all but the last call of each set and the operation that waits longest.
        """
        everyone = [*range(self._size)]
        return Snapshot(
            rank=self._rank,
            size=self._size,
            host=platform.node(),
            pid=os.getpid(),
            time=time.time(),
            error=None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}",
            sets=tuple(
                SeenSet(
                    each.id,
                    each.name,
                    None if [*each.ranks] == everyone else tuple(each.ranks),
                    _calls(each.communicators["blocking"], brief),
                    _operations(each.communicators.get("asynchronous"), brief),
                )
                for each in self.observed
                if each.is_open()
            ),
        )

    def dump(self, folder: str | os.PathLike[str]) -> Path:
        """Write down what this rank has done last; returns the file. Local; takes no lock.

        Args:
            folder: made if need be, for this user alone.

        Raises:
            OSError: it cannot be written.
        """
        self._dumped_s = time.monotonic()
        path = Path(folder)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path /= f"rank-{self._rank}.json"
        snapshot = replace(self.snapshot(brief=False), threads=_threads())
        said = json.dumps(snapshot.to_json(), indent=1).encode()
        new = path.with_suffix(f".{os.getpid()}-{next(_numbers)}")  # a signal handler may write in the midst of this
        write = lambda file: self.keys.write(file, path.name, lambda inner: inner.write(said))  # noqa: E731
        replace_file(path, write, new=new, durable=False)
        return path

    def begin_status(self, job: str, metrics: Callable[[], Metrics]) -> None:
        """Announce what this rank does from now on, each time that `write_status` is called.

        Args:
            job: which.
            metrics: returns what this rank's calls add up to.
        """
        self._stepped = time.time()
        self._job = job
        self._began = self._stepped
        self._metrics = metrics
        self._resources.begin()
        self._status = Announcement(_STATUS)
        self._status.replace(b"")  # Its descriptor comes with the world, not some time later.

    def write_status(self) -> Snapshot | None:
        """Return what this rank does now, and announce it; None: `begin_status` was not called."""
        metrics = self._metrics
        if metrics is None:
            return None
        snapshot = self.snapshot(brief=True)
        now_s = snapshot.time
        total = metrics()
        spent = self.spent(total.waited_s, 0.0)
        under_way = [call for each in snapshot.sets for call in each.calls if call.ended is None]
        spent_s = spent.waited_s + spent.blocking_s + sum(now_s - call.started for call in under_way)
        used = self._used()
        is_new = self.steps > self._last[0]
        if is_new:
            self._last = self.steps, used
        self._samples.append(RateSample(now_s, self.steps, self.samples, spent_s))
        reported = self.steps + self.values.count
        waiting_s = total.paces[self._rank].waited_s if self._rank in total.paces else None
        slow = total.slow
        status = replace(
            snapshot,
            job=self._job,
            command=tuple(sys.orig_argv),
            began=self._began,
            stepped=self._stepped,
            samples=tuple(self._samples),
            resources=used.resources,
            first=self._first,
            last=None if is_new else self._last[1],
            spent=None if self.step_clock is None else self.step_clock.until_now(waiting_s),
            values=self.values.take(),
            slow=None if slow is None else SlowRank(slow.rank, slow.lateness, slow.words()),
            progress=reported + self._calls(),
            begun=reported > 0,
            busy=self.activity.now(),
            place=main_thread_place(),
        )
        self.told = status
        if (announcement := self._status) is not None:
            announcement.replace(json.dumps(status.to_json()).encode())
        return status

    def _used(self) -> UsedResources:
        """Return what was used until now."""
        return UsedResources(platform.node(), time.time(), self._resources.read())

    def _calls(self) -> int:
        """Return how many collectives have ended."""
        communicators = [one for each in self.observed if each.is_open() for one in each.communicators.values()]
        tallies = [kind.values() for each in communicators for kind in (each.tallies, each.message_tallies)]
        return sum(each.calls for kind in tallies for each in kind)

    def end_status(self) -> None:
        """Announce nothing any more."""
        if self._status is not None and os.getpid() == self._pid:
            self._status.close()
        self._status = None
        self._resources.end()
        self._metrics = self.step_clock = None  # they keep the world alive, which has this

    def _failed(self, error: BaseException) -> None:
        """Take note that a call has failed for good, and write down what was done last, if that was asked for."""
        if self.failure is not None:
            return
        self.failure = error
        if self._folder is None:
            return
        if self._dumped_s is not None and time.monotonic() - self._dumped_s > 2 * _DUMPING_S:
            return  # others have asked where this rank was, and that tells more than where it is now
        with suppress(OSError):
            _log.error("what this rank has done last is in %s", self.dump(self._folder))
        if isinstance(error, CollectiveTimeoutError):
            self._ask_neighbours()

    def _ask_neighbours(self) -> None:
        """Let the other ranks of this node write down what they do: the one that is late does not know."""
        for pid in self._neighbours:
            with suppress(OSError):
                if processes.handles(pid, signal.SIGUSR1):
                    os.kill(pid, signal.SIGUSR1)
        # The error may end the job, and nothing says when those that were asked have written.
        time.sleep(_DUMPING_S)


def read_all() -> list[Snapshot]:
    """Return what the living ranks of this user on this machine announce, by job and rank."""
    ranks = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if folder.stat().st_uid == os.geteuid():
                ranks += [*_announced(int(folder.name))][:1]
    began: dict[str, float] = {}
    for each in ranks:
        began[each.job] = min(each.began, began.get(each.job, each.began))
    return sorted(ranks, key=lambda each: (began[each.job], each.job, each.rank))


def _announced(pid: int) -> Iterator[Snapshot]:
    for text in processes.announced(pid, _STATUS):
        with suppress(ValueError):  # cut off, as it is being written
            said = json.loads(text)
            if said["pid"] != pid:
                continue  # it is that of a rank which has forked this process
            try:
                yield Snapshot.from_json(said)
            except ConfigError as error:
                _log.error("process %d is not shown: %s", pid, error)


def _calls(communicator: Communicator, brief: bool) -> tuple[SeenCall, ...]:
    recent = list(communicator.instruments.calls)[-1 if brief else 0 :]
    ended = sum(each.calls for each in communicator.tallies.values())
    first = ended - sum(1 for call in recent if call[1]) + 1
    return tuple(
        SeenCall(number, what, nbytes, _moment(started), _clock(ended))
        for number, (started, ended, what, nbytes) in enumerate(recent, first)
    )


def _operations(communicator: Communicator | None, brief: bool) -> tuple[SeenOperation, ...]:
    recent = [] if communicator is None else list(communicator.instruments.operations)
    if brief:
        recent = [each for each in recent if not (each[1] or each[2])][:1]
    return tuple(
        SeenOperation(name, signature, place_of(stack), _moment(submitted), _clock(started), _clock(ended), error)
        for submitted, started, ended, name, signature, stack, error in recent
    )


def _moment(at_s: float) -> float:
    """Turn what `time.perf_counter` has said into seconds since 1970."""
    return time.time() - (time.perf_counter() - at_s)


def _clock(at_s: float) -> float | None:
    """Do the same; 0: it has not come."""
    return _moment(at_s) if at_s else None


def _threads() -> tuple[SeenThread, ...]:
    names = {each.ident: each.name for each in threading.enumerate()}
    return tuple(
        SeenThread(
            names.get(thread, str(thread)),
            tuple(
                SeenFrame(each.filename, each.lineno or 0, each.name, each.line or "")
                for each in traceback.extract_stack(frame)
            ),
        )
        for thread, frame in sys._current_frames().items()
    )
