"""Train a SchNet on graphs of different sizes; each atom counts the same, on any number of ranks.

    ringreduce run -np 2 python examples/schnet.py

A mean over the atoms of a rank, averaged over ranks, would weight atoms of small batches more: the step gets the number
of atoms.
"""

from __future__ import annotations

import torch
from torch import nn

import ringreduce.torch as hvd


class SchNet(nn.Module):
    """Continuous-filter convolutions: from kinds and places of atoms to a value for each."""

    def __init__(self, width=16, blocks=2):
        super().__init__()
        self.kinds = nn.Embedding(10, width)
        mlps = [nn.Sequential(nn.Linear(n, width), nn.Softplus(), nn.Linear(width, width)) for n in [8, width] * blocks]
        self.filters, self.updates = nn.ModuleList(mlps[::2]), nn.ModuleList(mlps[1::2])
        self.value = nn.Linear(width, 1)
        self.register_buffer("centres", torch.linspace(0, 5, 8))

    def forward(self, kinds, places, edges):
        sources, targets = edges
        distances = (places[sources] - places[targets]).norm(dim=1, keepdim=True)
        basis = torch.exp(-4 * (distances - self.centres).square())
        x = self.kinds(kinds)
        for weigh, update in zip(self.filters, self.updates, strict=True):
            x = x + update(torch.zeros_like(x).index_add(0, targets, x[sources] * weigh(basis)))
        return self.value(x).squeeze(1)


def together(graphs):
    """Return several graphs as one, in which none has an edge to another."""
    owner = torch.cat([torch.full_like(kinds, number) for number, (kinds, _, _) in enumerate(graphs)])
    edges = ((owner[:, None] == owner) & ~torch.eye(len(owner), dtype=torch.bool)).nonzero().T
    kinds, places, values = (torch.cat(each) for each in zip(*graphs, strict=True))
    return kinds, places, edges, values


hvd.init()
torch.manual_seed(0)
model = SchNet().double()
graphs = [
    (torch.randint(10, (n,)), torch.rand(n, 3, dtype=torch.float64), torch.randn(n, dtype=torch.float64))
    for n in torch.randint(2, 30, (24,)).tolist()
]
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
hvd.broadcast_parameters(model, root_rank=0)

for begin in range(0, len(graphs), 8):
    mine = graphs[begin : begin + 8][hvd.rank() :: hvd.size()]
    kinds, places, edges, values = together(mine)
    optimizer.zero_grad()
    (model(kinds, places, edges) - values).square().mean().backward()
    optimizer.step(samples=len(kinds))
