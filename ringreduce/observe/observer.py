"""What is seen of a rank from outside: its trace, the record of the run, its status, and what it has done last."""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, ForeignFileError, RingReduceError
from ringreduce.common.instruments import Instruments
from ringreduce.common.launch import STALLED, collectors, launch, notify_launcher
from ringreduce.common.sealed_files import disk_keys
from ringreduce.observe.audit import AuditRecord
from ringreduce.observe.job.gathering import Gathering
from ringreduce.observe.job.host_uses import uses_of
from ringreduce.observe.job.job_report import JobReport, figures_of, report_of, say
from ringreduce.observe.job.job_view import JobView, last_values
from ringreduce.observe.job.watchdog import Watchdog
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.recorder import FlightRecorder, Observed
from ringreduce.observe.seen.snapshots import Snapshot
from ringreduce.observe.seen.timeline import JobClock, Program, Timeline, Track
from ringreduce.transport.messages import Messages, StepFailedError, together
from ringreduce.transport.waiting import Waiter

if TYPE_CHECKING:
    from ringreduce.observe.out.otlp import Telemetry
    from ringreduce.observe.out.serving import TextServer

_log = logging.getLogger(__name__)

_EVERY_S = 1.0  # how often the status and the trace are written
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_TO_DUMP_S = 2.0  # that other ranks have to write down what they do
_PATIENCE_S = 5.0  # in the end, with a disk that is slow


