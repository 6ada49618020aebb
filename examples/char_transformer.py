"""Train a small character transformer in one of five kinds of parallelism, on torch.distributed.

    mpirun -np 2 python examples/char_transformer.py --parallel data       # DistributedDataParallel
    mpirun -np 2 python examples/char_transformer.py --shard node          # the same, but a node has the weights once
    mpirun -np 2 python examples/char_transformer.py --parallel fsdp       # fully_shard: weights are cut between ranks
    mpirun -np 2 python examples/char_transformer.py --parallel tensor     # each layer is cut, and the sequence
    mpirun -np 2 python examples/char_transformer.py --parallel pipeline   # each rank has some of the layers; 1F1B
    mpirun -np 4 python examples/char_transformer.py --parallel mesh       # fsdp between pairs, tensor within them
    python examples/char_transformer.py --parallel none                    # one process, and nothing parallel

Nothing in it belongs to ringreduce but the name of the backend, in `init_process_group`, and, for `--shard`, the
optimizer. The text is the reference of the language that comes with Python (`pydoc_data.topics`), so that nothing is
downloaded.

All kinds train the same model on the same batches: with the same options they print the same losses, up to rounding, on
any number of ranks. That is how to check that they compute the same. In the end every rank puts the whole model
together, and the exit code is 1 if they do not all hold the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pydoc_data import topics
from typing import Any

import torch
import torch.distributed as dist
from curves import Curves, add_option
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ringreduce.torch as hvd

CONTEXT = 64  # characters that a prediction may look back at
WIDTH, HEADS, LAYERS = 128, 4, 4
MICROBATCHES = 4  # of a batch, in a pipeline
PROMPT = "A function "

#: Computes the gradients of one batch, int64 of shape (rows, CONTEXT + 1), and returns a loss whose mean over the ranks
#: is that of the whole batch.
Step = Callable[[Tensor], Tensor]


def main() -> int:
    args = parse_args()
    dist.init_process_group("ringreduce")
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = f"{size} rank{'s' * (size != 1)}"
    torch.manual_seed(args.seed)  # all ranks begin with the same weights
    text = Text()
    model = Transformer(len(text.symbols))
    try:
        require(args.shard is None or args.parallel == "data", "goes without --shard")
        trained, step = (KINDS[args.parallel] if args.shard is None else rows_of_rank)(model, args.batch_size)
    except ValueError as error:
        sys.exit(f"--parallel {args.parallel} on {ranks}: {error}")
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained.parameters(), lr=args.lr)
    if args.shard is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, trained, shard=args.shard)

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    say(f"{args.parallel}, {ranks}, {args.steps} steps of {args.batch_size} x {CONTEXT} characters")
    losses: list[Tensor] = []
    curves = Curves("characters")
    begin = time.perf_counter()
    for index in range(1, args.steps + 1):
        optimizer.zero_grad()
        losses.append(step(text.batch(args.batch_size, seed=args.seed + index)))
        optimizer.step()
        if index % args.every == 0 or index == args.steps:
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            curves.add(index, float(mean), index * args.batch_size * CONTEXT, time.perf_counter() - begin)
            say(f"step {index}: training loss {mean:.5f}")
            losses.clear()
    busy_s = time.perf_counter() - begin

    whole = Transformer(len(text.symbols))
    whole.load_state_dict(gathered(trained, args.parallel))
    if rank == 0:
        say(f"loss on text never trained on: {text.test(whole):.4f} nats per character")
        say(f"with the frequencies of characters alone: {text.entropy():.4f}")
        say(f"throughput: {args.steps * args.batch_size * CONTEXT / busy_s:,.0f} characters/s over all ranks")
        if args.sample:
            say(f"what it writes:\n{text.sample(whole, args.sample, args.seed)}")
    identical = same_weights(whole)
    say(f"weights: {'bitwise identical' if identical else 'DIFFERENT'} on {ranks}")
    if args.shard is not None:
        say(memory_saved(optimizer))
    if args.plot and rank == 0:
        curves.save(args.plot, f"char_transformer.py, {args.parallel}, {ranks}")
    dist.destroy_process_group()
    return 0 if identical else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character transformer, in parallel.")
    parser.add_argument("--parallel", choices=list(KINDS), default="data", help="in which way (default: %(default)s)")
    parser.add_argument("--shard", choices=["node"], help="with --parallel data: what has weights and state once")
    parser.add_argument("--steps", type=int, default=300, help="batches to train on (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=24, help="rows of all ranks together (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the batches (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines (default: %(default)s)")
    parser.add_argument("--sample", type=int, default=300, help="characters to write in the end (default: %(default)s)")
    add_option(parser)
    return parser.parse_args()


# ---- the model, which knows of no parallelism ----


class Transformer(nn.Module):
    """Predicts each character from those before it; a stage of a pipeline lacks some of the parts."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.embedding: nn.Module | None = Embedding(symbols)
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})
        self.head: nn.Module | None = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for block in self.blocks.values():
            hidden = block(hidden)
        return hidden if self.head is None else self.head(hidden)


