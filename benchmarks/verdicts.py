"""Make jobs slow in nine ways, on hosts of this machine, and count how often the verdict names what was done first.

    python benchmarks/verdicts.py                              # as root, on a quiet machine; 11 minutes
    python benchmarks/verdicts.py --faults disk loader --repeat 1 --healthy 0

A job has one rank on each of two hosts (`scripts/cluster`); the fault is at the second one, but for that of loaders. It
is named right if it is what the verdict has first, and the figure behind it is that of this host or rank. No rule may
apply to a healthy job. Jobs are of some seconds, which is too short for a verdict, so their figures are judged as those
of longer ones. Reports that are wrong are printed at the end, and the status is 1 then. The training is that of
an MLP (2 layers of 512 x 512, SGD), with a thread for each rank.

    link      100 Mbit/s; its device says so by a file that lies over its own, as those of virtual hosts say 10 Gbit/s
    disk      a loop device; its host reads 5 MB/s of the disk below, by a control group
    sleep     the rank sleeps 100 ms in each step
    core      another program runs on the core of the rank
    ranks     two ranks on one core
    loader    the loaders of all ranks sleep 100 ms for each batch
    quota     a control group gives the host 40 % of a core; it stands for steal, which only the machine below can make
    memory    64 MB are left, for data of 192 MB in a file; without swap
    loss      the switch's queue for 1 Gbit/s holds 100 kB; this kernel need have no netem
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ringreduce.observe.job.job_report import figures_in
from ringreduce.observe.job.verdicts import judge

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "cluster")
NAME = "verdicts"
HOSTS = (f"{NAME}-host0", f"{NAME}-host1")
GROUPS = Path("/sys/fs/cgroup")
GROUP = f"ringreduce-{NAME}"
WIDTH, SAMPLES = 512, 2048
SLEEP_S, CHUNK = 0.1, 512 << 10
LEFT, DATA, READS = 64 << 20, 192 << 20, 12

Report = dict[str, Any]


# ---- the job ----


def job(kind: str, steps: int, folder: Path) -> None:
    """Train on the ranks of a job, of which the last one has a fault of a kind."""
    import torch

    import ringreduce.torch as hvd

    cores = sorted(os.sched_getaffinity(0))
    if kind in ("core", "ranks"):  # the first rank has a core; all others, and what else runs, have the next one
        os.sched_setaffinity(0, {cores[os.environ["OMPI_COMM_WORLD_RANK"] != "0"]})
    hvd.init()
    is_last = hvd.rank() == hvd.size() - 1
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
    torch.manual_seed(hvd.rank())
    batch = torch.randn(SAMPLES // 64 if kind in ("link", "loss") else SAMPLES, WIDTH)

    def batches() -> Iterator[torch.Tensor]:
        reads = reader(kind, folder) if is_last else None
        for _ in range(steps):
            if kind == "loader":
                time.sleep(SLEEP_S)
            if reads:
                reads()
            yield batch

    with burning() if kind == "core" and is_last else nullcontext():
        for number, x in enumerate(hvd.loading(batches())):
            if kind == "memory" and is_last and number == 1:
                leave_memory()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if kind == "sleep" and is_last:
                time.sleep(SLEEP_S)
            loss.backward()
            optimizer.step()


@contextmanager
def burning() -> Iterator[None]:
    """Run a program that computes all the time, on the core of this process."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def reader(kind: str, folder: Path) -> Callable[[], object] | None:
    """Return what a loader does to read the data of a step; None: they are there already."""
    if kind == "disk":
        file = (folder / "disk" / "data").open("rb")
        return lambda: file.read(CHUNK)
    if kind == "memory":
        import numpy as np

        data = np.memmap(folder / "data", np.uint8, "r")
        places = np.random.default_rng(0)
        return lambda: data[places.integers(0, len(data), READS)].sum()
    return None


def leave_memory() -> None:
    """Let this host's control group have so much memory beside that of its processes."""
    group = group_of("memory")
    numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    (group / "memory.limit_in_bytes").write_text(str(int(numbers["total_rss"]) + LEFT))


def group_of(controller: str) -> Path:
    """Return the control group of this process."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return GROUPS / controller / path.lstrip("/")
    raise FileNotFoundError(controller)


# ---- the hosts ----


def cluster(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run an action of `scripts/cluster`."""
    return subprocess.run([sys.executable, SCRIPT, "--name", NAME, *words], check=True, text=True, **options)


def on_last(script: str) -> None:
    """Run a script of the shell on the host with the fault."""
    cluster("exec", "1", "sh", "-ec", script)


