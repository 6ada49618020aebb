"""Debian's Prometheus scrapes a job, evaluates the rules, and answers the queries of the dashboard.

`scripts/install monitoring` installs both.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import launching
import pytest
from served_jobs import RUN, everyone, free_port, running

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
RULES = MONITORING / "rules.yml"

if shutil.which("prometheus") is None or shutil.which("promtool") is None:
    pytest.skip("there is no Prometheus: scripts/install monitoring", allow_module_level=True)

#: Of the rules: series as promtool writes them, one value every 15 s, and by which time the alert is there.
MINE = '{instance="host:9400",job="0123abcd"'
FIRING = {
    "RingreduceNoSteps": ({f'ringreduce_last_step_seconds{MINE},rank="{rank}"}}': "0+15x40" for rank in (0, 1)}, "6m"),
    "RingreduceRanksMissing": ({f"ringreduce_ranks_missing{MINE}}}": "0x10 2x10"}, "4m"),
    "RingreduceNotServed": ({'up{instance="host:9400",job="ringreduce"}': "1x4 0x20"}, "5m"),
    "RingreduceRestarts": (
        {
            f'ringreduce_restarts_total{{instance="host:9400",job="{word}"}}': f"{'_ ' * 20 * count}{count}x20"
            for count, word in enumerate(("a", "b", "c", "d"))
        },
        "18m",
    ),
    "RingreduceNetworkFull": (
        {
            f'ringreduce_network_bytes_total{MINE},host="h",device="eth0",direction="transmit"}}': "0+17625000000x60",
            f'ringreduce_network_speed_bits{MINE},host="h",device="eth0"}}': "10000000000x60",
        },
        "12m",
    ),
    "RingreduceRetransmissions": (
        {
            f'ringreduce_tcp_segments_total{MINE},host="h",kind="sent"}}': "0+1000x60",
            f'ringreduce_tcp_segments_total{MINE},host="h",kind="retransmitted"}}': "0+11x60",
        },
        "14m",
    ),
    "RingreduceMemoryShort": (
        {
            f'ringreduce_memory_used_bytes{MINE},host="h"}}': "96x60",
            f'ringreduce_memory_limit_bytes{MINE},host="h"}}': "100x60",
        },
        "3m",
    ),
    "RingreduceSwaps": ({f'ringreduce_swapped_pages_total{MINE},host="h"}}': "0+1515x60"}, "12m"),
    "RingreduceProcessorTaken": (
        {
            f'ringreduce_host_processor_seconds_total{MINE},host="h",mode="steal"}}': "0+11x60",
            f'ringreduce_host_processor_seconds_total{MINE},host="h",mode="user"}}': "0+89x60",
        },
        "14m",
    ),
}


#: May fire in tests, whatever the job does.
OF_MACHINES = {
    "RingreduceMemoryShort",
    "RingreduceNetworkFull",
    "RingreduceProcessorTaken",
    "RingreduceRetransmissions",
    "RingreduceSwaps",
}


def promtool(*words: object) -> str:
    done = launching.run("promtool", *words, limit_s=60).well()
    return done.stdout


def test_the_rules_fire(tmp_path: Path) -> None:
    """Each of them where its condition is met, and none of the others; promtool evaluates them."""
    assert f"{len(FIRING)} rules found" in promtool("check", "rules", RULES)
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert alerts == FIRING.keys()
    tests = []
    for name, (series, when) in FIRING.items():
        tests.append(
            {
                "interval": "15s",
                "input_series": [{"series": each, "values": values} for each, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count by (alertname) (ALERTS{{alertname="{other}",alertstate="firing"}})',
                        "eval_time": when,
                        "exp_samples": [{"labels": f'{{alertname="{other}"}}', "value": 1}] if other == name else [],
                    }
                    for other in sorted(alerts)
                ],
            }
        )
    path = tmp_path / "rules_test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", path)


class Scraper:
    """A Prometheus that runs."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, path: str, **words: str) -> Any:
        """Return what its interface answers."""
        address = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(address, timeout=30) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, query: str) -> list[dict[str, Any]]:
        """Return the present values of an expression."""
        return list(self.ask("query", query=query)["result"])

    def until(self, wanted: Callable[[], Any]) -> Any:
        """Return what a function returns, once that is something."""
        deadline = time.monotonic() + launching.LIMIT_S - 40
        while time.monotonic() < deadline:
            try:
                if found := wanted():
                    return found
            except OSError:
                pass  # it does not listen yet
            time.sleep(0.2)  # nothing says when there is something new
        raise AssertionError(f"Prometheus never saw it; its targets: {self.ask('targets')}")


@contextmanager
def scraping(folder: Path, target: int) -> Iterator[Scraper]:
    """Run Prometheus as docs/observe.md sets it up, but that it looks every second."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "ringreduce",
                "honor_labels": True,
                "authorization": {"credentials_file": str(folder / "token")},
                "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
            }
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))
    promtool("check", "config", path)
    port = free_port()
    words = [
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with log.open("wb") as file:
        process = subprocess.Popen(["timeout", "110", "prometheus", *words], stdout=file, stderr=file)
    try:
        yield Scraper(port)
    finally:
        process.terminate()
        process.wait(30)


def test_prometheus_scrapes_a_job(tmp_path: Path) -> None:
    """All its metrics are accepted; every query of the dashboard answers; a job that has ended is noticed."""
    with running(tmp_path, *RUN, "-np", 2) as job:
        job.health(everyone(2))
        with scraping(tmp_path, job.port) as prometheus:
            steps = "count(rate(ringreduce_steps_total[10s]) > 0)"
            prometheus.until(lambda: [each["value"][1] for each in prometheus.query(steps)] == ["2"])
            prometheus.until(lambda: is_scraped_well(prometheus))
            families = set(re.findall(r"^# TYPE (\w+) \w+$", job.get("/metrics"), re.MULTILINE))
            # What has come since the last look of Prometheus, it sees at the next one; a rate takes two.
            prometheus.until(lambda: not unknown(families, prometheus.ask("label/__name__/values")))
            for query in queries():
                needed = {name.removesuffix("_total") for name in re.findall(r"ringreduce_\w+", query)}
                if needed <= families:
                    prometheus.until(partial(prometheus.query, query))
                else:
                    prometheus.query(query)
            job.end()
            gone = 'ALERTS{alertname="RingreduceNotServed",alertstate="pending"}'
            prometheus.until(lambda: prometheus.query(gone))


def is_scraped_well(prometheus: Scraper) -> bool:
    """Return whether the last look was in time, and no alert is near but those that are about this machine."""
    (target,) = prometheus.ask("targets")["activeTargets"]
    near = {each["labels"]["alertname"] for each in prometheus.ask("alerts")["alerts"]}
    return (target["health"], target["lastError"]) == ("up", "") and near <= OF_MACHINES


def unknown(families: set[str], names: list[str]) -> set[str]:
    """Return the families of metrics that Prometheus does not know."""
    return {name for name in families if not {name, f"{name}_total"} & set(names)}


def queries() -> list[str]:
    """Return the queries of the dashboard, about any job, over the seconds that there are here."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(found) > 12
    return [each.replace('instance=~"$instance"', 'instance=~".*"').replace("[1m]", "[10s]") for each in found]
