"""Train a small GPT on English text, byte by byte, with the Trainer of Hugging Face transformers.

    mpirun -np 2 python examples/hf_trainer.py
    python examples/hf_trainer.py              # alone, as a world of one rank

One line is ringreduce's: it makes torch's process group before the Trainer looks for one. `ddp_backend` is left out, as
the group is there. The text is Python's own reference, which comes with Python; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH = 64


class Text(Dataset[dict[str, Tensor]]):
    """Pieces of 64 bytes, each of which is learnt from those before it."""

    def __init__(self, text: str) -> None:
        data = torch.tensor(list(text.encode()))
        self.pieces = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's reference.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--folder", default="gpt", help="where checkpoints go (default: ./%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    args = parser.parse_args()

    dist.init_process_group("ringreduce")
    arguments = TrainingArguments(
        output_dir=args.folder,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        warmup_steps=20,
        eval_strategy="steps",
        eval_steps=100,
        save_steps=100,
        logging_steps=50,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    text = "\n".join(topics[each] for each in sorted(topics))
    bound = len(text) * 19 // 20
    torch.manual_seed(1)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=Text(text[:bound]), eval_dataset=Text(text[bound:])
    )
    trainer.train(resume_from_checkpoint=args.resume)
    loss = trainer.evaluate()["eval_loss"]

    weights = gather_object([[each.detach().numpy().tobytes() for each in trainer.model.parameters()]])
    identical = all(each == weights[0] for each in weights)
    if trainer.is_world_process_zero():
        print(f"{arguments.world_size} ranks: {loss:.3f} nats per byte of text never trained on")
        print(f"weights: {'bitwise identical' if identical else 'DIFFERENT'}")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
