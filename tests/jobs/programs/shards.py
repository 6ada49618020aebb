"""Goes to a folder on each rank; there rank 0 writes shards for webdataset.

Usage: shards.py FOLDER, where the samples are kept as well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import webdataset

folder = Path(sys.argv[1])
os.chdir(folder / "together")
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    generator = torch.Generator().manual_seed(7)
    draw = {"dtype": torch.float64, "generator": generator}
    # The last batch of a rank is smaller than that of the other.
    shards = [[(torch.randn(3, **draw), torch.randn(1, **draw)) for _ in range(count)] for count in (6, 5, 6, 6)]
    torch.save(shards, folder / "shards.pt")
    for number, samples in enumerate(shards):
        with webdataset.TarWriter(f"shards/{number}.tar") as file:
            for key, (inputs, target) in enumerate(samples):
                file.write({"__key__": f"{key}", "x.npy": inputs.numpy(), "y.npy": target.numpy()})
