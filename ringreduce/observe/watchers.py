"""What is seen of a rank from outside while a world lasts: each thing is a watcher, which begins, ticks and ends."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.instruments import Instruments
from ringreduce.common.launch import STALLED, collectors, launch, notify_launcher
from ringreduce.common.sealed_files import disk_keys
from ringreduce.observe.job.gathering import Gathering
from ringreduce.observe.job.job_view import JobView
from ringreduce.observe.job.watchdog import Watchdog
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.recorder import FlightRecorder, Observed
from ringreduce.observe.seen.snapshots import Snapshot
from ringreduce.observe.seen.timeline import JobClock, Program, Timeline, Track
from ringreduce.transport.messages import Messages, together
from ringreduce.transport.waiting import Waiter

if TYPE_CHECKING:
    from ringreduce.observe.out.otlp import Telemetry
    from ringreduce.observe.out.serving import TextServer

_log = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_TO_DUMP_S = 2.0  # that other ranks have to write down what they do


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The world that is to be watched.

    Attributes:
        config: the settings in force.
        messages: between all ranks.
        library: what carries them.
        metrics: returns what this rank's calls add up to.
        values: see `Observer.last_values`.
        nodes: on how many hosts the ranks are.
        recoveries: how often the job has gone on without ranks that had failed.
        abort: ends the job with a status.
    """

    config: Config
    messages: Messages
    library: str
    metrics: Callable[[], Metrics]
    values: Callable[[bool], dict[int, dict[str, float]]] = lambda fails: {}
    nodes: int = 1
    recoveries: int = 0
    abort: Callable[[int], object] = os._exit

    @property
    def view(self) -> JobView:
        """A view of the job that has seen nothing yet."""
        return JobView(self.messages.size, launch().restarts, self.recoveries)


class WorldWatcher:
    """One thing that is seen of a rank. All ranks have the same watchers, in the same order."""

    def begin(self, world: Beginning) -> bool:
        """Begin what the settings ask for, and return whether `tick` is to be called. Collective.

        Raises:
            ConfigError: the settings ask for what cannot be.
        """
        return False

    def tick(self) -> None:
        """Do what is due once a second, in a thread of its own."""

    def end(self, error: str | None) -> None:
        """End it, as the world ends; ``error``: why, if something went wrong."""

    def forked(self) -> None:
        """Let go of what a process that this rank has forked is not to keep."""


