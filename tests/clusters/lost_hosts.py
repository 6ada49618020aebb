"""Trainings on hosts of which one is lost; as a program, how long a new start takes, or how reliably jobs start at all.

    scripts/faults --hosts                 # each loss 20 times, in turn in torch and NumPy, shared folder and copies
    scripts/faults --hosts --repeat 4 frozen power    # these alone, 4 times each
    scripts/faults --hosts --starts        # 100 small jobs over three hosts, one after the other

It prints a table in Markdown; its exit status is 1 if something did not end as it has to. Jobs train on three hosts of
one rank each, and make a step, with a commit, every 0.1 s. Times count from before the host is lost, in seconds:
"noticed" until the launcher says so, "next step" until the first step of the next job. "Repeated" are steps that two
jobs have made, as the first had no commit after them. It is right if each step counts once in the weights, none is
missing, each job repeats one step at most, the last one ends with status 0 and the ranks that it has to have, and
nothing of it is left on the hosts that live.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path

from machines import WHO, Cluster, environ, why_not

LEFT_S = 20.0  # that daemons of hosts that live have to end, with their ranks
CASE_S = 240  # that a case, or a start, may take
STEPS = 30
LOST_AT = 12
PAUSE_S = 0.1  # before each step of what is measured
#: Weights depend on each step, and on each once. In step 12 of its first job, the rank on the doomed host waits for its
#: end; with a pause before each step it just says that it is there. A job that is to take a host back trains until it
#: has. Each rank notes when it has made which step.
TRAIN = """
import os, pathlib, signal, socket, sys, time

doomed, commits, framework, disk = sys.argv[1:5]
steps, lost_at, sizes, replicas = map(int, sys.argv[5:9])
pause_s = float(sys.argv[9])
restart = int(os.environ.get("RINGREDUCE_RESTART", "0"))
if framework == "torch":
    import torch
    import ringreduce.torch as hvd

    hvd.init()
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    def update(number):
        optimizer.zero_grad()
        model(torch.full((1, 3), number, dtype=torch.float64)).sum().backward()
        optimizer.step()

    def weights():
        return model.weight[0].tolist()
else:
    import numpy as np
    import ringreduce as hvd
    import ringreduce.elastic

    hvd.init()
    state = hvd.elastic.NumpyState(weights=np.zeros(3), step=0)

    def update(number):
        state.weights -= hvd.allreduce(np.full(3, number), op="average")

    def weights():
        return state.weights.tolist()
made = open(pathlib.Path(commits, f"steps-{restart}-{hvd.rank()}"), "a")

@hvd.elastic.run
def train(state):
    while state.step < steps or hvd.size() < sizes:
        if state.step == lost_at and restart == 0 and socket.gethostname() == doomed:
            pathlib.Path(commits, "waits").write_text(str(os.getpid()))
            while not pause_s:
                signal.pause()
        time.sleep(pause_s)  # steps take as long as a host needs to be lost in the midst of them
        update(float(state.step + 1))
        state.step += 1
        print(state.step, time.time(), file=made, flush=True)
        state.commit()
        if restart and state.step > lost_at:
            pathlib.Path(commits, "again").touch()