class Embedding(nn.Module):
    """Vectors for the characters and for their places."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(symbols, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, characters: Tensor) -> Tensor:
        return self.characters(characters) + self.places(torch.arange(characters.shape[1]))


class Block(nn.Module):
    """Attention, then a perceptron, each on what the norm before it gives, and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_perceptron = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.before_attention(hidden))
        return hidden + self.perceptron(self.before_perceptron(hidden))


class Attention(nn.Module):
    """Causal, of as many heads as the layers have outputs for: with tensor parallelism those of one rank."""

    def __init__(self) -> None:
        super().__init__()
        # Without biases: that of the keys has a gradient of 0, in which Adam would see the rounding.
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


# ---- the kinds of parallelism: what to train, and how to compute the gradients of a batch ----


def none(model: Transformer, batch_size: int) -> tuple[nn.Module, Step]:
    require(dist.get_world_size() == 1, "there is nothing for the others to do")
    return with_rows(model, 0, 1, batch_size)


def data(model: Transformer, batch_size: int) -> tuple[nn.Module, Step]:
    """Each rank takes some of the rows; gradients are averaged."""
    return with_rows(DistributedDataParallel(model), dist.get_rank(), dist.get_world_size(), batch_size)


def rows_of_rank(model: Transformer, batch_size: int) -> tuple[nn.Module, Step]:
    """As `data`, but the optimizer averages the gradients."""
    return with_rows(model, dist.get_rank(), dist.get_world_size(), batch_size)


def fsdp(model: Transformer, batch_size: int) -> tuple[nn.Module, Step]:
    """As `data`, and each rank keeps only a part of every weight while it does not compute with it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return with_rows(sharded(model, mesh), dist.get_rank(), dist.get_world_size(), batch_size)


def tensor(model: Transformer, batch_size: int) -> tuple[nn.Module, Step]:
    """Each rank has some of the heads and of the neurons, and, between those layers, some of the sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return with_rows(cut(model, mesh), 0, 1, batch_size)


