"""Elastic training of the example, and `ringreduce run`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import launching
import pytest
from launching import RINGREDUCE, Job, needs

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
SHORT = ["--epochs", 2, "--batch-size", 64]  # of 40 steps of two ranks


def run(*arguments: object) -> Job:
    """Run ``ringreduce run`` with these arguments."""
    return launching.run(RINGREDUCE, "run", *arguments)


def weights(done: Job) -> str:
    """Return what the example says of its weights in the end."""
    found = re.search("weights: ([0-9a-f]{16})", done.stdout)
    assert done.returncode == 0, done.stderr
    assert found is not None, done.stdout
    return found[1]


def assert_two_are_well(done: Job) -> None:
    """Two ranks are left, and say so."""
    assert sorted(re.findall("all is well on (. of .)", done.stdout)) == ["0 of 2", "1 of 2"]


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """What a job says of its weights that nothing disturbs."""
    needs("torch")
    return weights(run("--elastic", "-np", 2, sys.executable, EXAMPLE, *SHORT))


@pytest.mark.parametrize(
    ("step", "commit"),
    [(33, "25|30"), pytest.param(44, "40", marks=pytest.mark.thorough)],
    ids=["in an epoch", "at its end"],
)
def test_a_job_that_begins_again_ends_in_the_same_bits(
    tmp_path: Path, undisturbed: str, step: int, commit: str
) -> None:
    """With too few ranks left, the job goes on from disk, as many ranks as before: as if nothing had happened.

    Commit 40, which is on disk at step 44, is that of the last step of an epoch, of whose samples none is left.
    """
    again = run(
        *("--elastic", "-np", 2, "--min-np", 2, "--max-restarts", 1, sys.executable, EXAMPLE, *SHORT),
        *("--folder", tmp_path / "commits", "--fail", f"0@{step}"),
    )
    assert weights(again) == undisturbed
    assert "too few ranks survive: 1, and --min-np (RINGREDUCE_MIN_NP) is 2" in again.stderr
    assert "starting it again (1 of 1)" in again.stderr
    assert re.search(f"going on from commit ({commit}) on disk", again.stdout)


NOT_ELASTIC = """
import os, signal
import numpy as np
import ringreduce as rr

rr.init()
rr.barrier()
if rr.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
rr.allreduce(np.ones(3))
"""


def test_a_program_that_is_not_elastic_ends_with_a_rank() -> None:
    """What nobody takes ends the others too, with the reason, and the job has failed."""
    done = run("--elastic", "-np", 3, sys.executable, "-c", NOT_ELASTIC)
    assert done.returncode == 1
    assert "rank 1 is lost" in done.stderr


def test_a_rank_that_stops_while_the_others_look_who_is_left_is_killed() -> None:
    """MPI waits for it without limit; the others do not: they go on without both."""
    words = ["-x", "RINGREDUCE_TIMEOUT=3", sys.executable, "-c", DIES_IN_TRAINING, "stops in the recovery"]
    done = run("--elastic", "-np", 4, *words).well()
    assert done.stdout.splitlines() == ["2 14.0"] * 2
    assert "rank 2 of the job does not respond, and is killed" in done.stderr


@pytest.mark.parametrize("options", [(), ("--elastic",)], ids=["", "elastic"])
@pytest.mark.parametrize("imported", ["ringreduce", "mpi4py.MPI"])
def test_a_job_in_which_no_rank_has_come_to_init_is_not_ended(imported: str, options: tuple[str, ...]) -> None:
    """However long it prepares, with MPI or without."""
    program = f"import time, {imported}; time.sleep(1); print('done')"
    done = run("-np", 2, "--quiet", "--start-timeout", 0.5, *options, sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\ndone\n", "")


@pytest.mark.parametrize("comm", ["", "comm=[0, 1]"])
def test_the_start_timeout_counts_where_mpi_has_started_before_init(comm: str) -> None:
    """As where `init` starts it, and the error says so."""
    absent = "MPI.COMM_WORLD.recv(source=0) if MPI.COMM_WORLD.rank else rr.init("
    program = f"import ringreduce as rr; from mpi4py import MPI; {absent}{comm})"
    done = run("-np", 2, "--start-timeout", 2, "-x", "RINGREDUCE_TIMEOUT=20", sys.executable, "-c", program)
    assert done.returncode == 1
    assert re.search(r"Error: waited 2 s for rank 1 to .*; --start-timeout sets this limit\n", done.stderr)


DIES_IN_TRAINING = """
import os, signal, sys
import numpy as np
import ringreduce as rr
from ringreduce.elastic import ObjectState, run
from ringreduce.transport import mpi_job

