"""Waves in a rotating basin: the linear shallow-water equations, each rank with some rows of the grid, in JAX.

    mpirun -np 2 python examples/shallow_water.py --save heights.npy
    python examples/shallow_water.py --save heights.npy       # alone, as a world of one rank: the same heights

The basin has walls in the south and in the north, and is periodic from west to east. Height is at the centres of cells,
velocity at their eastern and northern sides (Arakawa's C grid). Height steps first, then velocity with the new height.
A rank needs a row of each of its neighbours: `sendrecv`, within the loop that JAX compiles. At a wall there is none.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ringreduce.jax as rj

GRAVITY, DEPTH, CORIOLIS = 9.81, 100.0, 2e-4  # m/s2, m, 1/s
CELL, STEP = 5e3, 30.0  # m, s


class Water(NamedTuple):
    """This rank's rows, the southern ones first."""

    height: jax.Array
    east: jax.Array
    north: jax.Array


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--rows", type=int, default=101)
    options.add_argument("--columns", type=int, default=120)
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--save", help="where rank 0 writes the heights, as .npy")
    given = options.parse_args()
    rj.init()
    rank, size = rj.rank(), rj.size()
    if given.rows < size:
        options.error(f"--rows must be at least the number of ranks, {size}")
    south = rank - 1 if rank > 0 else rj.PROC_NULL
    north = rank + 1 if rank + 1 < size else rj.PROC_NULL

    def with_row_south(field):
        row = rj.sendrecv(field[-1:], north, jnp.zeros_like(field[:1]), south)
        return jnp.concatenate([row, field])

    def with_row_north(field):
        row = rj.sendrecv(field[:1], south, jnp.zeros_like(field[:1]), north)
        return jnp.concatenate([field, row])

    def step(_, water):
        flow = with_row_south(water.north)
        outflow = water.east - jnp.roll(water.east, 1, axis=1) + flow[1:] - flow[:-1]
        height = water.height - STEP * DEPTH / CELL * outflow
        northward = (flow[1:] + flow[:-1] + jnp.roll(flow[1:] + flow[:-1], -1, axis=1)) / 4  # at the eastern sides
        slope = (jnp.roll(height, -1, axis=1) - height) / CELL
        east = water.east + STEP * (CORIOLIS * northward - GRAVITY * slope)
        rows = with_row_north(east)
        eastward = (rows[1:] + rows[:-1] + jnp.roll(rows[1:] + rows[:-1], 1, axis=1)) / 4  # at the northern sides
        rows = with_row_north(height)
        slope = (rows[1:] - rows[:-1]) / CELL
        faster = water.north - STEP * (CORIOLIS * eastward + GRAVITY * slope)
        if north is rj.PROC_NULL:
            faster = faster.at[-1].set(0.0)  # the northern wall
        return Water(height, east, faster)

    @jax.jit
    def run(water):
        return jax.lax.fori_loop(0, given.steps, step, water)

    own = np.array_split(np.arange(given.rows), size)[rank]  # may be one row more on some ranks
    y, x = np.meshgrid(own - given.rows / 2, np.arange(given.columns) - given.columns / 2, indexing="ij")
    hill = jnp.asarray(np.exp(-(x**2 + y**2) / 50), jnp.float32)  # 1 m high
    water = run(Water(hill, jnp.zeros_like(hill), jnp.zeros_like(hill)))

    volumes = rj.allreduce(jnp.stack([hill.sum(), water.height.sum()]), rj.Sum)
    heights = rj.gather(water.height)
    if rank == 0:
        print(f"{size} ranks, {given.steps} steps: heights from {heights.min():.3f} to {heights.max():.3f} m")
        print(f"volume above the mean: {volumes[0]:.3f} cells at the start, {volumes[1]:.3f} at the end")
        if given.save is not None:
            np.save(given.save, heights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
