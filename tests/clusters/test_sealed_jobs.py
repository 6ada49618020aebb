"""Jobs on several hosts whose messages are sealed: hosts and ranks are lost, and messages are changed on their way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lost_hosts import Training, elastic, listed, nothing_is_left, ranks_of
from machines import Cluster, cluster_of

from ringreduce.audit.chain import examine, is_signed
from ringreduce.common.keys import read_secret, write_secret

cluster = cluster_of("ssh", 3)


@pytest.fixture
def folder(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """A folder that the hosts share, with a key."""
    made = cluster.shared / request.node.name
    made.mkdir()
    write_secret(made / "key")
    return made


def recorded(folder: Path) -> list[dict]:
    """Return the lines of the record of a job; they are one chain, and all are signed."""
    found = examine((folder / "audit").read_bytes())
    key = read_secret(folder / "key", "KEY")
    assert (found.wrong, [each["line"] for each in found.lines if not is_signed(each, key)]) == (None, [])
    return found.lines


def kill_rank(cluster: Cluster, number: int, training: Training) -> None:
    """Kill the rank that waits for its end, on this host."""
    assert cluster.run(number, "kill", "-KILL", (training.commits / "waits").read_text()).status == 0


@pytest.mark.parametrize(
    ("lose", "restarts"),
    [
        pytest.param(kill_rank, 0, id="rank"),
        pytest.param(lambda cluster, number, training: cluster.die(number), 1, id="power", marks=pytest.mark.thorough),
        pytest.param(
            lambda cluster, number, training: cluster.unplug(number), 1, id="cable", marks=pytest.mark.thorough
        ),
    ],
)
def test_an_elastic_job_goes_on(
    lose: Callable[[Cluster, int, Training], None], restarts: int, cluster: Cluster, folder: Path
) -> None:
    """With the weights of a training that nothing has disturbed, and new keys."""
    words = ("env", f"RINGREDUCE_AUDIT={folder / 'audit'}", "RINGREDUCE_LOG_LEVEL=info")
    training = Training(cluster, cluster.host(2), *words, *elastic(cluster, f"--encrypt={folder / 'key'}"))
    training.until("waits")
    lose(cluster, 2, training)
    ended = training.end()
    if restarts:
        cluster.boot(2)
    assert ended == (0, ranks_of(cluster, 2)), training.text
    assert training.text.count("(sealed) between them") >= 2  # of both worlds
    begins = [each["facts"] for each in recorded(folder) if each["event"] == "begin"]
    assert [(each["size"], len(each["hosts"]), each["restart"]) for each in begins] == [(3, 3, 0), (2, 2, restarts)]
    assert recorded(folder)[-1]["event"] == "end"
    nothing_is_left(cluster, 0, 1)


ATTACKED = """
import attacks
import numpy as np
import ringreduce as rr

attacks.install()
rr.init()
if rr.rank() == 1:
    attacks.ATTACK.arm("data", "change", 0)
rr.allreduce(np.ones(5003), rr.SUM, algorithm="ring")
print("went on")
rr.barrier()
"""


def test_what_a_rank_of_another_host_refuses_is_recorded(cluster: Cluster, folder: Path) -> None:
    """Rank 2 gets a changed message, and rank 0, on a host of its own, hears of it before the job ends."""
    program = cluster.write("attacked.py", ATTACKED)
    variables = {
        "RINGREDUCE_AUDIT": str(folder / "audit"),
        "PYTHONPATH": str(Path(__file__).parents[1] / "jobs" / "programs"),
    }
    words = ("-x", "PYTHONPATH", f"--encrypt={folder / 'key'}", "-H", listed(cluster), "python", str(program))
    done = cluster.run(0, "ringreduce", "run", *words, variables=variables)
    assert done.status not in (0, 124), done.text
    lines = recorded(folder)
    assert [each["event"] for each in lines] == ["begin", "refused", "end"], done.text
    assert lines[1]["ranks"] == [0]
    assert "rank 2 has given up" in lines[1]["facts"]["error"]
    assert "from rank 1" in lines[1]["facts"]["error"]