rr.init()
me = rr.rank()
rendezvous = mpi_job.MpiRanks._rendezvous

def rendezvous_and_stop(self, waiter):
    rendezvous(self, waiter)
    os.kill(os.getpid(), signal.SIGSTOP)

@run
def train(state):
    while state.step < 5:
        if (me, state.step) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        state.total += float(rr.allreduce(np.ones(1))[0])
        state.step += 1
        state.commit()

if me == 2 and "stops in the recovery" in sys.argv:
    mpi_job.MpiRanks._rendezvous = rendezvous_and_stop
state = ObjectState(rr.broadcast_object, rr.rank, step=0, total=0.0)
train(state)
print(rr.size(), state.total)
"""


@pytest.mark.parametrize(
    "between",
    [
        ("sh", "-c", '"$@" 2>"log-$OMPI_COMM_WORLD_RANK"', "sh"),
        (sys.executable, "-c", "import subprocess as s, sys; sys.exit(s.call(sys.argv[1:], stderr=s.DEVNULL))"),
        ("sh", "-c", '"$@" 2>&-', "sh"),
    ],
    ids=["a file", "nowhere, from a program that closes files", "closed"],
)
def test_ranks_may_write_their_errors_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: tuple[str, ...]
) -> None:
    """The launcher hears all the same that they are connected, and nothing that is meant for it is in their files."""
    monkeypatch.chdir(tmp_path)
    done = run("--elastic", "-np", 3, *between, sys.executable, "-c", DIES_IN_TRAINING).well()
    assert done.stdout.splitlines() == ["2 12.0"] * 2
    assert "has died before" not in done.stderr


PRINTS_MESSAGES = """
import os, sys
import numpy as np
import ringreduce as rr
rr.init()
for what in ("has died", "stalls", "has a commit", "begins again"):
    line = f"{os.environ['RINGREDUCE_FENCE']} 1 {os.uname().nodename} {what}"
    for text in (line, f"\\x1eringreduce: rank 1 on {os.uname().nodename} {what}"):
        for file in (sys.stdout, sys.stderr):
            print(text, file=file, flush=True)
for _ in range(3):
    total = rr.allreduce(np.ones(1), op=rr.SUM)
print("well", total[0])
"""


@pytest.mark.parametrize("options", [(), ("--elastic",), ("--elastic", "--min-np", 2, "--max-restarts", 3)])
def test_what_a_rank_prints_is_no_message(options: tuple[object, ...]) -> None:
    """Though it be word for word what a rank tells the launcher: the text may come from anybody's data."""
    done = run(*options, "-np", 2, sys.executable, "-c", PRINTS_MESSAGES).well()
    assert done.stdout.count("well 2.0") == 2
    assert not re.search("^ringreduce: .*(died|again|ended|stall)", done.stderr.replace("\x1eringreduce", ""), re.M)


DIES_BEFORE_INIT = """
import os, sys
if os.environ["OMPI_COMM_WORLD_RANK"] == "1" and "RINGREDUCE_RESTART" not in os.environ:
    {death}
import ringreduce as rr
rr.init()
print(rr.allgather_object(rr.rank()))
"""


@pytest.mark.parametrize(
    "death", ["import not_there", "os.kill(os.getpid(), 9)", "os.dup2(os.pipe()[0], 0); sys.stdin.read()"]
)
@pytest.mark.parametrize("log", [(), ("--log-dir", "logs")], ids=["", "files"])
def test_a_rank_that_does_not_come_to_init_ends_the_attempt(tmp_path: Path, death: str, log: tuple[str, ...]) -> None:
    """At once where it has died, else at --start-timeout: the others would wait in MPI; then the job begins again."""
    program = DIES_BEFORE_INIT.format(death=death)
    options = [*(str(tmp_path / each) if each == "logs" else each for each in log), "--max-restarts", 1]
    limit_s = 3 if "stdin" in death else 100
    done = run("--elastic", "-np", 2, "--start-timeout", limit_s, *options, sys.executable, "-c", program).well()
    assert done.stdout.splitlines()[-1] == "[0, 1]"
    if "stdin" not in death:
        assert "rank 1 has died before all ranks came to init(), so the job is ended" in done.stderr
    else:  # the rank whose time is over says so: in its file, where there are files
        said = done.stderr + "".join(path.read_text() for path in tmp_path.glob("logs/*.log"))
        assert "waited 3 s in init() for rank 1 to call it; --start-timeout sets this limit" in said
    assert "starting it again (1 of 1)" in done.stderr


