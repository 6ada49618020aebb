"""Jobs on several hosts: network namespaces on this machine, with links of limited rate, under one mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import faults
import pytest
import test_growth
from elastic_trainings import run as run_training
from elastic_trainings import settings_of_hosts
from launching import needs

SCRIPT = Path(__file__).parents[2] / "scripts" / "cluster"
NAME = f"t{os.getpid() % 10_000}"  # names of network devices are short


def cluster(*words: str, name: str = NAME, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run the script on the cluster of these tests."""
    command = [sys.executable, str(SCRIPT), "--name", name, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def why_not() -> str:
    """Return why no cluster can be made here, nothing if it can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    missing = [program for program in ("ip", "tc", "unshare", "mpirun") if shutil.which(program) is None]
    if missing:
        return f"there is no {' and no '.join(missing)}"
    tried = cluster("up", "1", name=f"{NAME}x")
    cluster("down", name=f"{NAME}x")
    return tried.stderr.strip()


@pytest.fixture(scope="module", autouse=True)
def hosts() -> Iterator[None]:
    """Four hosts on links of 1 Gbit/s."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = cluster("up", "4", "--rate", "1gbit")
    assert made.returncode == 0, made.stderr
    yield
    done = cluster("down")
    assert (done.returncode, done.stderr) == (0, "")
    assert not [each for each in Path("/run/netns").iterdir() if each.name.startswith(NAME)]


def run(program: str, ranks: int, per_host: int) -> list[str]:
    """Run a program on several ranks; return what they print, sorted."""
    done = cluster(
        "run", "-np", str(ranks), "--per-host", str(per_host), "--timeout", "50", sys.executable, "-c", program
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_ranks_know_their_hosts() -> None:
    """Four nodes of two ranks each, that share memory within."""
    program = """if True:
        import ringreduce as rr
        rr.init()
        print(rr.rank(), rr.local_rank(), rr.cross_rank(), rr.world().topology.describe())
    """
    assert run(program, 8, 2) == [f"{rank} {rank % 2} {rank // 2} 8 ranks on 4 nodes x 2" for rank in range(8)]


@pytest.mark.parametrize(("ranks", "per_host"), [(4, 1), (8, 2), (5, 2)])
def test_collectives_are_right_between_hosts(ranks: int, per_host: int) -> None:
    """Every algorithm, small and large, on even and uneven nodes; the same bits on all ranks."""
    program = f"""if True:
        import zlib, numpy as np, ringreduce as rr
        rr.init()
        communicator, size = rr.world(), {ranks}
        bits = []
        for count in (3, 1001, 300_007):
            data = [np.random.default_rng(rank).integers(-9, 9, count).astype(np.float32) for rank in range(size)]
            for algorithm in [None, *communicator.algorithms()]:
                result = rr.allreduce(data[rr.rank()], algorithm=algorithm)
                assert (result == sum(data)).all(), algorithm
            noise = np.random.default_rng(rr.rank()).standard_normal(count).astype(np.float32)
            for options in ({{}}, {{"deterministic": True}}, {{"compression": "int8"}}, {{"compression": "bf16"}}):
                bits.append(zlib.crc32(rr.allreduce(noise, **options).tobytes()))
        rows = np.full((rr.rank() + 1, 2), rr.rank())
        assert (rr.allgather(rows)[:, 0] == np.repeat(np.arange(size), np.arange(size) + 1)).all()
        assert (rr.broadcast(rows[:1], root=1) == 1).all()
        print(bits)
    """
    assert len(set(run(program, ranks, per_host))) == 1


@pytest.mark.parametrize(("ranks", "per_host"), [(4, 1), (4, 2)])
def test_training_between_hosts_is_compressed(ranks: int, per_host: int) -> None:
    """Weights are equal on all ranks, and do not depend on when buckets travel; helpers work as well."""
    needs("torch")
    program = """if True:
        import torch, ringreduce.torch as hvd
        torch.set_num_threads(1)
        hvd.init()
        trained = []
        for overlap in (None, False):
            torch.manual_seed(hvd.rank())
            model = torch.nn.Sequential(torch.nn.Linear(300, 70), torch.nn.ReLU(), torch.nn.Linear(70, 50))
            hvd.broadcast_parameters(model.state_dict())
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = hvd.DistributedOptimizer(
                inner, compression=hvd.Compression.int8, overlap=overlap, bucket_nbytes=4096
            )
            for step in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 300)).square().mean().backward()
                optimizer.step()
            assert optimizer.overlaps is (overlap is None)
            assert 0.0 < optimizer.compression_error < 0.02
            trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        assert torch.equal(*trained)
        handles = [hvd.allreduce_async(torch.ones(3), name=name, op=hvd.Sum) for name in "abc"]
        assert all(hvd.synchronize(handle).tolist() == [hvd.size()] * 3 for handle in handles)
        weights = hvd.allgather_object(trained[0])
        assert all(torch.equal(each, weights[0]) for each in weights)
        print("trained")
    """
    assert run(program, ranks, per_host) == ["trained"] * ranks


def test_a_stream_gets_what_the_link_allows() -> None:
    """No more than the rate, and more than nothing."""
    assert 0.1 < float(cluster("stream").stdout) < 1.0


def test_mistakes_are_said_in_a_line() -> None:
    """A cluster that is there already, one that is not, too many ranks, no command."""
    for words, message in (
        (("up", "2"), "already"),
        (("run", "-np", "9", "--per-host", "2", "true"), "do not hold 9"),
        (("run", "-np", "2"), "run what?"),
    ):
        done = cluster(*words)
        assert done.returncode == 2
        assert message in done.stderr
    done = cluster("run", "-np", "2", "true", name=f"{NAME}n")
    assert (done.returncode, "0 hosts" in done.stderr) == (2, True)


def test_a_job_that_does_not_end_is_ended() -> None:
    """Its processes are gone afterwards, and the exit status says so."""
    done = cluster("run", "-np", "2", "--timeout", "3", "sleep", "600")
    assert done.returncode == 124
    assert "killed" in done.stderr


@pytest.mark.parametrize("how", ["SIGKILL", "os._exit"])
@pytest.mark.parametrize("where", ["backward", "share"])
def test_the_others_go_on_without_a_rank_of_another_host(how: str, where: str) -> None:
    """A death on the host that mpirun is not on: `ringreduce run` with hosts, and elastic training between them."""
    death = f"{faults.RANKS - 1}@{faults.STEP}:{where}:{how}"
    _, wrong = run_training(faults.cell("two hosts", death, copy=4), NAME)
    assert not wrong


def test_a_job_grows_and_replaces_its_dead_between_hosts(tmp_path: Path) -> None:
    """What the launcher says reaches ranks of another host, and what is said of a death there reaches the launcher."""
    here, there = f"{NAME}-host0", f"{NAME}-host1"
    before = (sys.executable, str(SCRIPT), "--name", NAME, "exec", "0")
    settings = {**settings_of_hosts(NAME), "HOSTS_THEN": f"{here}:1\n{there}:2\n"}
    script = test_growth.script_in(tmp_path, f"{here}:1\n{there}:1\n")
    arguments = ["-np", 2, "--max-np", 3, "--host-discovery-script", script]
    grown = test_growth.run(tmp_path, arguments, "more slots", 3, before=before, **settings)
    assert grown.returncode == 0, grown.stderr
    said = ["2 ranks from step 0", "3 ranks from step 6", "3 ranks have seen each row {3} times"]
    assert grown.stdout.splitlines() == said

    (tmp_path / "other").mkdir()
    arguments = ["-np", 2, "-H", f"{here}:1,{there}:1", "--cooldown", 0]
    replaced = test_growth.run(tmp_path / "other", arguments, "a death", 2, before=before, **settings)
    assert replaced.returncode == 0, replaced.stderr
    said = ["2 ranks from step 0", "1 ranks from step 6", "2 ranks from step 6", "2 ranks have seen each row {3} times"]
    assert replaced.stdout.splitlines() == said
