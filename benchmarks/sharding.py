"""Measure what `DistributedOptimizer(shard="node")` gains: the time of a step, beside others, and memory of a node.

    mpirun -np 2 python benchmarks/sharding.py                # 24 linear layers of 1024 x 1024, 25 M parameters
    mpirun -np 4 python benchmarks/sharding.py --layers 12
    mpirun -np 2 python benchmarks/sharding.py --peers        # and DDP, ZeroRedundancyOptimizer, FSDP2 over Gloo
    mpirun -np 2 python benchmarks/sharding.py --only memory  # or time
    RINGREDUCE_NODE_SIZE=2 mpirun -np 4 python benchmarks/sharding.py --only memory

Contenders are those of `torch_training.py` of the same names, with fused AdamW; turns, heaps and batches, too;
shard-all on several nodes alone. "after"
is the time from the end of the last rank's backward pass to the end of the step. DDP and FSDP2 communicate before, so
that it compares ringreduce with shard alone. The ranks' weights must be bitwise equal, and those of shard and
ringreduce; else the exit status is 1.

Memory is what all ranks of a node hold after some steps, with parameters, gradients and state, and did not hold before
the model was made: the proportional set sizes of private and shared memory (Pss_Anon and Pss_Shmem of
/proc/self/smaps_rollup), in which each page counts once, however many ranks have mapped it. The code that a library
maps is left out. Each contender is measured in a world of its own. "commits" adds one commit of an elastic state.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_training as training
from torch import nn

import ringreduce
import ringreduce.torch as hvd
from ringreduce.bench.peers import gloo_process_group
from ringreduce.common.quantities import plural

OURS, PEERS = ["ringreduce", "shard"], ["gloo", "zero", "fsdp-gloo"]
STEPS = 3  # of a contender before its memory is read
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)


@contextmanager
def world(*, gloo: bool) -> Iterator[None]:
    """Return a context with a world of its own, and with a process group over Gloo where a contender needs one."""
    ringreduce.init()
    with ExitStack() as stack:
        if gloo:
            stack.enter_context(gloo_process_group(ringreduce.world()))
        else:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ringreduce.local_size()))
        yield
        ringreduce.barrier()
    ringreduce.shutdown()


# ---- memory ----


def node_nbytes() -> int:
    """Return how many bytes the ranks of this node hold, their common ones once. Collective."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    ringreduce.barrier()  # no rank unmaps while another one counts
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    own = sum(int(each) << 10 for each in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB$", text, re.MULTILINE))
    return int(ringreduce.allreduce(np.array([own]), "sum")[0]) // len(ringreduce.world().topology.nodes)


def memory_of(name: str, arguments: argparse.Namespace, *, commits: bool = False) -> float:
    """Return what a contender takes, in bytes per parameter and node. Collective."""
    with world(gloo=name in PEERS):
        ringreduce.allreduce(np.ones(1 << 16))  # makes what every communicator has
        before = node_nbytes()
        torch.manual_seed(0)
        problem = training.mlp(arguments.width, arguments.layers)
        count = sum(each.numel() for each in problem.model.parameters())
        contender = training.CONTENDERS[name](problem.model, ADAMW)
        for x, y in islice(problem.batches(1), STEPS):
            contender.step(x, y)
        state = hvd.elastic.TorchState(problem.model, contender.optimizer) if commits else None
        if state is not None:
            state.commit()
        found = (node_nbytes() - before) / count
        del state, contender, problem
        gc.collect()
    return found


def measure_memory(arguments: argparse.Namespace, names: list[str]) -> dict[str, float]:
    """Return bytes per parameter and node of each contender, and of ringreduce's with commits."""
    small = argparse.Namespace(width=64, layers=2)
    for name in names:  # what a process keeps from a first use is nobody's
        memory_of(name, small, commits=name not in PEERS)
    found = {name: memory_of(name, arguments) for name in names}
    ours = [name for name in names if name not in PEERS]
    return found | {f"{name}, commits": memory_of(name, arguments, commits=True) for name in ours}


# ---- time ----


def measure_time(arguments: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Return the report of the times, the same on all ranks."""
    with world(gloo=arguments.peers):
        torch.manual_seed(0)
        problem = training.mlp(arguments.width, arguments.layers)
        contenders = [training.CONTENDERS[name](copy.deepcopy(problem.model), ADAMW) for name in names]
        whole, after = training.measure(contenders, problem.batches(arguments.batch), arguments.steps)
        medians = {
            title: {name: float(np.median(row)) * 1e3 for name, row in zip(names, rows, strict=True)}
            for title, rows in (("step_ms", whole), ("after_ms", after))
        }
        cpu = ringreduce.allreduce(np.array([each.cpu_s for each in contenders]) * 1e3, "average")
        medians["cpu_ms"] = dict(zip(names, cpu.tolist(), strict=True))
        return {
            **medians,
            "weights_agree": same_bits(contenders),
        }


def same_bits(contenders: list[training.Contender]) -> bool:
    """Return whether ranks have the same weights, and so do ringreduce with shard="node" and without. Collective."""
    plain, *others = [list(each.model.parameters()) for each in contenders if each.name in OURS]
    alike = all(torch.equal(a, b) for other in others for a, b in zip(plain, other, strict=True))
    return all(training.weights_agree([each]) for each in contenders) and alike


# ---- the report ----


def described(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured."""
    with world(gloo=False):
        sizes = {"width": arguments.width, "layers": arguments.layers, "batch": arguments.batch}
        count = sum(each.numel() for each in nn.Linear(arguments.width, arguments.width).parameters())
        return {
            **sizes,
            "parameters": arguments.layers * count,
            "steps": arguments.steps,
            "ranks": ringreduce.size(),
            "rank": ringreduce.rank(),
            "nodes": len(ringreduce.world().topology.nodes),
            "placement": ringreduce.world().topology.describe(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        }


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Return each figure over that of ringreduce, which comes first."""
    return {
        f"{title.removesuffix('_ms')} {name}/ringreduce": value / row["ringreduce"]
        for title, row in found.items()
        if isinstance(row, dict) and "ringreduce" in row
        for name, value in row.items()
    }


def table(found: dict[str, Any]) -> str:
    """Write the report for the eye."""
    config, over = found["config"], ratios(found)
    lines = [
        f"{config['layers']} x (Linear({config['width']}, {config['width']}) + ReLU), "
        f"{config['parameters'] / 1e6:.1f} M parameters, batch {config['batch']} per rank, AdamW fused; "
        f"{config['placement']}, {plural(config['cores'], 'core')}"
    ]
    if "memory" in found:
        lines += ["", f"{'bytes per parameter and node':<32}{'measured':>10}"]
        lines += [f"{name:<32}{value:>10.1f}" for name, value in found["memory"].items()]
    if "step_ms" in found:
        titles = ("step", "after", "cpu")
        lines += ["", f"median of {config['steps']} steps, in turns of {training.TURN}; ratios to ringreduce"]
        lines.append(f"{'':<12}" + "".join(f"{f'{title} (ms)':>12}{'':>7}" for title in titles))
        for name in found["step_ms"]:
            cells = [(found[f"{title}_ms"][name], over[f"{title} {name}/ringreduce"]) for title in titles]
            lines.append(f"{name:<12}" + "".join(f"{ms:>12.2f}{ratio:>7.2f}" for ms, ratio in cells))
        lines += ["", f"weights agree: {'yes' if found['weights_agree'] else 'NO'}"]
    return "\n".join(lines)


def main() -> int:
    """Measure and print; return the exit status, the same on all ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, default=1024, help="of a layer (1024)")
    parser.add_argument("--layers", type=int, default=24, help="how many (24)")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step (8)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each contender (30)")
    parser.add_argument("--peers", action="store_true", help="measure torch's own over Gloo, too")
    parser.add_argument("--only", choices=["memory", "time"], help="leave the other out")
    parser.add_argument("-J", "--output_file", type=Path, help="write the JSON report there")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"config": described(arguments)}
    names = OURS + ["shard-all"] * (found["config"].pop("nodes") > 1) + PEERS * arguments.peers
    if arguments.only != "time":
        found["memory"] = measure_memory(arguments, names)
    if arguments.only != "memory":
        found |= measure_time(arguments, names)
    if found["config"].pop("rank") == 0:
        print(table(found), flush=True)
        if arguments.output_file:
            found["ratios"] = ratios(found)
            arguments.output_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found.get("weights_agree", True) else 1


if __name__ == "__main__":
    sys.exit(main())
