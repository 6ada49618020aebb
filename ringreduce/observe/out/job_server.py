"""Serves what a job does, from rank 0: that is where all ranks are heard, whatever has started them."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from dataclasses import asdict
from http import HTTPStatus

from ringreduce.common.errors import ConfigError
from ringreduce.observe.job.gathering import Gathering
from ringreduce.observe.job.job_view import JobView, rows
from ringreduce.observe.out.job_page import job_page
from ringreduce.observe.out.metric_table import families_of_job, prometheus_text
from ringreduce.observe.out.serving import OPENMETRICS, Answer, TextServer, job_token

_log = logging.getLogger(__name__)

_EVERY_S = 5  # browsers ask again


def serve_job(
    address: tuple[str, int], token_file: str | None, gathering: Gathering, view: JobView
) -> TextServer | None:
    """Start to serve a job: its page, ``/metrics``, ``/health``, and ``/ranks`` for `ringreduce top`.

    Args:
        address: host and port.
        token_file: with the token; None: that of this user.
        gathering: has the snapshots of all ranks.
        view: of the job.

    Returns:
        What serves it; None: it cannot be served, which is logged, and the job goes on.
    """

    def page() -> Answer:
        now = gathering.latest()
        before = gathering.earlier()
        ranks = rows(now)
        families = families_of_job(view, now), families_of_job(view, before)
        passed_s = now[0].time - before[0].time if now else 0.0
        text = job_page(view.health(ranks), ranks, *families, passed_s=passed_s, lines=view.lines())
        return Answer(text, "text/html; charset=utf-8", every_s=_EVERY_S)

    def health() -> Answer:
        state = view.health(rows(gathering.latest()))
        status = HTTPStatus.OK if state.alive else HTTPStatus.SERVICE_UNAVAILABLE
        return Answer(json.dumps(asdict(state)) + "\n", "application/json", status)

    def metrics() -> Answer:
        return Answer(prometheus_text(families_of_job(view, gathering.latest())), OPENMETRICS)

    def ranks() -> Answer:
        return Answer(json.dumps([asdict(each) for each in rows(gathering.latest())]), "application/json")

    answers = {"/": page, "/metrics": metrics, "/health": health, "/ranks": ranks}
    try:
        token, where = job_token(token_file, make=True)
        server = TextServer(*address, answers=answers, token=token)
    except ConfigError as error:
        _log.warning("nobody sees what this job does: %s", error)
        return None
    server.start()
    said = f"rank 0 serves what the job does at {server.address}/, to who has the token in {where} of its host"
    with suppress(OSError, ValueError):  # its reader has ended, or the program has closed it
        sys.stderr.write(f"ringreduce: {said}\n")
        sys.stderr.flush()
    return server
