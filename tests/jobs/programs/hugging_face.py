"""Runs Accelerate, transformers and torchmetrics on ringreduce, and the first two on Gloo: all must be equal.

Usage: hugging_face.py FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, broadcast_object_list, gather_object, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, Metric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ringreduce.torch as hvd

TRAIN, TEST = 37, 11  # no multiples of ranks or batches
FOLDER = Path(sys.argv[1])
RANK, SIZE = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])


@contextmanager
def on_gloo(name: str) -> Iterator[None]:
    """Make a default process group on Gloo, whose ranks meet at a file; afterwards nobody knows one."""
    dist.init_process_group("gloo", init_method=f"file://{FOLDER / name}", rank=RANK, world_size=SIZE)
    yield
    end()


@contextmanager
def on_ringreduce() -> Iterator[None]:
    """Make one on ringreduce, as a program does; afterwards nobody knows one."""
    dist.init_process_group("ringreduce")
    yield
    end()


def end() -> None:
    dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


# ---- Accelerate ----


def train_with_accelerate() -> tuple[list[float], dict[str, Tensor]]:
    """Train a regression; return losses, and the weights."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    inputs = torch.randn(TRAIN + TEST, 5, dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True).sin()
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    samples = TensorDataset(inputs[:TRAIN], targets[:TRAIN])
    loaders = DataLoader(samples, batch_size=3, shuffle=True), DataLoader(samples, batch_size=3)
    model, optimizer, shuffled, ordered = accelerator.prepare(model, optimizer, *loaders)
    losses = []

    def epoch(data: DataLoader) -> None:
        for given, target in data:
            with accelerator.accumulate(model):
                loss = (model(given) - target).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())

    epoch(shuffled)
    folder = FOLDER / f"accelerate-{dist.get_backend()}"
    accelerator.save_state(str(folder))
    epoch(ordered)
    first = {name: tensor.clone() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}

    # Going back to the state that was saved, and the same epoch again, make the same weights.
    count = len(losses) // 2
    accelerator.load_state(str(folder))
    epoch(ordered)
    assert losses[count : 2 * count] == losses[2 * count :], losses
    assert_same(first, accelerator.unwrap_model(model).state_dict())
    assert (folder / "model.safetensors").exists()
    return losses, first


def check_accelerate() -> None:
    """What Accelerate's own calls return, by closed forms."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    assert (accelerator.num_processes, accelerator.process_index) == (SIZE, RANK)
    assert (accelerator.local_process_index, accelerator.is_main_process) == (RANK, RANK == 0)
    total = SIZE * (SIZE + 1) / 2
    mine = torch.full((2, 3), RANK + 1.0)

    assert accelerator.gather(mine)[:, 0].tolist() == [rank + 1.0 for rank in range(SIZE) for _ in range(2)]
    assert torch.equal(accelerator.reduce(mine, "sum"), torch.full((2, 3), total))
    assert torch.equal(accelerator.reduce(mine, "mean"), torch.full((2, 3), total / SIZE))
    assert accelerator.pad_across_processes(torch.ones(RANK + 1)).tolist() == [1] * (RANK + 1) + [0] * (SIZE - RANK - 1)
    assert gather_object([RANK, "rank"]) == [each for rank in range(SIZE) for each in (rank, "rank")]
    assert broadcast_object_list([RANK, "zero" if RANK == 0 else ""]) == [0, "zero"]

    # Every sample once and in order, although the last batches are uneven.
    data = accelerator.prepare(DataLoader(TensorDataset(torch.arange(TEST)), batch_size=2))
    assert torch.cat([accelerator.gather_for_metrics(each) for (each,) in data]).tolist() == list(range(TEST))

    share = -(-5 // SIZE)
    with accelerator.split_between_processes(list(range(5))) as part:
        assert part == list(range(5))[RANK * share : (RANK + 1) * share]
    with accelerator.main_process_first():
        first = FOLDER / "first"
        assert first.exists() == (RANK > 0)
        first.touch()
    accelerator.wait_for_everyone()


def check_sharding_with_accelerate() -> None:
    """One copy per node, where accumulated gradients are clipped, makes the weights of DDP, up to rounding."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    trained = []
    for shards in False, True:
        set_seed(3)
        inputs = torch.randn(TRAIN, 5, dtype=torch.float64)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        data = accelerator.prepare(DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=3))
        if shards:
            optimizer = accelerator.prepare(hvd.DistributedOptimizer(optimizer, model, shard="node"))
            clip = optimizer.optimizer.clip_grad_norm_
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
            clip = partial(accelerator.clip_grad_norm_, list(model.parameters()))
        for given, target in data:
            with accelerator.accumulate(model):
                accelerator.backward((model(given) - target).square().mean())
                if accelerator.sync_gradients:
                    clip(0.1)
                optimizer.step()
                optimizer.zero_grad()
        trained.append(accelerator.unwrap_model(model).state_dict())
    torch.testing.assert_close(*trained, rtol=1e-12, atol=1e-12)  # a norm is the sum of its parts'


