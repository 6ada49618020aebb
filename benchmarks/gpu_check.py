"""Check ringreduce on this machine's GPU; see scripts/gpu_check, which runs it.

Each path runs in jobs of its own under a time limit: the ranks compare all results with float64 (integers exactly), and
measure; rank 0 writes down what was found after each check. The report is to be committed.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.algorithms import Collective
from ringreduce.bench.peers import mpi_library
from ringreduce.buffers import DTYPES
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.cupy_driver import cupy_tools
from ringreduce.gpu.inventory import Inventory, take_inventory
from ringreduce.gpu.nccl import version_text

ROOT = Path(__file__).parents[1]
#: Seconds that a path may take with one number of ranks.
LIMIT_S = 120.0
#: Path -> what `Communicator.path_on_device` says of sums of float32 that it carries.
PATHS = {"staged": "staged", "nccl": "nccl", "mpi": "device+messages"}
COUNTS = (0, 1, 1001, 300_007, (1 << 20) + 3)
#: How far results may be from float64, of the largest result or 1: sums of four have three roundings.
PRECISION = {"float16": 2.0**-9, "bfloat16": 2.0**-6, "float32": 2.0**-21, "float64": 2.0**-50}
SHARED = "its figures say nothing about NCCL between GPUs."
SIZES = (4 << 10, 256 << 10, 4 << 20, 64 << 20, 256 << 20)

Array = np.ndarray[Any, Any]
Put = Callable[[Array, str], Any]  # makes an array on the GPU, of a dtype that is named
Get = Callable[[Any], Array]  # returns its content when all that was enqueued is done


@dataclass(frozen=True)
class Check:
    """Something that was looked at: what it was, whether it passed (None: a figure), and what was seen."""

    name: str
    passed: bool | None
    seen: str = ""


# ---- what a rank does ----


def terms(world: rr.Communicator, count: int, dtype: str, salt: int) -> list[Array]:
    """Return every rank's array, as float64 or complex128 if it is of floats: values that the dtype holds exactly."""
    kind, found = DTYPES[dtype].kind, []
    for rank in range(world.size):
        random = np.random.default_rng((rank, count, salt))
        if kind in ("float", "complex"):
            values = random.integers(-127, 128, count) / 64.0
            found.append(values + 1j * random.permutation(values) if kind == "complex" else values)
        else:
            found.append(random.integers(0, 2 if kind == "bool" else 11, count).astype(dtype))
    return found


def reference(arrays: Sequence[Array], op: ReduceOp) -> Array:
    """Return the reduction in the type of the arrays, which is wide enough."""
    fold = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}.get(op, np.add)
    total: Array = functools.reduce(fold, arrays)
    return total / len(arrays) if op is ReduceOp.AVERAGE else total


def near(found: Array, wanted: Array, dtype: str) -> bool:
    """Return whether results are right: integers exactly, floats as nearly as the dtype has them."""
    if dtype not in PRECISION and DTYPES[dtype].kind != "complex":
        return bool(np.array_equal(found, wanted))
    part = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
    scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
    return bool((np.abs(found.astype(wanted.dtype) - wanted) <= PRECISION[part] * scale).all())


def on_all(world: rr.Communicator, passed: bool) -> bool:
    """Return whether something passed on all ranks; collective."""
    return int(world.allreduce(np.array([int(not passed)]))[0]) == 0


def check_allreduce(world: rr.Communicator, path: str, put: Put, get: Get) -> Iterator[Check]:
    """Compare allreduces of all dtypes, operations and some sizes with float64; collective."""
    for dtype, row in DTYPES.items():
        wrong = []
        for op in filter(lambda op: op.takes("float"), ReduceOp):  # Others go through the host.
            if (op is ReduceOp.AVERAGE and row.integral) or (row.kind == "complex" and op.value in ("min", "max")):
                continue
            for salt, count in enumerate(COUNTS):
                arrays = terms(world, count, dtype, salt)
                array = put(arrays[world.rank], dtype)
                out = array if salt % 2 else put(np.zeros_like(arrays[world.rank]), dtype)
                world.allreduce(array, op, out=out)
                right = near(get(out), reference(arrays, op), dtype)
                if not right or (out is not array and not near(get(array), arrays[world.rank], dtype)):
                    wrong.append(f"{op.value} of {count}")
        yield Check(f"allreduce of {dtype}", on_all(world, not wrong), ", ".join(wrong))
    used = world.path_on_device("float32").transport
    yield Check(f"carried by {path}", used == PATHS[path], used)