begun = state.keep_on_disk(disk, replicas=replicas)
train(state)
total = -sum(range(1, state.step + 1))
where = f"rank {hvd.rank()} of {hvd.size()} on {socket.gethostname()}"
print(where, weights() == [total] * 3 and (begun is not None) == (restart > 0), flush=True)
"""


class Training:
    """A job that runs, and whose output is in a file.

    Args:
        cluster: on which.
        doomed: the name by which the host that is to be lost calls itself.
        words: what starts the ranks, up to the program.
        sizes: how many ranks it has to have at the end.
        pause_s: before each step.
        replicas: of a commit, on hosts that have a folder each; 1: one folder, which all hosts share.
        framework: ``"torch"`` or ``"numpy"``.
    """

    def __init__(
        self,
        cluster: Cluster,
        doomed: str,
        *words: str,
        sizes: int = 1,
        pause_s: float = 0.0,
        replicas: int = 1,
        framework: str = "torch",
    ) -> None:
        self.commits = cluster.shared / f"commits-{time.monotonic_ns()}"
        self.commits.mkdir(mode=0o700)
        program = cluster.write("train.py", TRAIN)
        disk = self.commits if replicas == 1 else Path("/root", self.commits.name, "commits")
        arguments = (doomed, self.commits, framework, disk, STEPS, LOST_AT, sizes, replicas, pause_s)
        line = cluster.line(0, "timeout", "--kill-after=5", "170", *words, "python", str(program), *map(str, arguments))
        self._output = cluster.shared / f"{self.commits.name}.txt"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cluster.shared,
                env=environ(),
            )

    def until(self, name: str) -> None:
        """Wait until a rank has made a file."""
        self._until((self.commits / name).exists)

    def until_said(self, pattern: str) -> None:
        """Wait until something was written."""
        self._until(lambda: re.search(pattern, self.text) is not None)

    def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self._process.poll() is None, self.text
            time.sleep(0.02)  # nothing says so; the watchdog of the test ends this

    @property
    def text(self) -> str:
        """What was written so far."""
        return self._output.read_text()

    def end(self) -> tuple[int, list[str]]:
        """Return the status, and what the ranks said at the end, sorted."""
        status = self._process.wait()
        return status, sorted(line for line in self.text.splitlines() if line.startswith("rank "))

    def steps(self) -> dict[int, dict[int, float]]:
        """Return when which step was made first, by the job."""
        found: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for path in self.commits.glob("steps-*"):
            made = found[int(path.name.split("-")[1])]
            for step, at in map(str.split, path.read_text().splitlines()):
                made[int(step)] = min(float(at), made.get(int(step), math.inf))
        return found


def nothing_is_left(cluster: Cluster, *numbers: int) -> None:
    """Require that no rank and no daemon stays on hosts that live; daemons end soon after their mpirun."""
    deadline = time.monotonic() + LEFT_S
    for number in numbers:
        while True:
            found = cluster.run(number, "sh", "-c", "ps -eo args | grep -E '[t]rain.py|[p]rted|[p]rterun' || true")
            if found.text == "":
                break
            assert time.monotonic() < deadline, f"on host {number}: {found.text}"
            time.sleep(0.2)  # they do not say when they have ended


def listed(cluster: Cluster) -> str:
    """Return three hosts of one slot, as for -H."""
    return ",".join(f"{cluster.host(number)}:1" for number in range(3))


def elastic(cluster: Cluster, *options: str) -> tuple[str, ...]:
    """Return what starts an elastic job of three ranks on three hosts."""
    return ("ringreduce", "run", "--elastic", "-np", "3", "-H", listed(cluster), *options)


def ranks_of(cluster: Cluster, size: int) -> list[str]:
    """Return what ranks say at the end of a training on the first hosts."""
    return [f"rank {rank} of {size} on {cluster.host(rank)} True" for rank in range(size)]


def end_daemon(cluster: Cluster, number: int) -> None:
    """Kill mpirun's daemon on a host, which lives on."""
    assert cluster.run(number, "pkill", "-KILL", "prted").status == 0


# ---- what is measured ----


@dataclass(frozen=True)
class Loss:
    """A way to lose hosts.

    Attributes:
        lose: takes them.
        sizes: with how many ranks the job may end.
        replicas: of a commit that outlive it.
        restore: brings them back once the job has begun again.
    """

    lose: Callable[[Cluster], None]
    sizes: set[int]
    replicas: int = 2
    restore: Callable[[Cluster], None] | None = None


def vanish(cluster: Cluster) -> None:
    """Let all that is sent to and from the last host be lost, while its links are up."""
    for host, peer in ((0, 2), (2, 0), (1, 2), (2, 1)):
        address = f"10.113.0.{peer + 1}"
        lost = ("ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0")
        assert cluster.run(host, *lost).status == 0


def lose_two(cluster: Cluster) -> None:
    cluster.die(1)
    cluster.die(2)


LOSSES = {
    "power": Loss(lambda cluster: cluster.die(2), {2}),
    "cable": Loss(lambda cluster: cluster.unplug(2), {2}),
    "packets": Loss(vanish, {2}),
    "daemon": Loss(partial(end_daemon, number=2), {2, 3}),
    "frozen": Loss(lambda cluster: cluster.freeze(2), {3}, restore=lambda cluster: cluster.thaw(2)),
    "two": Loss(lose_two, {1}, replicas=3),
}
#: Losses happen to trainings in each of these, in turn.
PROGRAMS = [*product(("torch", "numpy"), (False, True))]  # and whether each host has its copy of commits


@dataclass
class Outcome:
    """What came of a loss, or of a start.

    Attributes:
        figures: seconds and numbers of steps, by the name of their column.
        wrong: what was; empty: nothing.
    """

    figures: dict[str, float] = field(default_factory=dict)
    wrong: str = ""