class DiskKeys(WorldWatcher):
    """Reads the keys that seal what is written down."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder

    def begin(self, world: Beginning) -> bool:
        key_file = world.config.disk_key_file
        if key_file is not None:
            self._recorder.keys = together(world.messages, lambda: disk_keys(key_file))
        return False


class Traces(WorldWatcher):
    """Writes the trace of this rank, in which it is seen as a member of all that the recorder knows.

    Args:
        clock: the job's.
        rank, size: of this rank, and of its world.
        recorder: of this rank.
        followers: called when a trace begins, with the row of the program, and with None before it ends. May grow.
    """

    def __init__(
        self,
        clock: JobClock,
        rank: int,
        size: int,
        recorder: FlightRecorder,
        followers: Sequence[Callable[[Program | None], object]],
    ) -> None:
        self._clock = clock
        self._rank = rank
        self._size = size
        self._recorder = recorder
        self._followers = followers
        self._timeline: Timeline | None = None
        self._ended: dict[str, Timeline] = {}  # the last trace of each file; other ranks may go on with it
        self._ntimelines = 0  # that were started, or tried to; ranks that write to one file count alike
        self._stopped = True  # whether `stop` was called since
        self._tracks: list[tuple[Instruments, Track]] = []  # of the timeline, and where they are attached

    def begin(self, world: Beginning) -> bool:
        config = world.config
        path = config.timeline
        if path is not None:
            together(world.messages, lambda: self.start(path, mark_batches=config.timeline_marks_batches))
        return path is not None

    def tick(self) -> None:
        if (timeline := self._timeline) is not None:
            timeline.write()

    def end(self, error: str | None) -> None:
        self.stop()
        for each in self._ended.values():
            each.stop(ranks=0, at_once=error is not None)  # those that have not begun it by now do not come

    def forked(self) -> None:
        self._detach()

    def start(self, path: str | os.PathLike[str], *, mark_batches: bool) -> None:
        """Begin to write a trace; see `ringreduce.start_timeline`."""
        if self._timeline is not None:
            raise ConfigError("a timeline is being written already; call stop_timeline() first")
        if self._stopped:  # else it is the last one that is tried again on this rank
            self._ntimelines = self._ntimelines + 1
            self._stopped = False
        self._timeline = Timeline(
            path,
            self._clock,
            number=self._ntimelines,
            rank=self._rank,
            host=platform.node(),
            mark_batches=mark_batches,
            keys=self._recorder.keys,
        )
        self._ended.pop(os.path.abspath(path), None)
        for each in self._recorder.observed:
            self.attach(each)
        for follow in self._followers:
            follow(self._timeline.program())

    def stop(self) -> None:
        """Finish the trace; does nothing if there is none."""
        self._stopped = True
        if self._timeline is not None:
            for follow in self._followers:
                follow(None)
            self._detach()
            timeline = self._timeline
            self._timeline = None
            timeline.stop(self._size)
            self._ended[timeline.path] = timeline

    def program(self) -> Program | None:
        """Return the row of the program in the trace that is being written; None: there is none."""
        return None if self._timeline is None else self._timeline.program()

    def flush(self) -> None:
        """Let the trace hold all that this rank has done, as its process ends now."""
        if self._timeline is not None:
            self._timeline.stop(self._size, at_once=True)

    def attach(self, observed: Observed) -> None:
        """Let the trace, if there is one, see what this rank does as a member of something."""
        if self._timeline is None or not observed.is_open():
            return
        for kind, communicator in observed.communicators.items():
            name = f"{observed.name}: {kind}"
            place = f"{observed.name} {list(observed.ranks)}: {kind}"
            track = self._timeline.track(name, place, communicator.rank, communicator.size)
            communicator.instruments.add(track)
            self._tracks.append((communicator.instruments, track))

    def _detach(self) -> None:
        for instruments, track in self._tracks:
            instruments.remove(track)
        self._tracks.clear()


class Status(WorldWatcher):
    """Writes the snapshots of this rank for `ringreduce top`, unless the settings turn that off."""

    def __init__(self, recorder: FlightRecorder, job: str) -> None:
        self._recorder = recorder
        self._job = job

    def begin(self, world: Beginning) -> bool:
        config = world.config
        if not config.status:
            if config.watchdog_s is not None or config.otlp:
                name = "OTLP" if config.otlp else "WATCHDOG"
                raise ConfigError(f"RINGREDUCE_{name} reads what ranks say of themselves; unset RINGREDUCE_STATUS=0")
            return False
        self._recorder.begin_status(self._job, world.metrics)
        return True

    def tick(self) -> None:
        self._recorder.write_status()

    def end(self, error: str | None) -> None:
        self._recorder.end_status()


class Collection(WorldWatcher):
    """Collects the snapshots of all ranks at rank 0, if somebody there wants them.

    Attributes:
        gathering: has them; None: nobody does.
        recorder: of this rank.
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        self.gathering: Gathering | None = None
        self.recorder = recorder
        self._ticks = False

    def begin(self, world: Beginning) -> bool:
        config = world.config
        messages = world.messages
        is_shown = config.status_address is not None or config.otlp
        is_reported = world.nodes > 1 and bool(config.verdict or config.report)
        if config.watchdog_s is None and not is_shown and not is_reported:
            return False
        between = None
        if messages.size > 1 and messages.concurrent:
            between = messages.subset(range(messages.size), Waiter(config.timeout_s))
        elif messages.size > 1 and messages.rank == 0 and is_shown:
            _log.warning("%s lets one thread alone communicate: of this job, rank 0 alone is shown", messages.library)
        self.gathering = Gathering(between, messages.rank, messages.size)
        return True

    def tick(self) -> None:
        if self.gathering is not None and self.recorder.told is not None:
            self._ticks = True
            try:
                self.gathering.tell(self.recorder.told)
            finally:
                self._ticks = False

    def end(self, error: str | None) -> None:
        if self.gathering is not None and not self._ticks:  # else a thread that hangs has the messages
            self.gathering.end(together=error is None)

    def latest(self) -> list[Snapshot]:
        """Return the last snapshot of each rank, as far as they are known here; without a gathering, this rank's."""
        told = [] if self.gathering is None else self.gathering.latest()
        return told or ([] if self.recorder.told is None else [self.recorder.told])