@pytest.mark.parametrize("options", [(), ("--elastic",)], ids=["", "elastic"])
@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_well_before_init_ends_the_job(end: str, options: tuple[str, ...]) -> None:
    """At once, as the others would wait for it; mpirun takes that for no failure."""
    program = f"import os, sys; os.environ['OMPI_COMM_WORLD_RANK'] == '1' and {end}; import ringreduce as rr; rr.init()"
    done = run("-np", 2, *options, sys.executable, "-c", program)
    assert done.returncode not in (0, 124)
    assert "of 2 ends: rank 1 ended before init()\n" in done.stderr


#: A model, and a copy that one process trains with what the ranks have seen, of which two die.
PROBLEM = """
import copy, os, signal, sys
import torch
from torch import nn
import ringreduce.torch as hvd

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1))
alone = copy.deepcopy(net).double()

def batch(rank, step):
    rows = torch.randn(6, 9, generator=torch.Generator().manual_seed(100 * step + rank))
    return rows, rows.sum(1, keepdim=True).sin()

def descend(model, optimizer, rows, wanted):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(rows), wanted).backward()
    optimizer.step()

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def compare(optimizer, deaths, tolerance):
    for step in range(20):
        batches = [batch(rank, step) for rank in range(4 - sum(step >= death for death in deaths))]
        descend(alone, optimizer, *(torch.cat(each).double() for each in zip(*batches)))
    weights, expected = (torch.cat([each.detach().reshape(-1) for each in of.parameters()]) for of in (net, alone))
    torch.testing.assert_close(weights.double(), expected, rtol=0, atol=tolerance)
    assert all(torch.equal(each, weights) for each in hvd.allgather_object(weights))
    print("all is well on", hvd.rank(), "of", hvd.size(), flush=True)
"""

DDP = (
    PROBLEM
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ringreduce.torch.distributed.ddp import AllreduceState, allreduce_hook

dist.init_process_group("ringreduce")
me = dist.get_rank()
state = hvd.elastic.TorchState(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), step=0)

@hvd.elastic.run
def train(state):
    hooked = dist.get_world_size() == 3
    model = DistributedDataParallel(net, bucket_cap_mb=0.001, gradient_as_bucket_view=hooked)
    if hooked:
        model.register_comm_hook(AllreduceState(), allreduce_hook)
    while state.step < 20:
        if (me, state.step) in ((0, 7), (2, 14)):
            net[2].weight.register_hook(die)  # some buckets of the step are reduced by then
        descend(model, state.optimizer, *batch(dist.get_rank(), state.step))
        state.step += 1
        state.commit()

train(state)
compare(torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), (7, 14), 1e-5)
dist.destroy_process_group()
"""
)


def test_ddp_goes_on_without_ranks() -> None:
    """Ranks die in the midst of backward passes, one of DDP as it is, one of DDP with our hook.

    The others end as one process does with what they have seen.
    """
    needs("torch")
    done = run("--elastic", "-np", 4, sys.executable, "-c", DDP).well()
    assert_two_are_well(done)


SHARDED = (
    PROBLEM
    + """
from ringreduce.torch.split_updates import SplitUpdates
from ringreduce.training.strategies.parts import Sharding

shard, make, moment = sys.argv[1], getattr(torch.optim, sys.argv[2]), sys.argv[3]
hvd.init()
me = hvd.rank()
wrapped = make(net.parameters(), lr=0.01)
options = {"split_updates": True} if shard == "split" else {"shard": shard}
state = hvd.elastic.TorchState(net, hvd.DistributedOptimizer(wrapped, **options), step=0)
deaths = (7, 14) if moment == "update" else (8, 15)  # a commit comes after the step