class Observer:
    """Observes a rank in all that it is a member of; its status and its trace are written by a thread.

    Args:
        rank, size: of this rank, and of its world.
        clock: the job's.
        config: the settings in force.
        neighbours: the processes of the other ranks of this node.
        followers: called when a trace begins, with the row of the program, and with None before it ends. May grow.

    Attributes:
        recorder: what this rank does, and has done last; `ringreduce top` reads it, unless the settings turn that off.
        audit: the record of this run, if the settings ask for one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        clock: JobClock,
        config: Config,
        neighbours: Sequence[int],
        followers: Sequence[Callable[[Program | None], object]],
    ) -> None:
        self.audit: AuditRecord | None = None
        self._rank = rank
        self._size = size
        self._clock = clock
        self._config = config
        self._followers = followers
        self.recorder = FlightRecorder(rank, size, folder=config.dump, neighbours=neighbours)
        self._timeline: Timeline | None = None
        self._ended: dict[str, Timeline] = {}  # the last trace of each file; other ranks may go on with it
        self._ntimelines = 0  # that were started, or tried to; ranks that write to one file count alike
        self._stopped = True  # whether `stop_timeline` was called since
        self._tracks: list[tuple[Instruments, Track]] = []  # of the timeline, and where they are attached
        self._began_s = time.perf_counter()
        self._ends = threading.Event()
        self._writer: threading.Thread | None = None
        self._gathering: Gathering | None = None
        self._watchdog: Watchdog | None = None
        self._abort: Callable[[int], object] = os._exit
        self._view: JobView | None = None
        self._server: TextServer | None = None
        self._telemetry: Telemetry | None = None

    def begin(
        self,
        messages: Messages,
        library: str,
        metrics: Callable[[], Metrics],
        *,
        nodes: int = 1,
        recoveries: int = 0,
        abort: Callable[[int], object] = os._exit,
    ) -> None:
        """Begin what the settings ask for; where a rank cannot, none of them does. Collective.

        Args:
            messages: between all ranks.
            library: what carries them.
            metrics: returns what this rank's calls add up to.
            nodes: on how many hosts the ranks are.
            recoveries: how often the job has gone on without ranks that had failed.
            abort: ends the job with a status.

        Raises:
            ConfigError: the trace or the record cannot be written, the key for the disk cannot be read, the library for
                OTLP is missing, or what ranks do would go to other hosts in the open while messages are sealed.
        """
        path = self._config.timeline
        key_file = self._config.disk_key_file
        try:
            if key_file is not None:
                self.recorder.keys = together(messages, lambda: disk_keys(key_file))
            if path is not None:
                together(messages, lambda: self.start_timeline(path, mark_batches=self._config.timeline_marks_batches))
            # On all ranks: another one may be rank 0 later.
            telemetry = together(messages, lambda: _telemetry(self._config)) if self._config.otlp else None
        except StepFailedError as error:
            raise ConfigError(str(error)) from None
        self.audit = AuditRecord.of_world(self._config, messages, library)
        if self._config.status:
            try:
                self.recorder.begin_status(self._clock.job[:8], metrics)
            except (ConfigError, OSError) as error:
                _log.info("`ringreduce top` does not see this rank: %s", error)
                if isinstance(error, ForeignFileError):
                    self.refuse("status", error)
            else:
                self._start_writing()
        address = self._config.status_address
        if not self._config.status and (self._config.watchdog_s is not None or self._config.otlp):
            name = "OTLP" if self._config.otlp else "WATCHDOG"
            raise ConfigError(f"RINGREDUCE_{name} reads what ranks say of themselves; unset RINGREDUCE_STATUS=0")
        if self._config.watchdog_s is not None:
            self._watchdog = Watchdog(self._config.watchdog_s, self._config.watchdog_first_s, self._size)
            self._abort = abort
        reports = bool(self._config.verdict or self._config.report)
        is_shown = address is not None or telemetry is not None
        if self._watchdog is not None or is_shown or (nodes > 1 and reports):
            self._gather(messages, is_shown=is_shown)
        if address is not None:
            self._show_job(address, recoveries)
        if telemetry is not None and self._rank == 0 and self._gathering is not None:
            self._telemetry = telemetry(self._gathering, JobView(self._size, launch().restarts, recoveries))

    def _gather(self, messages: Messages, *, is_shown: bool) -> None:
        """Gather what all ranks do at rank 0. Collective."""
        gathered = None
        if messages.size > 1 and messages.concurrent:
            gathered = messages.subset(range(self._size), Waiter(self._config.timeout_s))
        elif messages.size > 1 and self._rank == 0 and is_shown:
            _log.warning("%s lets one thread alone communicate: of this job, rank 0 alone is shown", messages.library)
        self._gathering = Gathering(gathered, self._rank, self._size)
        self._start_writing()

    def _show_job(self, address: tuple[str, int], recoveries: int) -> None:
        """Show at rank 0 what is gathered there."""
        if self._config.key_file is not None and address[0] not in _LOOPBACK:
            raise ConfigError(
                f"RINGREDUCE_KEY_FILE seals what ranks send, but the status would be served on {address[0]} "
                f"unencrypted: leave out its host, and reach it by ssh -L {address[1]}:127.0.0.1:{address[1]}"
            )
        if self._rank == 0 and self._gathering is not None:
            from ringreduce.observe.out.job_server import serve_job  # its libraries take time, and few jobs need them

            self._view = JobView(self._size, launch().restarts, recoveries)
            self._server = serve_job(address, self._config.status_token_file, self._gathering, self._view)

    def watch(self, observed: Observed) -> None:
        """Observe this rank as a member of one thing more."""
        self.recorder.watch(observed)
        self._attach(observed)

    def detach(self) -> None:
        """Let the trace see nothing more."""
        for instruments, track in self._tracks:
            instruments.remove(track)
        self._tracks.clear()

    def refuse(self, what: str, error: BaseException) -> None:
        """Record that something was refused; see `AuditRecord.refuse`."""
        if self.audit is not None:
            self.audit.refuse(what, error)

    def forked(self) -> None:
        """Observe nothing in a process that this rank has forked; what it serves stays the rank's."""
        self.detach()
        if self._server is not None:
            self._server.server_close()

    def end_audit(self, error: str | None) -> None:
        """Record that this world ends, and why; the first reason counts."""
        if self.audit is None:
            return
        values = {} if self._gathering is None else last_values(self._gathering.latest())
        own = self.recorder.values  # an error may come from a signal handler, and leave a device that does not answer
        values[self._rank] = own.last() if error is None else own.last_read()
        self.audit.end(error, values)

    def end(self, error: str | None = None) -> None:
        """Observe nothing more, as this world ends; ``error``: why, if something went wrong."""
        self.end_audit(error)
        self._ends.set()
        if self._writer is not None:
            self._writer.join(_PATIENCE_S)
        if self._server is not None:
            self._server.end()
        if self._telemetry is not None:
            self._telemetry.end(waits=error is None)
        if self._gathering is not None and not (self._writer is not None and self._writer.is_alive()):
            self._gathering.end(together=error is None)
        self.recorder.end_status()
        self.stop_timeline()
        for each in self._ended.values():
            each.stop(ranks=0, at_once=error is not None)  # those that have not begun it by now do not come

    def report(self, metrics: Metrics, nodes: Sequence[Sequence[int]]) -> JobReport | None:
        """Return what the steps of this job took, and why; None: there were too few.

        Args:
            metrics: of this rank.
            nodes: the ranks of each host.
        """
        recorder = self.recorder
        now = [] if self._gathering is None else self._gathering.latest()
        if not now and recorder.told is not None:
            now = [recorder.told]
        laps = [] if recorder.step_clock is None else [*recorder.step_clock.laps]
        figures = figures_of(
            metrics,
            laps,
            nodes=nodes,
            began_s=self._began_s,
            made=recorder.steps,
            hosts={each.rank: each.host for each in now},
            uses=uses_of(now),
        )
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

    def _start_writing(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="ringreduce observer", daemon=True)
            self._writer.start()

    def _write(self) -> None:
        while not self._ends.wait(_EVERY_S):
            if (timeline := self._timeline) is not None:
                timeline.write()
            # The program goes on meanwhile, and may change what is looked at; then the next time will do.
            with suppress(RuntimeError, OSError, RingReduceError):
                status = self.recorder.write_status()
                if self._gathering is not None and status is not None:
                    self._gathering.tell(status)
                    self._watch(status)
                    if self._view is not None:
                        self._view.remember(self._gathering.latest(), self._gathering.earlier())

    def _watch(self, status: Snapshot) -> None:
        """Look whether the job stalls: each rank writes down what it does then, and rank 0 says why."""
        seen = [status] if self._rank or self._gathering is None else self._gathering.latest()
        said = None if self._watchdog is None else self._watchdog.look(seen)
        if said is None:
            return
        folder = self._config.dump or "ringreduce-dumps"
        with suppress(OSError):  # then the other ranks may have written theirs
            self.recorder.dump(folder)
        if self._rank:
            return
        ends = self._config.watchdog_action != "dump"
        then = "; the job is ended" if ends else ""
        _log.error("%s. `ringreduce doctor --dump %s` shows what each rank does%s", said, folder, then)
        if ends:
            time.sleep(_TO_DUMP_S)  # nothing says when the other ranks have written what they do
            if launch().survives_deaths:  # else the others would go on without this rank
                notify_launcher("stalls")
            else:
                self._abort(STALLED)

    # ---- the trace ----

    def start_timeline(self, path: str | os.PathLike[str], *, mark_batches: bool) -> None:
        """Begin to write a trace; see `ringreduce.start_timeline`."""
        if self._timeline is not None:
            raise ConfigError("a timeline is being written already; call stop_timeline() first")
        if self._stopped:  # else it is the last one that is tried again on this rank
            self._ntimelines = self._ntimelines + 1
            self._stopped = False
        host = platform.node()
        self._timeline = Timeline(
            path,
            self._clock,
            number=self._ntimelines,
            rank=self._rank,
            host=host,
            mark_batches=mark_batches,
            keys=self.recorder.keys,
        )
        self._start_writing()
        self._ended.pop(os.path.abspath(path), None)
        for each in self.recorder.observed:
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
            finished = self._timeline
            self._timeline = None
            finished.stop(self._size)
            self._ended[finished.path] = finished

    def program(self) -> Program | None:
        """Return the row of the program in the trace that is being written; None: there is none."""
        return None if self._timeline is None else self._timeline.program()

    def flush_timeline(self) -> None:
        """Let the trace hold all that this rank has done, as its process ends now."""
        if self._timeline is not None:
            self._timeline.stop(self._size, at_once=True)

    def _attach(self, observed: Observed) -> None:
        """Let the timeline, if there is one, see what this rank does as a member of something."""
        if self._timeline is None or not observed.is_open():
            return
        for kind, communicator in observed.communicators.items():
            name = f"{observed.name}: {kind}"
            place = f"{observed.name} {list(observed.ranks)}: {kind}"
            track = self._timeline.track(name, place, communicator.rank, communicator.size)
            communicator.instruments.add(track)
            self._tracks.append((communicator.instruments, track))


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
