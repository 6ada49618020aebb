"""Train adapters of PEFT with the Trainer of transformers, on the backend of torch.distributed.

    ringreduce run -np 2 python examples/lora_trainer.py

The Trainer saves the adapters alone, in its checkpoints, too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

dist.init_process_group("ringreduce")  # before TrainingArguments
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
base = LlamaForCausalLM(LlamaConfig(**sizes)).double()
texts = torch.randint(64, (24, 12))

adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
arguments = TrainingArguments(
    output_dir="lora_trainer",
    max_steps=3,
    per_device_train_batch_size=8 // dist.get_world_size(),
    gradient_checkpointing=True,
    ddp_find_unused_parameters=False,
    report_to=[],
)
trainer = Trainer(
    get_peft_model(base, adapters),
    arguments,
    train_dataset=[{"input_ids": text, "labels": text} for text in texts],
)
trainer.train()
trainer.save_model("lora_trainer/last")
