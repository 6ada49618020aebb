"""Stop Lightning within an epoch, and go on with the next batch.

    ringreduce run -np 2 python examples/lightning_stops.py

After SIGTERM rank 0 writes stopped.ckpt and all ranks end with status 75; started again, the job goes on from it. A
callback asks after each batch, but for the last of an epoch, which Lightning would begin again. The loader skips the
batches of the epoch that are done.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import islice

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import ringreduce as rr
import ringreduce.torch.lightning  # makes strategy="ringreduce" known

PATH = "stopped.ckpt"


class Loader(DataLoader):
    """Goes on within an epoch, which Lightning would begin again."""

    first = done = 0  # batches of the epoch

    def __iter__(self):
        first, self.first = self.first, 0
        return islice(super().__iter__(), first, None)

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.first = state["done"] % len(self)


class Stops(lightning.Callback):
    """Saves a checkpoint and ends the job, if it is asked to stop."""

    def on_train_start(self, trainer, module):
        signal.signal(signal.SIGTERM, lambda *_: rr.request_stop())  # in place of Lightning's own

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.train_dataloader.done = batch_idx + 1
        if not trainer.is_last_batch and rr.stopping():  # Lightning would begin that epoch again
            trainer.save_checkpoint(PATH)
            sys.exit(os.EX_TEMPFAIL)


class Model(lightning.LightningModule):
    """A linear layer, and how it learns."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 1)

    def training_step(self, batch, _):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


lightning.seed_everything(3, verbose=False)
inputs = torch.randn(40, 5)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
model = Model()
trainer = lightning.Trainer(strategy="ringreduce", accelerator="cpu", max_epochs=3, callbacks=[Stops()], logger=False)
trainer.fit(model, Loader(data, batch_size=4, shuffle=True), ckpt_path=PATH if os.path.exists(PATH) else None)
