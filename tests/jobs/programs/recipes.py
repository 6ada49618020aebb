"""Compares what recipes have written on two ranks with what one process makes: a world of one, and plain torch.

Usage: recipes.py FOLDER, which has the recipes, in a folder where they have run on two ranks.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

import ringreduce as rr


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name], rtol=1e-9, atol=1e-9)


def saved(name: str) -> dict[str, Any]:
    return torch.load(name, weights_only=True)["parts"]


def adapters_of_torch(recipe: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train as lora.py does, on whole batches, without checkpointing of activations and without ringreduce."""
    torch.manual_seed(0)
    base = recipe["LlamaForCausalLM"](recipe["LlamaConfig"](**recipe["sizes"])).double()
    texts = torch.randint(64, (24, 12))
    model = get_peft_model(base, recipe["adapters"])
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for batch in texts.split(8):
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return get_peft_model_state_dict(model)


def line_of_torch(shards: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Train as webdata.py does, from what two ranks read of shards: each step has a batch of each."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streams = [shards[rank] + shards[rank + 2] for rank in range(2)]
    for begin in range(0, len(streams[0]), 4):
        batch = [sample for stream in streams for sample in stream[begin : begin + 4]]
        inputs, targets = map(torch.stack, zip(*batch, strict=True))
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return model.state_dict()


folder, together = Path(sys.argv[1]), Path.cwd()
adapters = saved("lora.pt")["adapters"]
assert any("lm_head" in name for name in adapters)
assert all("lora_" in name or "lm_head" in name for name in adapters), adapters.keys()
assert_close(saved("reentrant.pt")["adapters"], adapters)
assert_close(saved("webdata.pt")["model"], line_of_torch(torch.load(folder / "shards.pt")))

rr.shutdown()
os.environ["RINGREDUCE_STANDALONE"] = "1"
alone = folder / f"alone-{os.environ['OMPI_COMM_WORLD_RANK']}"
alone.mkdir()
os.chdir(alone)
recipe = runpy.run_path(str(folder / "lora.py"))
assert_close(saved("lora.pt")["adapters"], adapters)
assert_close(adapters_of_torch(recipe), adapters)
runpy.run_path(str(folder / "export.py"))
runpy.run_path(str(folder / "lora_trainer.py"))
weights = "lora_trainer/last/adapter_model.safetensors"
assert_close(load_file(weights), load_file(together / weights))
print("equal")
