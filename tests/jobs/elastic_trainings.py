"""Elastic trainings (programs/elastic_training.py) in all bindings, in which ranks, their shells and launchers die.

    python tests/jobs/elastic_trainings.py --jobs 100 --seed 1
    python tests/jobs/elastic_trainings.py --jobs 20 torch-all jax    # these ways alone

Job n is drawn from the seed and n: 2 to 4 ranks on nodes of 1, 2 and all, who dies, when and how. Each must end as
docs/failures.md says, with weights that one process computes from the steps that count, and leave no
process and no file behind. What is wrong is printed with the number of its job: --first N --jobs 1 runs it again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import launching
import numpy as np
from programs import elastic_training as program
from trainees import toy

PROGRAM = launching.PROGRAMS / "elastic_training.py"
TORCH = ["torch", "torch-node", "torch-all", "torch-late", "torch-local"]
OTHERS = ["keras-tensorflow", "keras-jax", "keras-torch", "tensorflow", "jax"]
HOSTS = "hosts"  # in place of the size of a node: two hosts of a virtual cluster that is up
CLUSTER = Path(__file__).parents[2] / "scripts" / "cluster"
TIMEOUT_S = {"toy": 3, "torch": 5, "keras": 15, "tensorflow": 15, "jax": 15}  # a rank may compile for seconds
LIMIT_S = {"toy": 60, "torch": 240, "keras": 400, "tensorflow": 400, "jax": 400}  # it ends what hangs, not what is slow
IN_PLACE = ("exception", "sys.exit", "os._exit")  # which another thread cannot do, or not to the whole rank
AT_ANY_TIME = ("SIGKILL", "SIGSEGV", "SIGSTOP", "shell SIGKILL", "shell SIGSTOP")
#: And the status with which `ringreduce run` ends.
LAUNCHER = {"launcher SIGTERM": 143, "launcher SIGKILL": -9, "launcher SIGHUP": 129, "launcher SIGINT": 130}


class Drawn(NamedTuple):
    """One job.

    Attributes:
        way: a binding, and what is special.
        kind: "ranks": they die, and the others go on; "launcher": the job ends; "few": fewer than ``--min-np`` are
            left, and the job ends; "restart": and it begins again; "init": a rank dies before `init`, and the job ends.
        ranks: how many.
        node_size: how many are on a node; none: all; or `HOSTS`, each of which has a half.
        deaths: as the program takes them.
        commit, copy, disk: as the program takes them.
    """

    way: str
    kind: str
    ranks: int
    node_size: str
    deaths: tuple[str, ...]
    commit: int = 1
    copy: int = 0
    disk: int = 0

    @property
    def left(self) -> int:
        """How many ranks reach the end."""
        return {"ranks": self.ranks - len(self.deaths), "restart": self.ranks}.get(self.kind, 0)

    @property
    def name(self) -> str:
        return f"{' '.join(self.deaths)} (nodes of {self.node_size or 'all'}, weights copied every {self.copy})"

    @property
    def binding(self) -> str:
        return self.way.partition("-")[0]


def draw(way: str, seed: int) -> Drawn:
    """Return a job of a way."""
    rng = random.Random(seed)
    kind = rng.choices(["ranks", "launcher", "few", "restart", "init"], [12, 4, 1, 2, 1])[0]
    ranks = rng.randint(2, 4)
    dying = rng.sample(range(ranks), rng.randint(1, ranks - 1) if kind == "ranks" else 1)
    deaths = []
    for rank in dying:
        step, how = rng.randrange(program.STEPS), rng.choice([*IN_PLACE, *AT_ANY_TIME])
        where = rng.choice(["begin", "end", *([] if how in IN_PLACE else [str(rng.randrange(20_000))])])
        if kind == "launcher":
            how = rng.choice([*LAUNCHER, "mpirun SIGKILL"])
        elif kind == "init":
            step, where, how = 0, "init", rng.choice(["exception", "os._exit", "SIGKILL"])
        deaths.append(f"{rank}@{step}:{where}:{how}")
    copies = [0, 1, 4] if way == "torch" else [0]
    commit, disk = rng.choice([1, 1, 2, 3]), rng.choice([1, 2]) if kind == "restart" else 0
    return Drawn(way, kind, ranks, rng.choice(["", "1", "2"]), tuple(deaths), commit, rng.choice(copies), disk)


def run(job: Drawn, cluster: str = "") -> tuple[float, str]:
    """Run a job; return how long it took (seconds), and what is wrong with it: nothing, if the text is empty.

    Args:
        job: which.
        cluster: the name of a virtual cluster that is up, for a job on `HOSTS`.
    """
    folder = Path(tempfile.mkdtemp(prefix="ringreduce-trainings-"))
    temporary = folder / "tmp"
    temporary.mkdir()
    options = ["--min-np", str(job.ranks)] if job.kind in ("few", "restart") else []
    options += ["--max-restarts", "1"] if job.kind == "restart" else []
    way, backend = ("keras", job.way.partition("-")[2]) if job.binding == "keras" else (job.way, None)
    settings = {
        "TMPDIR": str(temporary),
        "OMPI_MCA_btl_sm_backing_directory": str(temporary),
        "RINGREDUCE_TIMEOUT": str(TIMEOUT_S[job.binding]),
        "RINGREDUCE_NODE_SIZE": None if job.node_size == HOSTS else job.node_size or None,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-m", "ringreduce", "run", "--elastic", "-np", job.ranks, *options]
    if job.node_size == HOSTS:
        half = job.ranks // 2
        command = [CLUSTER, "--name", cluster, "exec", "0", *command]
        command += ["-H", f"{cluster}-host0:{half},{cluster}-host1:{half}"]
        settings |= settings_of_hosts(cluster)
    command += [sys.executable, PROGRAM, folder, way, job.commit, job.copy, job.disk, *job.deaths]
    limit_s = LIMIT_S[job.binding]
    try:
        done = launching.run(*command, limit_s=limit_s, **settings)
        wrong = f"it ran past {limit_s} s" if done.seconds >= limit_s else ""
        wrong = wrong or left_behind(folder) or _left_files(temporary, job) or _ended(job, done, folder)
        return done.seconds, f"{wrong}\n{done.stdout}\n{done.stderr}" if wrong else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def settings_of_hosts(cluster: str) -> dict[str, str | None]:
    """Return what MPI has to know of a virtual cluster; `scripts/cluster run` says it on a command line."""
    network = "10.113.0.0/24"
    return {
        "PRTE_MCA_plm_ssh_agent": f"{CLUSTER} --name {cluster} agent",
        "PRTE_MCA_prte_if_include": network,
        "OMPI_MCA_btl_tcp_if_include": network,
        "OMPI_MCA_btl": "self,tcp",
        "PRTE_MCA_rmaps_default_mapping_policy": None,  # all ranks would be on the first host
    }


def left_behind(folder: Path) -> str:
    """Return which processes of the job still run; a rank whose launcher is gone has some seconds to end."""
    end = time.monotonic() + 6
    while True:
        found = []
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if str(folder).encode() in each.read_bytes():
                    found.append(each.parent.name)
            except OSError:  # it has just ended
                continue
        if not found or time.monotonic() > end:
            return f"processes {', '.join(found)} are left" if found else ""
        time.sleep(0.1)


def _left_files(folder: Path, job: Drawn) -> str:
    """Return which files of the job are left."""
    found = [str(each.relative_to(folder)) for each in folder.rglob("*") if not each.is_dir()]
    # TensorFlow removes its own at a good end of Python alone, and nobody those of an mpirun that is killed.
    others = ["__autograph_generated_file", *(["ompi.", "sm_segment."] if "mpirun" in job.deaths[0] else [])]
    found = [each for each in found if not any(other in each for other in others)]
    return f"files are left: {found}" if found else ""


def _ended(job: Drawn, done: launching.Job, folder: Path) -> str:
    """Return what is wrong with the end of a job: its status, who has reached it, and with which weights."""
    wanted = LAUNCHER.get(job.deaths[0].rpartition(":")[2])
    if (done.returncode == 0) != (job.left > 0) or wanted not in (None, done.returncode):
        return f"status {done.returncode}"
    if not job.left:
        return ""
    wrong, members = compare(folder, job.left, job.way)
    return wrong or ("" if len(members) == program.STEPS else f"{len(members)} steps count, not {program.STEPS}")


def compare(folder: Path, left: int, way: str) -> tuple[str, list[list[int]]]:
    """Return what is wrong with the ends that ranks have written down, and who has made each step that counts.

    Args:
        folder: where they lie.
        left: how many ranks have to be there in the end.
        way: of the training.
    """
    ends = [json.loads(path.read_text()) for path in sorted(folder.glob("end-*.json"))]
    if not ends or len(ends) != left or {each["size"] for each in ends} != {left}:
        sizes = [each["size"] for each in ends]
        return f"{len(ends)} ranks have reached the end, in worlds of {sizes}, not {left}", []
    members = ends[0]["members"]
    if any(each["weights"] != ends[0]["weights"] or each["members"] != members for each in ends):
        return "the ranks have different weights", members
    if way == "torch-local":  # of what each replica had learnt when another died, there is no record
        is_finite = np.isfinite(np.concatenate(ends[0]["weights"])).all()
        return "" if is_finite else "the weights are not finite", members
    expected = _weights(members, way)
    pairs = zip(ends[0]["weights"], expected, strict=True)
    far = max(np.abs(np.array(mine) - each.ravel()).max() for mine, each in pairs)
    # Rounding in float32 makes some 1e-6; a batch that is left out or comes twice, 1e-3.
    return f"the weights differ by up to {far:.3g} from those of one process" if far > 2e-5 else "", members


def _weights(members: list[list[int]], way: str) -> list[Any]:
    """Return what these steps make of the weights in one process, in float64.

    Args:
        members: the first numbers of the ranks that have made each step.
        way: what makes them; a step of "torch-late" applies the average of the one before.
    """
    rate, momentum = (toy.RATE, 0.0) if way == "toy" else (program.RATE, program.MOMENTUM)
    late = way == "torch-late"
    weights = [each.astype(float) for each in program.beginning()]
    velocities, waiting = [np.zeros_like(each) for each in weights], []
    for step, ranks in enumerate(members):
        gradients = [_gradients(weights, *program.batch(step, rank)) for rank in ranks]
        waiting.append([np.mean(each, axis=0) for each in zip(*gradients, strict=True)])
        while len(waiting) > (late and step < len(members) - 1):
            averages = waiting.pop(0)
            velocities = [momentum * old + new for old, new in zip(velocities, averages, strict=True)]
            weights = [each - rate * old for each, old in zip(weights, velocities, strict=True)]
    return weights


def _gradients(weights: list[Any], inputs: Any, targets: Any) -> list[Any]:
    """Return those of the mean squared error."""
    error = 2 * (inputs.astype(float) @ weights[0] + weights[1] - targets) / targets.size
    return [inputs.T.astype(float) @ error, error.sum(0)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*TORCH, *OTHERS, []]
    parser.add_argument("ways", nargs="*", choices=choices, help="which (default: all that can be imported)")
    parser.add_argument("--jobs", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all of them (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first job (default: %(default)s)")
    chosen = parser.parse_args()
    ways = chosen.ways or [*TORCH, *(OTHERS if find_spec("tensorflow") and find_spec("jax") else [])]
    ran: Counter[str] = Counter()
    right: Counter[str] = Counter()
    print("| job | way | kind | ranks | nodes of | deaths: rank@step:where:how | commit | copy | disk | s |  |")
    print("|--:|---|---|--:|---|---|--:|--:|--:|--:|---|")
    for number in range(chosen.first, chosen.first + chosen.jobs):
        job = draw(ways[number % len(ways)], 1_000_000 * chosen.seed + number)
        seconds, wrong = run(job)
        ran[job.way] += 1
        right[job.way] += not wrong
        told = [number, *job[:3], job.node_size or "all", ", ".join(job.deaths), *job[5:], f"{seconds:.0f}"]
        verdict = f"WRONG: {wrong.splitlines()[0]}" if wrong else "as documented"
        print(f"| {' | '.join(map(str, told))} | {verdict} |", flush=True)
        if wrong:
            print(wrong, file=sys.stderr, flush=True)
    print(f"\n{right.total()} of {ran.total()} jobs ended as documented")
    print(", ".join(f"{way}: {right[way]} of {count}" for way, count in sorted(ran.items())))
    return int(right != ran)


if __name__ == "__main__":
    sys.exit(main())
