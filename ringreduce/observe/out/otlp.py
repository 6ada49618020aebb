"""What all ranks do, sent to a collector of OpenTelemetry: metrics, and steps as spans. Imported where that is wanted.

Where the collector is, and how this job is called, OpenTelemetry reads from its own variables of the environment.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import set_span_in_context

from ringreduce.common.config import VERSION
from ringreduce.observe.job.gathering import Gathering
from ringreduce.observe.job.job_view import JobView
from ringreduce.observe.out.metric_table import families_of_job
from ringreduce.observe.seen.metrics import Family
from ringreduce.observe.seen.snapshots import Snapshot

_EVERY_S = 1.0  # as often as ranks say what they do
_LOOKS = 15  # of which one sends
_PATIENCE_S = 2.0  # in the end, with a collector that is slow or away


class Telemetry:
    """Sends what is gathered from a thread of its own; what a collector does not take is lost.

    OpenTelemetry's own threads would run on in processes that this one forks.

    Args:
        gathering: has the snapshots of all ranks.
        view: of the job.
    """

    def __init__(self, gathering: Gathering, view: JobView) -> None:
        self._gathering = gathering
        self._view = view
        self._families: Sequence[Family] = ()
        self._hosts: dict[str, str] = {}  # by rank
        self._known: dict[int, tuple[int, float, float]] = {}  # by rank: steps, samples, and when they ended
        self._made = InMemorySpanExporter()
        self._spans = OTLPSpanExporter()
        metrics = OTLPMetricExporter()
        for each in (self._spans, metrics):
            _say_once(logging.getLogger(type(each).__module__))
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(SimpleSpanProcessor(self._made))
        self._tracer = tracers.get_tracer("ringreduce", VERSION)
        # A reader that reads when it is told to has no thread.
        self._meters = MeterProvider([PeriodicExportingMetricReader(metrics, math.inf)], shutdown_on_exit=False)
        meter = self._meters.get_meter("ringreduce", VERSION)
        for place, (name, kind, meaning, _) in enumerate(families_of_job(view, [])):
            make = meter.create_observable_counter if kind == "counter" else meter.create_observable_gauge
            make(f"ringreduce.{name}", [partial(self._observe, place)], description=meaning)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringreduce otlp", daemon=True)
        self._thread.start()

    def end(self, *, waits: bool) -> None:
        """Send the last of it, and no more; ``waits``: for the collector to take it, at most two seconds."""
        self._ends.set()
        if waits:
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        for looks in count(1):
            ends = self._ends.wait(_EVERY_S)
            now = self._gathering.latest()
            self._follow(now)
            if ends or looks % _LOOKS == 0:
                self._send(now)
            if ends:
                return

    def _send(self, now: Sequence[Snapshot]) -> None:
        self._families = families_of_job(self._view, now)
        self._hosts = {str(each.rank): each.host for each in now}
        self._spans.export(self._made.get_finished_spans())
        self._made.clear()
        self._meters.force_flush()

    def _observe(self, place: int, options: CallbackOptions) -> Iterator[Observation]:
        """Yield the values of a family, of ranks with their hosts."""
        for labels, value in self._families[place][3]:
            host = {"host": self._hosts[labels["rank"]]} if "rank" in labels else {}
            yield Observation(value, {**labels, **host})

    def _follow(self, now: Sequence[Snapshot]) -> None:
        """Make spans of the steps that have ended since the last look: one of each rank, within one of the job."""
        more: list[tuple[Snapshot, float, int, float]] = []
        for each in now:
            _, steps, samples, _ = each.samples[-1]
            known = self._known.get(each.rank, (0, 0, each.began))
            if steps > known[0]:
                more.append((each, known[2], steps - known[0], samples - known[1]))
                self._known[each.rank] = steps, samples, each.stepped
        if not more:
            return
        began = min(each[1] for each in more)
        about: dict[str, Any] = {"job": more[0][0].job, "steps": max(each[2] for each in more)}
        job = self._tracer.start_span("steps", start_time=_ns(began), attributes=about)
        for each, then, steps, samples in more:
            about = {"rank": each.rank, "host": each.host, "steps": steps, "samples": samples}
            name = f"rank {each.rank}"
            rank = self._tracer.start_span(name, set_span_in_context(job), start_time=_ns(then), attributes=about)
            rank.end(_ns(each.stepped))
        job.end(_ns(max(each.stepped for each, *_ in more)))


def _say_once(log: logging.Logger) -> None:
    """Let a library that repeats itself with each try say each thing once."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        known = record.msg in seen
        seen.add(record.msg)
        return not known

    log.addFilter(is_new)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