def die_when_due(*_):
    if (me, state.step) in ((0, deaths[0]), (2, deaths[1])):
        die()

def meet(sharding, what):
    if what == moment:
        die_when_due()
    meet_others(sharding, what)

def pack(split):
    die_when_due()
    return pack_others(split)

if shard == "split":
    pack_others, SplitUpdates._packed = SplitUpdates._packed, pack
elif moment == "update":
    (wrapped.register_step_pre_hook if me == 0 else wrapped.register_step_post_hook)(die_when_due)
meet_others, Sharding.meet = Sharding.meet, meet

@hvd.elastic.run
def train(state):
    while state.step < 20:
        descend(net, state.optimizer, *batch(hvd.rank(), state.step))
        state.step += 1
        state.commit()

train(state)
compare(make(alone.parameters(), lr=0.01), deaths, 1e-4)
"""
)


@pytest.mark.parametrize(
    ("shard", "optimizer", "moment"),
    [
        ("node", "Adam", "update"),
        ("all", "Adafactor", "about to commit"),
        ("all", "Adam", "committed"),
        ("split", "Adafactor", "update"),
        pytest.param("node", "Adafactor", "update", marks=pytest.mark.thorough),
        pytest.param("all", "Adam", "update", marks=pytest.mark.thorough),
        pytest.param("all", "Adafactor", "update", marks=pytest.mark.thorough),
        pytest.param("node", "Adam", "about to commit", marks=pytest.mark.thorough),
        pytest.param("node", "Adafactor", "committed", marks=pytest.mark.thorough),
    ],
)
def test_ranks_that_update_parts_go_on_without_some(shard: str, optimizer: str, moment: str) -> None:
    """Ranks die when some have updated, or copied, their parts and others have not: one has made the memory. With split
    updates they have updated parameters that no other rank has got.

    The others end as one process does with what they have seen.
    """
    needs("torch")
    done = run("--elastic", "-np", 4, sys.executable, "-c", SHARDED, shard, optimizer, moment).well()
    assert_two_are_well(done)


REPLICAS = """
import os, signal
import numpy as np
import torch
import ringreduce.torch as hvd

hvd.init()
me = hvd.rank()
weights = torch.nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
optimizer = hvd.DiLoCo(torch.optim.SGD([weights], lr=0.1), period=4, delay=2, replica="rank")
state = hvd.elastic.TorchState(optimizer=optimizer, weights=torch.nn.ParameterList([weights]), step=0)

@hvd.elastic.run
def train(state):
    while state.step < 16:
        if (me, state.step) == (1, DEATH):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        ((1 + me) / 2 * (weights - me).square()).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()

train(state)
optimizer.synchronize()

def outer_step():
    global agreed, momentum, local, sent
    delta = sum(agreed - x for x in sent.values()) / len(sent)
    momentum = 0.9 * momentum + delta
    agreed = agreed - 0.7 * (delta + 0.9 * momentum)
    local, sent = {rank: agreed + x - sent[rank] for rank, x in local.items()}, {}

agreed, momentum, sent = np.array([3.0, -2.0]), np.zeros(2), {}
local = dict.fromkeys(range(3), agreed)
for step in range(16):
    local = {rank: x - 0.1 * (1 + rank) * (x - rank) for rank, x in local.items()}
    if step == DEATH:  # the others make this step, and commit it
        del local[1]
        agreed = sum(local.values()) / 2
        local, sent = dict.fromkeys(local, agreed), {}
    elif step % 4 == 3:
        sent = local
    elif step % 4 == 1 and sent:
        outer_step()
outer_step()
np.testing.assert_allclose(weights.detach().numpy(), sum(local.values()) / 2, rtol=1e-12)
print("all is well on", hvd.rank(), "of", hvd.size(), flush=True)
"""


@pytest.mark.parametrize("death", [6, 7], ids=["between exchanges", "as an exchange begins"])
def test_what_the_other_replicas_have_learnt_stays(death: int) -> None:
    """A rank dies in the midst of a period: the others go on from the average of what each has learnt in it."""
    needs("torch")
    done = run("--elastic", "-np", 3, sys.executable, "-c", REPLICAS.replace("DEATH", str(death))).well()
    assert_two_are_well(done)
