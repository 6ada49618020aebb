"""Serves what a job does, from rank 0: that is where all ranks are heard, whatever has started them."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from http import HTTPStatus

from ringreduce.common.errors import ConfigError
from ringreduce.observe.gathering import Gathering
from ringreduce.observe.job_page import job_page
from ringreduce.observe.job_view import JobView, rows, usage
from ringreduce.observe.serving import OPENMETRICS, Answer, TextServer, job_token

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
        found = rows(now)
        hosts = usage(now, gathering.earlier())
        text = job_page(view.health(found), found, hosts, lines=view.lines())
        return Answer(text, "text/html; charset=utf-8", every_s=_EVERY_S)

    def health() -> Answer:
        found = view.health(rows(gathering.latest()))
        status = HTTPStatus.OK if found["alive"] else HTTPStatus.SERVICE_UNAVAILABLE
        return Answer(json.dumps(found) + "\n", "application/json", status)

    answers = {
        "/": page,
        "/metrics": lambda: Answer(view.metrics(gathering.latest()), OPENMETRICS),
        "/health": health,
        "/ranks": lambda: Answer(json.dumps(rows(gathering.latest())), "application/json"),
    }
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