@contextmanager
def hosts() -> Iterator[Path]:
    """Provide two hosts, which see control groups; yields a folder on a disk that they share."""
    cluster("up", "ssh", "2", "--rate", "10gbit")
    try:
        names = " ".join(each for each in ("cpu", "memory", "blkio") if (GROUPS / each).exists())
        on_last(
            f"mount -t tmpfs none {GROUPS}; for each in {names}; do mkdir {GROUPS}/$each; "
            f"mount -t cgroup -o $each none {GROUPS}/$each; done"
        )
        yield Path(cluster("shared", stdout=subprocess.PIPE).stdout.strip())
    finally:
        cluster("down")


def set_queue(rate: str, *queue: str) -> None:
    """Limit the link of the host with the fault, at both ends."""
    for namespace, device in ((HOSTS[1], "eth0"), (f"{NAME}-switch", "port1")):
        words = ("qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, *queue)
        subprocess.run(["tc", "-n", namespace, *words], check=True)


USUAL = ("burst", "256kb", "latency", "20ms")


@contextmanager
def slow_link(_: Path) -> Iterator[None]:
    """Limit the link to 100 Mbit/s, and let its device say so."""
    set_queue("100mbit", *USUAL)
    on_last("echo 100 > /tmp/speed; mount --bind /tmp/speed /sys/class/net/eth0/speed")
    try:
        yield
    finally:
        on_last("umount /sys/class/net/eth0/speed")
        set_queue("10gbit", *USUAL)


@contextmanager
def lossy_link(_: Path) -> Iterator[None]:
    """Let the switch drop what comes faster than 1 Gbit/s, but for a few segments."""
    set_queue("1gbit", "burst", "3kb", "limit", "100kb")
    try:
        yield
    finally:
        set_queue("10gbit", *USUAL)


@contextmanager
def group(controller: str, **limits: str) -> Iterator[None]:
    """Have all processes of the host with the fault in a control group with limits."""
    path = group_of(controller) / GROUP
    path.mkdir()
    try:
        for name, limit in limits.items():
            (path / f"{controller}.{name}").write_text(limit)
        move(path)
        yield
    finally:
        move(path.parent)
        path.rmdir()


def move(path: Path) -> None:
    """Move all processes of the host with the fault to a control group."""
    pids = subprocess.run(["ip", "netns", "pids", HOSTS[1]], check=True, capture_output=True, text=True).stdout
    for pid in pids.split():
        with suppress(ProcessLookupError):  # it has ended
            (path / "cgroup.procs").write_text(pid)


@contextmanager
def quota(_: Path) -> Iterator[None]:
    """Give the host two fifths of a core."""
    with group("cpu", cfs_quota_us="40000"):
        yield


@contextmanager
def little_memory(folder: Path) -> Iterator[None]:
    """Write data that do not fit into the memory that the job leaves (`leave_memory`)."""
    with (folder / "data").open("wb") as file:
        file.write(os.urandom(DATA))
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the host's group is to read it
    with group("memory"):
        yield


@contextmanager
def slow_disk(folder: Path) -> Iterator[None]:
    """Mount a loop device; of the disk that holds its file, the host reads 5 MB a second."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(80 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    disk = os.stat(image).st_dev
    words = ["losetup", "--find", "--show", "--direct-io=on", str(image)]
    loop = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    try:
        on_last(
            f"mkdir -p {folder}/disk; mount {loop} {folder}/disk; head -c 60M /dev/urandom > {folder}/disk/data; "
            f"umount {folder}/disk; mount {loop} {folder}/disk"
        )
        with group("blkio", **{"throttle.read_bps_device": f"{os.major(disk)}:{os.minor(disk)} 5000000"}):
            yield
    finally:
        on_last(f"umount --lazy {folder}/disk")
        subprocess.run(["losetup", "--detach", loop], check=True)


# ---- what is to be found ----


class Fault(NamedTuple):
    """What is made, and how the verdict should name it.

    Attributes:
        steps: of the job.
        rule: whose finding is to be first.
        figure: returns the figure that shows it, given the report.
        at_least: what that is to be.
        make: makes it on the second host, given a folder; the default leaves it to the job.
        needs: a file without which this machine cannot do it.
        ranks: on the second host.
    """

    steps: int
    rule: str
    figure: Callable[[Report], float]
    at_least: float
    make: Callable[[Path], AbstractContextManager[None]] = lambda folder: nullcontext()
    needs: str = ""
    ranks: int = 1


def use(part: str) -> Callable[[Report], float]:
    """Return what gives a figure of the second host."""
    return lambda report: float(next((each[part] for each in report["uses"] if each["host"] == HOSTS[1]), 0.0))


def late(cause: str) -> Callable[[Report], float]:
    """Return what gives the part of steps in which the last rank was last, for a reason."""

    def part(report: Report) -> float:
        slow = report["slow"] or {"rank": -1}
        return float(slow["part"]) if (slow["rank"], slow.get("cause")) == (report["ranks"] - 1, cause) else 0.0

    return part


FAULTS = {
    "link": Fault(40, "network", use("network"), at_least=0.8, make=slow_link),
    "disk": Fault(80, "disk", use("busy"), 0.8, make=slow_disk, needs=f"{GROUPS}/blkio"),
    "sleep": Fault(80, "slow rank", late("waiting"), 0.8),
    "core": Fault(80, "slow rank", late("crowded"), 0.8),
    "ranks": Fault(80, "shared cores", lambda report: report["crowded"], 0.2, ranks=2),
    "loader": Fault(80, "input", lambda report: report["input_s"] / report["step_s"], 0.2),
    "quota": Fault(80, "throttled", use("throttled"), 0.05, make=quota, needs=f"{GROUPS}/cpu"),
    "memory": Fault(70, "memory", use("faults"), 10.0, make=little_memory, needs=f"{GROUPS}/memory"),
    "loss": Fault(100, "retransmissions", use("resent"), 0.01, make=lossy_link),
}


def run(kind: str, steps: int, folder: Path, ranks: int = 1) -> Report:
    """Run a job; return its report."""
    path = folder / "report.json"
    path.unlink(missing_ok=True)
    words = ["timeout", "60", "ringreduce", "run", "-H", f"{HOSTS[0]}:1,{HOSTS[1]}:{ranks}", "--report", str(path)]
    words += ["--quiet", sys.executable, __file__, "--job", kind, "--steps", str(steps), "--folder", str(folder)]
    cluster("exec", "0", "env", "OMP_NUM_THREADS=1", *words)
    report = dict(json.loads(path.read_text()))
    return report | {"found": [each._asdict() for each in judge(replace(figures_in(report), steps_s=3600.0))]}


def row(*cells: object) -> None:
    """Print a row of the table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def first_of(report: Report) -> str:
    """Return the rule that the verdict has first."""
    return str(report["found"][0]["name"]) if report["found"] else "nothing"


def try_fault(name: str, repeat: int, folder: Path) -> list[Report]:
    """Run jobs with a fault, and print what is found; return the reports where that is something else."""
    fault = FAULTS[name]
    if fault.needs and not Path(fault.needs).exists():
        row(name, f"not tried: there is no {fault.needs}, of control groups of version 1", "", "")
        return []
    reports = []
    for _ in range(repeat):
        with fault.make(folder):
            reports.append(run(name, fault.steps, folder, fault.ranks))
    wrong = [each for each in reports if first_of(each) != fault.rule or fault.figure(each) < fault.at_least]
    figures = ", ".join(f"{fault.figure(each):.3g}" for each in reports)
    row(name, ", ".join(dict.fromkeys(map(first_of, reports))), figures, f"{repeat - len(wrong)} of {repeat}")
    return wrong


def try_healthy(count: int, folder: Path) -> list[Report]:
    """Run healthy jobs, and print of how many nothing is said; return the reports of the others."""
    reports = [run("healthy", 100, folder) for _ in range(count)]
    wrong = [each for each in reports if each["found"]]
    row("none", ", ".join(dict.fromkeys(map(first_of, reports))), "", f"{count - len(wrong)} of {count}")
    return wrong


def main() -> None:
    """Make the faults, and print what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=[*FAULTS], help="which (all)")
    parser.add_argument("--repeat", type=int, default=3, help="jobs with each fault (3)")
    parser.add_argument("--healthy", type=int, default=20, help="jobs without one (20)")
    parser.add_argument("--job", metavar="FAULT", help="take part in a job as a rank")
    parser.add_argument("--steps", type=int, help="of the job")
    parser.add_argument("--folder", type=Path, help="of its files")
    options = parser.parse_args()
    if options.job:
        job(options.job, options.steps, options.folder)
        return
    row("fault", "named first", "figures", "right")
    row("---", "---", "---", "--:")
    wrong = []
    with hosts() as folder:
        for name in options.faults:
            wrong += try_fault(name, options.repeat, folder)
        if options.healthy:
            wrong += try_healthy(options.healthy, folder)
    for report in wrong:
        print("\n", json.dumps(report), sep="")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