def check_others(world: rr.Communicator, put: Put, get: Get) -> Iterator[Check]:
    """Compare the other collectives with float64; collective."""
    arrays = [each.reshape(-1, 3) for each in terms(world, 6 * 1001 * world.size, "float32", 1)]
    mine, rank, size = put(arrays[world.rank], "float32"), world.rank, world.size
    wanted = {
        "reduce_scatter": np.split(reference(arrays, ReduceOp.SUM), size)[rank],
        "allgather": np.concatenate(arrays),
        "broadcast": arrays[0],
        "alltoall": np.concatenate([np.split(each, size)[rank] for each in arrays]),
    }
    for name, result in wanted.items():
        found = get(getattr(world, name)(mine))
        yield Check(name, on_all(world, found.shape == result.shape and near(found, result, "float32")))


def check_torch(world: rr.Communicator) -> Iterator[Check]:
    """Look at tensors, streams that race, and steps of the optimizer beside those of one process; collective."""
    import torch

    import ringreduce.torch as hvd

    device = torch.device("cuda", torch.cuda.current_device())
    right = True
    for turn in range(10):
        with torch.cuda.stream(torch.cuda.Stream()):
            mine = torch.full((100_003,), float("nan"), device=device, dtype=torch.bfloat16)
            torch.cuda._sleep(20_000_000)
            mine.fill_(world.rank + 1)
            total = hvd.allreduce(mine, op=hvd.Sum, name=f"turn {turn}")
            right &= bool((total == world.size * (world.size + 1) / 2).all())
    yield Check("torch: results come after what streams hold", on_all(world, right))
    models = [torch.nn.Sequential(torch.nn.Linear(7, 61), torch.nn.Tanh(), torch.nn.Linear(61, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    alone, shared = models[0].double(), models[1].to(device)
    hvd.broadcast_parameters(alone.state_dict(), root_rank=0)
    hvd.broadcast_parameters(shared.state_dict(), root_rank=0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    sgd = torch.optim.SGD(shared.parameters(), lr=0.05, momentum=0.9)
    sgd = hvd.DistributedOptimizer(sgd, named_parameters=shared.named_parameters(), bucket_nbytes=1024)
    for step in range(5):
        batches = [torch.from_numpy(each.reshape(-1, 7)) for each in terms(world, 28, "float64", step)]
        plain.zero_grad()
        sum(alone(each).square().mean() for each in batches).div(world.size).backward()  # type: ignore[union-attr]
        plain.step()
        sgd.zero_grad()
        shared(batches[world.rank].to(device, torch.float32)).square().mean().backward()
        sgd.step()
    pairs = zip(shared.parameters(), alone.parameters(), strict=True)
    close = all(torch.allclose(mine.cpu().double(), one, rtol=1e-4, atol=1e-5) for mine, one in pairs)
    yield Check("torch: DistributedOptimizer trains as one process in float64", on_all(world, close))


def check_modes(world: rr.Communicator) -> Iterator[Check]:
    """Train in several modes on the GPU, and each beside the same on the CPU; collective."""
    import torch

    import ringreduce.torch as hvd

    def wrapped(model: Any, **options: Any) -> Any:
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters(), **options)

    modes: dict[str, Callable[[Any], Any]] = {
        "overlap": partial(wrapped, overlap=True),
        "overlap=False": partial(wrapped, overlap=False),
        "compression to bf16": partial(wrapped, compression=hvd.Compression.bf16),
        "staleness=1": partial(wrapped, staleness=1),
        "op=Sum": partial(wrapped, op=hvd.Sum),
        "LocalSGD": lambda model: hvd.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.05), period=2),
        "DiLoCo": lambda model: hvd.DiLoCo(torch.optim.AdamW(model.parameters(), lr=1e-3), model, period=2),
    }

    def trained(
        device: str, make: Callable[[Any], Any], *, steps: int = 6, sparse: bool = False, reloads: bool = False
    ) -> list[Array]:
        torch.manual_seed(1)
        rows = torch.nn.Embedding(41, 5, sparse=sparse)
        model = torch.nn.Sequential(rows, torch.nn.Flatten(), torch.nn.Linear(15, 3)).to(device)
        optimizer = make(model)
        for step in range(steps):
            random = torch.Generator().manual_seed(100 * step + world.rank)
            model(torch.randint(41, (7, 3), generator=random).to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if reloads:  # as from a checkpoint, which is in host memory
                saved = io.BytesIO()
                torch.save(optimizer.state_dict(), saved)
                saved.seek(0)
                optimizer.load_state_dict(torch.load(saved, map_location="cpu", weights_only=True))
        hvd.join()
        return [each.detach().cpu().numpy() for each in model.parameters()]

    def alike(make: Callable[[Any], Any], **options: Any) -> bool:
        pairs = zip(trained("cuda", make, **options), trained("cpu", make, **options), strict=True)
        return all(np.allclose(mine, other, rtol=1e-3, atol=1e-5) for mine, other in pairs)

    for name, make in modes.items():
        yield Check(f"torch: {name}", on_all(world, alike(make)))
    for name in ("staleness=1", "LocalSGD", "DiLoCo"):
        yield Check(f"torch: {name} from checkpoints", on_all(world, alike(modes[name], reloads=True)))
    yield Check("torch: sparse gradients", on_all(world, alike(wrapped, sparse=True)))
    uneven = 6 - (world.rank == world.size - 1)
    yield Check("torch: a rank that joins before the others", on_all(world, alike(wrapped, steps=uneven)))


def check_jax(world: rr.Communicator) -> Iterator[Check]:
    """Reduce in a program that JAX compiles for the GPU, if there is a JAX that has one; collective."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several ranks may share a GPU
    try:
        import jax

        import ringreduce.jax as rj
    except ImportError:
        return
    if jax.default_backend() != "gpu":
        return
    values = [terms(world, 1001, "float32", salt) for salt in range(3)]
    program = jax.jit(lambda arrays: [2 * each for each in rj.allreduce(arrays, op=rj.Sum)])
    for _ in range(2):
        found = program([each[world.rank].astype("float32") for each in values])
    right = [near(np.asarray(one), 2 * sum(each), "float32") for one, each in zip(found, values, strict=True)]
    yield Check("jax: allreduce in jit", on_all(world, all(right)))


def measure(world: rr.Communicator, tools: Any) -> Iterator[Check]:
    """Measure allreduces in place, medians of the slowest rank's wall clock; collective."""
    for nbytes in SIZES:
        array, times = tools.empty(nbytes).view("float32"), []
        array.fill(0)
        for turn in range(12):
            tools.ready()
            world.barrier()
            begin = time.perf_counter()
            world.allreduce(array, out=array)
            tools.ready()
            times += [time.perf_counter() - begin] if turn > 1 else []
        taken = float(np.median(world.allreduce(np.array(times), "max")))
        bus = 2 * (world.size - 1) / world.size * nbytes / taken / 1e9
        yield Check(f"{nbytes >> 10} KiB float32", None, f"{taken * 1e6:.0f} us, busbw {bus:.2f} GB/s")
    yield Check(f"{mpi_library()}", None, world.gpu.explain(Collective.ALLREDUCE))


def on_cupy(values: Array, dtype: str) -> Any:
    """Return a CuPy array."""
    import cupy
    import ml_dtypes

    return cupy.asarray(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


def work(path: str, found: Path) -> None:
    """Do all checks of a path on this rank; rank 0 writes each down."""
    rr.init()
    world = rr.world()
    tools = cupy_tools(world.topology.local_rank(world.rank))
    if path == "nccl" and len(take_inventory().devices) < world.size:
        # NCCL takes ranks that share a GPU if it believes that they are on several hosts; then it uses sockets.
        os.environ.update(NCCL_HOSTID=str(world.rank), NCCL_SOCKET_IFNAME="lo")
    checks = chain(
        check_allreduce(world, path, on_cupy, lambda array: array.get()),
        check_others(world, on_cupy, lambda array: array.get()),
        measure(world, tools),
        check_torch(world),
        check_modes(world),
        check_jax(world),
    )
    with found.open("a", encoding="utf-8") as file:
        for check in checks:
            if world.rank == 0:
                file.write(json.dumps(asdict(check)) + "\n")
                file.flush()
    rr.shutdown()


# ---- the whole ----


def run(path: str, ranks: int, folder: Path) -> list[Check]:
    """Check a path with some ranks, in a job that is ended after a while."""
    found = folder / f"{path}-{ranks}"
    found.touch()
    own = [sys.executable, str(Path(__file__).resolve()), "--worker", path, str(found)]
    command = ["timeout", "--kill-after=10", f"{LIMIT_S:g}", "mpirun", "-np", str(ranks), *own]
    environ = {**os.environ, "RINGREDUCE_GPU": path, "RINGREDUCE_TIMEOUT": "60"}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environ, check=False)
    print(done.stderr, end="", file=sys.stderr)
    last = next((line.strip() for line in reversed(done.stderr.splitlines()) if "Error" in line), "")
    checks = [Check(**json.loads(line)) for line in found.read_text(encoding="utf-8").splitlines()]
    return [*checks, Check("to its end", done.returncode == 0, f"exit status {done.returncode}; {last}")]


def why_not(path: str, inventory: Inventory) -> str:
    """Say why a path cannot run here; empty if it can."""
    if path == "nccl" and not inventory.nccl:
        return "CuPy finds no NCCL"
    if path != "mpi":
        return ""
    source = "import os; from ringreduce.gpu.awareness import cuda_awareness; f = cuda_awareness(os.environ); "
    asked = [sys.executable, "-c", source + "print('' if f.aware else f.reason)"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "the MPI library cannot be asked"


def page(inventory: Inventory, results: dict[tuple[str, int], list[Check]], left: dict[str, str]) -> str:
    """Return the report."""
    devices = f"{len(inventory.devices)} x {inventory.devices[0].name}"
    software = f"Driver {inventory.driver}, {', '.join(inventory.packages)}, NCCL {version_text(inventory.nccl)}"
    lines = [f"# ringreduce {rr.__version__} on {devices}, {time.strftime('%Y-%m-%d')}", "", f"{software}.", ""]
    if any(path == "nccl" and ranks > len(inventory.devices) for path, ranks in results):
        lines += [f"With nccl, ranks shared a GPU and talked over sockets: {SHARED}", ""]
    for (path, ranks), checks in results.items():
        failed = [each for each in checks if each.passed is False]
        passed = sum(each.passed is True for each in checks)
        lines += [f"## {path}, {ranks} ranks: {'FAILED' if failed else 'passed'}", "", f"{passed} checks passed."]
        lines += [f"- FAILED: {each.name}: {each.seen}" for each in failed]
        figures = [f"| {each.name} | {each.seen} |" for each in checks if each.passed is None]
        lines += ["", "| allreduce in place | median |", "|---|---|", *figures, ""] if figures else [""]
    return "\n".join([*lines, *(f"Not run: {path} ({why})." for path, why in left.items() if why), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what there is and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"some of {', '.join(PATHS)} (all)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the report")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker[0], Path(options.worker[1]))
        return 0
    if {*options.paths} - {*PATHS}:
        parser.error(f"the paths are {', '.join(PATHS)}")
    inventory = take_inventory()
    if not inventory.devices:
        why = inventory.problem or ("CuPy finds none" if inventory.packages else "CuPy is not installed")
        print(f"no GPU can be used here, so nothing was checked: {why}", file=sys.stderr)
        return 2
    left = {path: why_not(path, inventory) if path in (options.paths or PATHS) else "not asked for" for path in PATHS}
    options.results.mkdir(parents=True, exist_ok=True)
    name = inventory.devices[0].name.lower().replace(" ", "-")
    report, results = options.results / f"{time.strftime('%Y-%m-%d')}-{name}.md", dict[tuple[str, int], list[Check]]()
    with tempfile.TemporaryDirectory() as folder:
        for path, ranks in ((path, ranks) for path, why in left.items() if not why for ranks in (2, 4)):
            results[path, ranks] = run(path, ranks, Path(folder))
            report.write_text(page(inventory, results, left), encoding="utf-8")
    print(report.read_text(encoding="utf-8"), f"\nwritten to {report}", sep="")
    return int(any(each.passed is False for checks in results.values() for each in checks))


if __name__ == "__main__":
    sys.exit(main())