def mesh(model: Transformer, batch_size: int) -> tuple[nn.Module, Step]:
    """Pairs of ranks are tensor-parallel, and each pair takes some of the rows, with its weights cut between pairs."""
    size = dist.get_world_size()
    require(size == 1 or size % 2 == 0, "takes an even number of ranks, or one")
    pairs = max(size // 2, 1)
    # That weights cut both ways are gathered in two calls, in the end, is no matter for a warning.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    grid = init_device_mesh("cpu", (pairs, size // pairs), mesh_dim_names=("data", "tensor"))
    both = sharded(cut(model, grid["tensor"]), grid["data"])
    return with_rows(both, grid.get_local_rank("data"), pairs, batch_size)


def pipeline(model: Transformer, batch_size: int) -> tuple[nn.Module, Step]:
    """Each rank has some of the layers, and works on other rows than its neighbours at the same time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    require(size <= MICROBATCHES, f"takes at most {MICROBATCHES} ranks, the microbatches of a batch")
    require(batch_size % MICROBATCHES == 0, f"--batch-size {batch_size} is no multiple of {MICROBATCHES}")
    first, last = rank == 0, rank == size - 1
    for index in range(LAYERS):
        if not rank * LAYERS // size <= index < (rank + 1) * LAYERS // size:
            del model.blocks[str(index)]
    if not first:
        model.embedding = None
    if not last:
        model.head = None
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def step(batch: Tensor) -> Tensor:
        losses: list[Tensor] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torch deprecates and uses itself
            schedule.step(
                *([batch[:, :-1]] if first else []),
                target=batch[:, 1:] if last else None,
                losses=losses if last else None,
            )
        return size * torch.stack(losses).mean().detach() if last else torch.zeros(())

    return model, step


KINDS = {each.__name__: each for each in (data, fsdp, tensor, pipeline, mesh, none)}


def with_rows(model: nn.Module, index: int, parts: int, batch_size: int) -> tuple[nn.Module, Step]:
    """Return the model, and a step on this rank's part of the rows, one of several equal ones."""
    require(batch_size % parts == 0, f"--batch-size {batch_size} is no multiple of {parts}")

    def step(batch: Tensor) -> Tensor:
        rows = batch.chunk(parts)[index]
        loss = loss_of(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        return loss.detach()

    return model, step


def sharded(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """Cut the weights between the ranks of a mesh; those of a layer are whole while the layer computes."""
    # Torch warns that nobody may change the logits in place, and nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def cut(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Cut the layers between the ranks of a mesh, as Megatron does, with sequence parallelism.

    Literature: Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing Activation Recomputation in Large
    Transformer Models, 2022.
    """
    size = mesh.size()
    require(HEADS % size == 0, f"the {HEADS} heads cannot be dealt to {size} ranks")
    whole_sequence = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "embedding.characters": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "embedding.places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "blocks.*.before_attention": SequenceParallel(),
        "blocks.*.attention": whole_sequence,
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.before_perceptron": SequenceParallel(),
        "blocks.*.perceptron": whole_sequence,
        "blocks.*.perceptron.0": ColwiseParallel(),
        "blocks.*.perceptron.2": RowwiseParallel(output_layouts=Shard(1)),
        "head.0": SequenceParallel(),
        "head.1": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    return model


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


# ---- after training ----


def gathered(model: nn.Module, kind: str) -> dict[str, Any]:
    """Return the weights of the whole model, on every rank."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if kind != "pipeline":
        return state
    stages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stages, state)
    return {name: weight for stage in stages for name, weight in stage.items()}


def same_weights(model: nn.Module) -> bool:
    """Say whether all ranks hold the same weights, bit for bit."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


def memory_saved(optimizer: torch.optim.Optimizer) -> str:
    """Say what it saves that the ranks of this node have weights and the optimizer's state in common."""
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    state = [each for of_weight in optimizer.state.values() for each in of_weight.values() if each.dim()]
    weights_mb, state_mb = (sum(each.nbytes for each in kept) / 1e6 for kept in (weights, state))
    ranks, saved_mb = hvd.local_size(), (hvd.local_size() - 1) * (weights_mb + state_mb)
    return (
        f"memory: the node has {weights_mb:.2f} MB of weights and {state_mb:.2f} MB of the optimizer's state once "
        f"and not {ranks} times: {saved_mb:.2f} MB saved"
    )


# ---- the text ----


class Text:
    """The reference of Python's language that comes with it; the last tenth is never trained on."""

    def __init__(self) -> None:
        whole = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        self.symbols = sorted(set(whole))
        number = {symbol: index for index, symbol in enumerate(self.symbols)}
        numbers = torch.tensor([number[symbol] for symbol in whole])
        self.train, self.held_out = numbers[: -len(whole) // 10], numbers[-len(whole) // 10 :]

    def batch(self, rows: int, seed: int) -> Tensor:
        """Return rows of CONTEXT + 1 characters from random places; the same on all ranks."""
        starts = torch.randint(len(self.train) - CONTEXT, (rows, 1), generator=torch.Generator().manual_seed(seed))
        return self.train[starts + torch.arange(CONTEXT + 1)]

    def entropy(self) -> float:
        """Return the loss on the held-out text of one who knows nothing but how frequent characters are."""
        counts = torch.bincount(self.train, minlength=len(self.symbols)).double() + 1
        return -float((counts / counts.sum()).log()[self.held_out].mean())

    @torch.no_grad()
    def test(self, model: nn.Module) -> float:
        """Return the loss on 200 rows of the held-out text."""
        starts = torch.linspace(0, len(self.held_out) - CONTEXT - 1, 200).long()
        rows = self.held_out[starts[:, None] + torch.arange(CONTEXT + 1)]
        return float(loss_of(model(rows[:, :-1]), rows[:, 1:]))

    @torch.no_grad()
    def sample(self, model: nn.Module, count: int, seed: int) -> str:
        """Return what the model writes after PROMPT."""
        generator = torch.Generator().manual_seed(seed)
        written = torch.tensor([[self.symbols.index(symbol) for symbol in PROMPT]])
        for _ in range(count):
            chances = torch.softmax(model(written[:, -CONTEXT:])[:, -1] / 0.7, 1)
            written = torch.cat([written, torch.multinomial(chances, 1, generator=generator)], 1)
        return "".join(self.symbols[index] for index in written[0])


if __name__ == "__main__":
    sys.exit(main())
