"""Drawings of schedules as SVG, made of the moves that the proof of a schedule has carried out."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ringreduce.algorithms import Algorithm, Collective, find
from ringreduce.algorithms.verify import Kind, Move, verify
from ringreduce.common.topology import Topology

CELL, GAP, NODE_GAP, ROW, LEFT, TOP = 26, 26, 30, 74, 64, 34


def drawing(collective: str, name: str, nnodes: int, local_size: int) -> str:
    """Return a figure: a row of blocks for each rank before and after every step, and arrows for what moves between.

    The number in a block says how many ranks' terms it holds; arrows are filled where a block is combined with the one
    that it meets, and empty where it takes that one's place.
    """
    algorithm = find(Collective(collective), name)
    topology = Topology.uniform(nnodes, local_size)
    rows = [row for number, moves in enumerate(verify(algorithm, topology).rounds, 1) for row in _halves(number, moves)]
    lefts = list(_lefts(topology, algorithm.nblocks(topology)))
    width = lefts[-1] + CELL * algorithm.nblocks(topology) + 12
    height = TOP + ROW * len(rows) + CELL + 10
    parts = [f'<text class="rr-head" x="{left}" y="{TOP - 12}">rank {rank}</text>' for rank, left in enumerate(lefts)]
    terms = _begin(algorithm, topology)
    parts += _row(lefts, terms, 0, "begin")
    for number, (label, moves) in enumerate(rows, start=1):
        terms = _after(terms, moves)
        parts += (_arrow(lefts, move, number) for move in moves)
        parts += _row(lefts, terms, number, label)
    assert all(len(held) == topology.size for row in terms for held in row), "the drawing does not end with the sum"
    title = f"{name.replace('_', ' ')} {collective} on {topology.describe()}"
    return (
        f'<figure class="rr-drawing"><svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg><figcaption>{escape(title)}</figcaption></figure>'
    )


def _halves(number: int, moves: tuple[Move, ...]) -> Iterator[tuple[str, list[Move]]]:
    """Yield a step with its label; one that loads and then stores as two rows."""
    stores = [move for move in moves if move.kind is Kind.STORE]
    others = [move for move in moves if move.kind is not Kind.STORE]
    if others:
        yield f"step {number}", others
    if stores:
        yield "stores" if others else f"step {number}", stores


def _lefts(topology: Topology, nblocks: int) -> Iterator[int]:
    left = LEFT
    for node in topology.nodes:
        for _ in node:
            yield left
            left += CELL * nblocks + GAP
        left += NODE_GAP


def _begin(algorithm: Algorithm, topology: Topology) -> list[list[frozenset[int]]]:
    """Return whose terms each block of each rank holds before the first step: the rank's own."""
    assert algorithm.collective is Collective.ALLREDUCE, algorithm
    return [[frozenset([rank])] * algorithm.nblocks(topology) for rank in range(topology.size)]


def _after(terms: list[list[frozenset[int]]], moves: list[Move]) -> list[list[frozenset[int]]]:
    """Carry out moves that are made at once on sets of ranks."""
    new = [list(row) for row in terms]
    for move in moves:
        for block, into in zip(move.blocks, move.into, strict=True):
            came = terms[move.source][block]
            new[move.target][into] = new[move.target][into] | came if move.reduce else came
    return new


def _row(lefts: list[int], terms: list[list[frozenset[int]]], number: int, label: str) -> Iterator[str]:
    top = TOP + ROW * number
    yield f'<text class="rr-step" x="4" y="{top + 18}">{label}</text>'
    for left, row in zip(lefts, terms, strict=True):
        for block, held in enumerate(row):
            x, share = left + CELL * block, len(held) / len(lefts)
            yield f'<rect class="rr-cell" x="{x}" y="{top}" width="{CELL}" height="{CELL}" fill-opacity="{share:.2f}"/>'
            yield f'<text class="rr-count" x="{x + CELL / 2}" y="{top + 18}">{len(held)}</text>'


def _arrow(lefts: list[int], move: Move, number: int) -> str:
    begin = lefts[move.source] + CELL * (move.blocks.start + move.blocks.stop) / 2
    end = lefts[move.target] + CELL * (move.into.start + move.into.stop) / 2
    top, bottom = TOP + ROW * (number - 1) + CELL + 2, TOP + ROW * number - 2
    kind = "rr-sum" if move.reduce else "rr-copy"
    head = f"{end:g},{bottom} {end - 4:g},{bottom - 8} {end + 4:g},{bottom - 8}"
    return (
        f'<path class="{kind}" d="M{begin:g} {top}C{begin:g} {top + 20} {end:g} {bottom - 30} {end:g} {bottom - 8}"/>'
        f'<polygon class="{kind}" points="{head}"/>'
    )