class Stalls(WorldWatcher):
    """Looks whether the job stalls: each rank writes down what it does then, and rank 0 says why."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection

    def begin(self, world: Beginning) -> bool:
        config = world.config
        self._world = world
        if config.watchdog_s is None:
            return False
        self._watchdog = Watchdog(config.watchdog_s, config.watchdog_first_s, world.messages.size)
        return True

    def tick(self) -> None:
        config = self._world.config
        own = self._collection.recorder.told
        rank = self._world.messages.rank
        if own is None:
            return
        said = self._watchdog.look([own] if rank else self._collection.latest())
        if said is None:
            return
        folder = config.dump or "ringreduce-dumps"
        try:
            self._collection.recorder.dump(folder)
        except OSError as error:
            _log.info("what this rank does is not written down: %s", error)  # the other ranks may have written theirs
        if rank:
            return
        ends = config.watchdog_action != "dump"
        then = "; the job is ended" if ends else ""
        _log.error("%s. `ringreduce doctor --dump %s` shows what each rank does%s", said, folder, then)
        if ends:
            time.sleep(_TO_DUMP_S)  # nothing says when the other ranks have written what they do
            if launch().survives_deaths:  # else the others would go on without this rank
                notify_launcher("stalls")
            else:
                self._world.abort(STALLED)


class Page(WorldWatcher):
    """Shows at rank 0, over HTTP, what is gathered there."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._server: TextServer | None = None

    def begin(self, world: Beginning) -> bool:
        config = world.config
        address = config.status_address
        gathering = self._collection.gathering
        if address is not None and config.key_file is not None and address[0] not in _LOOPBACK:
            raise ConfigError(
                f"RINGREDUCE_KEY_FILE seals what ranks send, but the status would be served on {address[0]} "
                f"unencrypted: leave out its host, and reach it by ssh -L {address[1]}:127.0.0.1:{address[1]}"
            )
        if address is None or world.messages.rank or gathering is None:
            return False
        from ringreduce.observe.out.job_server import serve_job  # its libraries take time, and few jobs need them

        self._gathering = gathering
        self._view = world.view
        self._server = serve_job(address, config.status_token_file, gathering, self._view)
        return True

    def tick(self) -> None:
        self._view.remember(self._gathering.latest())

    def end(self, error: str | None) -> None:
        if self._server is not None:
            self._server.end()

    def forked(self) -> None:
        if self._server is not None:
            self._server.server_close()


class Collector(WorldWatcher):
    """Sends what is gathered at rank 0 to a collector of OpenTelemetry."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._telemetry: Telemetry | None = None

    def begin(self, world: Beginning) -> bool:
        gathering = self._collection.gathering
        if world.config.otlp:
            # On all ranks: another one may be rank 0 later.
            telemetry = together(world.messages, lambda: _telemetry(world.config))
            if world.messages.rank == 0 and gathering is not None:
                self._telemetry = telemetry(gathering, world.view)
        return False

    def end(self, error: str | None) -> None:
        if self._telemetry is not None:
            self._telemetry.end(waits=error is None)


def _telemetry(config: Config) -> type[Telemetry]:
    """Return what sends to a collector; imported here, as it takes time, and few jobs need it."""
    for address in collectors():
        parts = urlsplit(address)
        if config.key_file is not None and parts.scheme != "https" and parts.hostname not in _LOOPBACK:
            raise ConfigError(
                f"RINGREDUCE_KEY_FILE seals what ranks send, but what they do would go to {address} unencrypted: let "
                "OTEL_EXPORTER_OTLP_ENDPOINT be an address of https, or of a collector on the host of rank 0"
            )
    try:
        from ringreduce.observe.out.otlp import Telemetry
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"RINGREDUCE_OTLP needs OpenTelemetry, and {error.name} is not installed: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from None
    return Telemetry