# ---- the Trainer of transformers ----


def train_with_transformers() -> tuple[list[float], dict[str, Tensor]]:
    """Train a tiny GPT on text; return losses, and the weights."""
    backend = dist.get_backend()
    data = torch.tensor(list(topics["lambda"].encode() + topics["atom-literals"].encode()))
    data = data[: len(data) // 32 * 32].view(-1, 32)
    pieces = [{"input_ids": each, "labels": each} for each in data]

    def trained(name: str, resume: Path | None = None) -> Trainer:
        torch.manual_seed(1)
        sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
        chances = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **chances, bos_token_id=0, eos_token_id=0))
        # A folder for each rank, to see who writes what.
        arguments = TrainingArguments(
            output_dir=str(FOLDER / f"{name}-{backend}-{RANK}"),
            use_cpu=True,
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            per_device_eval_batch_size=2,
            learning_rate=0.01,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_steps=3,
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            seed=1,
        )
        assert (arguments.world_size, arguments.process_index, arguments.local_process_index) == (SIZE, RANK, RANK)
        trainer = Trainer(model, arguments, train_dataset=pieces[5:], eval_dataset=pieces[:5])
        trainer.train(resume_from_checkpoint=resume and str(resume))
        return trainer

    def losses(trainer: Trainer) -> list[float]:
        history = trainer.state.log_history
        return [line[key] for line in history for key in ("loss", "eval_loss") if key in line]

    whole = trained("gpt")
    weights = whole.model.state_dict()
    assert (FOLDER / f"gpt-{backend}-{RANK}" / "checkpoint-3" / "model.safetensors").exists() == (RANK == 0)
    dist.barrier()
    again = trained("again", FOLDER / f"gpt-{backend}-0" / "checkpoint-3")
    assert_same(again.model.state_dict(), weights)
    assert losses(again) == losses(whole)
    return losses(whole), weights


# ---- torchmetrics ----


def check_torchmetrics() -> None:
    """Metrics over the ranks are those of one process with all data; ranks have different numbers of batches."""
    draw = torch.Generator().manual_seed(7)
    scores = torch.randn(TRAIN, 4, generator=draw).softmax(1)
    labels = torch.randint(4, (TRAIN,), generator=draw)
    own = torch.arange(TRAIN) < 29 if RANK == 0 else torch.arange(TRAIN) >= 29

    def equal(metric: Callable[..., Metric], *data: Tensor) -> None:
        ours, alone = metric(), metric(sync_on_compute=False)
        for batch in zip(*(each[own].split(4) for each in data), strict=True):
            ours.update(*batch)
        alone.update(*data)
        torch.testing.assert_close(ours.compute(), alone.compute(), rtol=1e-6, atol=1e-7)

    equal(lambda **options: MulticlassAccuracy(4, average="macro", **options), scores, labels)
    equal(BinaryAUROC, scores[:, 0], (labels == 0).int())  # which gathers lists of uneven tensors
    equal(MeanSquaredError, scores[:, 0], scores[:, 1])
    equal(MeanMetric, scores[:, 2])
    equal(CatMetric, scores)


def assert_same(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name


def main() -> None:
    for train in train_with_accelerate, train_with_transformers:
        with on_gloo(train.__name__):
            expected_losses, expected = train()
        with on_ringreduce():
            losses, weights = train()
            listed = [each.tolist() for each in weights.values()]
            assert gather_object([listed]) == [listed] * SIZE  # all ranks have learnt the same
        assert losses == expected_losses, (losses, expected_losses)
        assert_same(weights, expected)
    with on_ringreduce():
        check_accelerate()
        check_sharding_with_accelerate()
        check_torchmetrics()
    print("done")


if __name__ == "__main__":
    main()