def lose_host(outcome: Outcome, number: int, what: str) -> None:
    """Take a host from a training on a cluster of its own."""
    loss = LOSSES[what]
    framework, has_copies = PROGRAMS[number % len(PROGRAMS)]
    cluster = Cluster("ssh", 3)
    try:
        sizes = 3 if loss.restore else 1
        replicas = loss.replicas if has_copies else 1
        words = elastic(cluster)
        training = Training(
            cluster, cluster.host(2), *words, sizes=sizes, pause_s=PAUSE_S, replicas=replicas, framework=framework
        )
        training.until("waits")
        begin = time.time()
        loss.lose(cluster)
        training.until_said("is lost: |begins again from its last commit")
        outcome.figures["noticed"] = time.time() - begin
        if loss.restore:
            training.until("again")
            loss.restore(cluster)
        status, said = training.end()
        first, *later = [made for _, made in sorted(training.steps().items())]
        assert later, f"no second job has made a step: {training.text}"
        again = min(min(steps.values()) for steps in later)
        # A host that thaws may make steps until it is ended; its commits are thrown away.
        jobs = [{step for step, at in first.items() if at < again}, *map(set, later)]
        made = set[int]().union(*jobs)
        outcome.figures["next step"] = again - begin
        outcome.figures["repeated"] = sum(map(len, jobs)) - len(made)
        assert status == 0, f"status {status}: {training.text}"
        assert said in [ranks_of(cluster, size) for size in loss.sizes], training.text
        assert made == set(range(1, max(STEPS, *made) + 1)), f"steps {made} were made: {training.text}"
        assert all(len(one & other) <= 1 for one, other in pairwise(jobs)), f"{training.steps()}: {training.text}"
        nothing_is_left(cluster, *range(len(said)))
    finally:
        cluster.down()


def start(outcome: Outcome, _: int, cluster: Cluster) -> None:
    """Start a job whose ranks say where they are."""
    done = cluster.run(0, "ringreduce", "run", "-H", listed(cluster), "python", "who.py", timeout_s=CASE_S / 2)
    outcome.figures["seconds"] = done.seconds
    expected = [f"rank {rank} of 3 on {cluster.host(rank)}" for rank in range(3)]
    assert (done.status, done.ranks()) == (0, expected), f"status {done.status}: {done.text}"


def repeat(what: str, times: int, measure: Callable[[Outcome, int], None]) -> list[Outcome]:
    """Return so many outcomes, each after at most `CASE_S`; they go to standard error, too."""
    outcomes = []
    for number in range(1, times + 1):
        outcome = Outcome()
        signal.alarm(CASE_S)
        try:
            measure(outcome, number)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            outcome.wrong = str(error) or type(error).__name__
        finally:
            signal.alarm(0)
        figures = ", ".join(f"{name} {figure:.1f}" for name, figure in outcome.figures.items())
        verdict = f"WRONG: {outcome.wrong}" if outcome.wrong else "right"
        print(f"{what} {number} of {times}: {figures}: {verdict}", file=sys.stderr, flush=True)
        outcomes.append(outcome)
    return outcomes


def table(outcomes: dict[str, list[Outcome]], *columns: str) -> bool:
    """Print how many outcomes are right, and the median and worst of each column, by rows; return whether all are."""
    print(f"|  | right | {' | '.join(f'{name}, median | worst' for name in columns)} |")
    print("|---|" + "--:|" * (2 * len(columns) + 1))
    for what, of in outcomes.items():
        found = [[each.figures.get(name, math.inf) for each in of] for name in columns]
        figures = [f"{figure:.1f}" for column in found for figure in (statistics.median(column), max(column))]
        print(f"| {' | '.join([what, f'{sum(not each.wrong for each in of)} of {len(of)}', *figures])} |")
    return not any(each.wrong for of in outcomes.values() for each in of)


def measure_losses(times: int, losses: list[str]) -> bool:
    """Measure losses; return whether all were right."""
    found = {what: repeat(what, times, partial(lose_host, what=what)) for what in losses or LOSSES}
    return table(found, "noticed", "next step", "repeated")


def measure_starts(times: int) -> bool:
    """Measure starts; return whether all were right."""
    cluster = Cluster("ssh", 3)
    try:
        cluster.write("who.py", WHO)
        return table({"start": repeat("start", times, partial(start, cluster=cluster))}, "seconds")
    finally:
        cluster.down()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses", nargs="*", choices=[*LOSSES, []], help="which (default: all)")
    parser.add_argument("--starts", action="store_true", help="start small jobs, and lose no host")
    parser.add_argument("--repeat", type=int, help="how often, each (20; starts 100)")
    options = parser.parse_args()
    if reason := why_not("ssh"):
        print(reason, file=sys.stderr)
        return 2

    def on_alarm(number: int, frame: object) -> None:
        raise TimeoutError(f"it took longer than {CASE_S} s")

    def on_end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends two, and the cluster has to be removed
        sys.exit(128 + number)

    signal.signal(signal.SIGALRM, on_alarm)
    signal.signal(signal.SIGTERM, on_end)
    if options.starts:
        return int(not measure_starts(options.repeat or 100))
    return int(not measure_losses(options.repeat or 20, options.losses))


if __name__ == "__main__":
    sys.exit(main())
