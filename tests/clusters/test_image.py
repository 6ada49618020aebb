"""The image of docker/Dockerfile: built, and its containers run as the pods of an MPIJob and of a TrainJob."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from images import Podman, Pods, why_no_image
from machines import WHO

pytestmark = [pytest.mark.thorough, pytest.mark.limit(1500)]  # the first test builds the image

IMAGE = "train:1"
#: In its first run it goes on until it is asked to stop, and only that makes a commit on disk.
STOPS = """
import pathlib, sys
import torch
import ringreduce.torch as hvd

hvd.init()
model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())

@hvd.elastic.run
def train(state):
    while state.step < 7:
        optimizer.zero_grad()
        model(torch.full((1, 3), float(state.step + 1), dtype=torch.float64)).sum().backward()
        optimizer.step()
        state.step += 1
        if hvd.rank() == 0:
            print("rank 0 step", state.step, flush=True)
        while begun is None and state.step == 4:
            pathlib.Path(f"{sys.argv[1]}-waits").touch()
            state.commit()
        state.commit()

state = hvd.elastic.TorchState(model, optimizer, step=0)
begun = state.keep_on_disk(sys.argv[1], every=1000)
train(state)
print("rank", hvd.rank(), "weights", model.weight.tolist(), flush=True)
"""


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """podman, with an image that has been made from the one of the Dockerfile, and has two programs."""
    reason = why_no_image()
    if reason:
        pytest.skip(reason)
    programs = tmp_path_factory.mktemp("programs")
    (programs / "train.py").write_text(f"import torch\nassert torch.version.cuda is None\n{WHO}")
    (programs / "stops.py").write_text(STOPS)
    folder = Path("/var/tmp") / f"ringreduce-image-{os.getpid()}"  # where a large file may be
    made = Podman(folder)
    with pytest.MonkeyPatch.context() as patched:
        for key, value in made.variables.items():
            patched.setenv(key, value)
        try:
            made.build()
            made.add(IMAGE, programs.iterdir())
            yield made
        finally:
            made.close()
    left = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(str(folder).encode() in line for line in left)
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert not folder.exists()


@pytest.fixture(scope="module", params=[("pods", 0), ("pods", 1000), ("trainjob", 1000)], ids=str)
def pods(podman: Podman, request: pytest.FixtureRequest) -> Iterator[Pods]:
    """The containers of a job, as root or as another user."""
    made = Pods(*request.param, IMAGE)
    try:
        yield made
    finally:
        made.down()


def test_ranks_run_in_the_workers(pods: Pods) -> None:
    """As many in each as it has slots, none in the launcher; started as the documents say, over the image's sshd."""
    done = pods.run(0, "env", "OMP_NUM_THREADS=1", *pods.run_by, "python", "train.py")
    places = [f"rank {rank} of 4 on {pods.workers[rank // 2]}" for rank in range(4)]
    assert (done.status, done.ranks()) == (0, places), done.text


@pytest.mark.parametrize("told", [0, 2], ids=["launcher", "worker"])
def test_sigterm_to_a_container_stops_the_job(pods: Pods, podman: Podman, told: int) -> None:
    """Through the entry point: the state is on disk at that step, and the job, run again, goes on from it.

    The container of a worker ends once its ranks have; kubelet would start another.
    """
    line = (*pods.run_by, "--grace", "40", "--elastic", "python", "stops.py", f"/data/{told}")
    limited = ["timeout", "--kill-after=5", "170", *pods.line(0, *line)]
    with subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        deadline = time.monotonic() + 100
        while not (pods.shared / f"{told}-waits").exists() and launcher.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)  # ranks in containers say it by a file alone
        assert launcher.poll() is None, launcher.communicate()[0]
        podman("kill", "--signal", "TERM", pods.host(told))
        text, _ = launcher.communicate(timeout=60)
    assert (launcher.returncode, said(text)) == (75, [f"rank 0 step {step}" for step in range(1, 5)]), text
    if told:
        podman("wait", pods.host(told))
        podman("start", pods.host(told))
    again = pods.run(0, *line, timeout_s=150)
    steps = [f"rank 0 step {step}" for step in range(5, 8)]
    ends = [f"rank {rank} weights [[-28.0, -28.0, -28.0]]" for rank in range(4)]
    assert (again.status, said(again.text)) == (0, sorted([*steps, *ends])), again.text


def said(text: str) -> list[str]:
    """Return what ranks have printed, sorted."""
    return sorted(line for line in text.splitlines() if line.startswith("rank "))
