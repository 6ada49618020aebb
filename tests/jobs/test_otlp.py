"""A job sends what all ranks do to a collector of OpenTelemetry, which reads it by the protocol's own messages."""

from __future__ import annotations

import platform
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from launching import RINGREDUCE, run

REASON = "OpenTelemetry is not installed: scripts/install, or the extra otlp"
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=REASON)
metrics_service: Any = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
trace_service: Any = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

STEPS, SAMPLES = 100, 8
PROGRAM = f"""
import os, time
import numpy as np
import ringreduce as rr

rr.init()
for step in range({STEPS}):
    rr.allreduce(np.ones(3))
    time.sleep(0.02)  # of a step
    rr.count(steps=1, samples={SAMPLES})
    rr.report_value("loss", step + rr.rank())
if (child := os.fork()) == 0:
    import threading
    os._exit(threading.active_count() > 1)
assert os.waitpid(child, 0)[1] == 0
time.sleep(2.5)  # ranks say once a second what they do
rr.barrier()
print("has ended well")
"""
TYPES = {
    "/v1/metrics": metrics_service.ExportMetricsServiceRequest,
    "/v1/traces": trace_service.ExportTraceServiceRequest,
}


class Collector(ThreadingHTTPServer):
    """Keeps the requests that come, by their paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.came: dict[str, list[Any]] = {path: [] for path in TYPES}


class Handler(BaseHTTPRequestHandler):
    """Of one connection to the collector."""

    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.came[self.path].append(TYPES[self.path].FromString(body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None: ...


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def variables(port: int) -> dict[str, str]:
    return {
        "RINGREDUCE_OTLP": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_SERVICE_NAME": "train",
        "OTEL_RESOURCE_ATTRIBUTES": "team=vision",
    }


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


def test_a_collector_gets_metrics_and_steps_of_all_ranks() -> None:
    """Each step of a rank is in one of its spans, which follow each other, within spans of the job."""
    job = (RINGREDUCE, "run", "-np", 2, sys.executable, "-c", PROGRAM)
    with collecting() as collector:
        done = run(*job, **variables(collector.server_port))
    assert (done.returncode, done.stdout.count("has ended well")) == (0, 2), done.stderr
    assert "xport" not in done.stderr
    metrics = [each for request in collector.came["/v1/metrics"] for each in request.resource_metrics]
    traces = [each for request in collector.came["/v1/traces"] for each in request.resource_spans]
    for each in (*metrics, *traces):
        resource = attributes(each.resource)
        assert (resource["service.name"], resource["team"]) == ("train", "vision")
    spans = [span for each in traces for scope in each.scope_spans for span in scope.spans]
    jobs = {span.span_id: span for span in spans if not span.parent_span_id}
    assert {span.name for span in jobs.values()} == {"steps"}
    host = platform.node()
    for rank in range(2):
        mine = sorted(
            (span for span in spans if span.name == f"rank {rank}"), key=lambda span: span.start_time_unix_nano
        )
        said = [attributes(span) for span in mine]
        assert {(each["rank"], each["host"]) for each in said} == {(rank, host)}
        assert len(mine) > 1
        assert (sum(each["steps"] for each in said), sum(each["samples"] for each in said)) == (STEPS, STEPS * SAMPLES)
        for span, about in zip(mine, said, strict=True):
            assert span.end_time_unix_nano - span.start_time_unix_nano >= 0.99 * about["steps"] * 0.02 * 1e9
            parent = jobs[span.parent_span_id]
            assert span.trace_id == parent.trace_id
            assert attributes(parent)["steps"] >= about["steps"]
        ends = [span.end_time_unix_nano for span in mine]
        assert [span.start_time_unix_nano for span in mine[1:]] == ends[:-1]
    last = {each.name: each for each in metrics[-1].scope_metrics[0].metrics}
    steps = last["ringreduce.steps"].sum
    assert (steps.is_monotonic, steps.aggregation_temporality) == (True, 2)  # cumulative
    counted = {(attributes(each)["rank"], attributes(each)["host"]): each.as_int for each in steps.data_points}
    assert counted == {("0", host): STEPS, ("1", host): STEPS}
    (value,) = last["ringreduce.value"].gauge.data_points
    assert (attributes(value)["name"], value.as_double) == ("loss", STEPS - 0.5)
    assert {attributes(each)["host"] for each in last["ringreduce.memory_used_bytes"].gauge.data_points} == {host}


@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_a_collector_that_is_away_ends_nothing(how: str) -> None:
    """What is wrong is said once, and not with each try."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if how == "is silent":
            listening.listen()
        job = (RINGREDUCE, "run", "-np", 2, sys.executable, "-c", PROGRAM)
        done = run(*job, **variables(listening.getsockname()[1]))
    assert (done.returncode, done.stdout.count("has ended well")) == (0, 2), done.stderr
    said = [line for line in done.stderr.splitlines() if "xport" in line]
    assert len(said) == len(set(said)) <= 4
    assert said or how == "is silent"
