"""Drawings of schedules as SVG, made of the moves that the proof of a schedule has carried out.

python docs/site/drawings.py            write docs/ring.svg, the drawing in docs/concepts.md
python docs/site/drawings.py --check    exit with 1 if it is not what the code draws
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent))

from ringreduce.algorithms import Algorithm, Collective, find  # noqa: E402
from ringreduce.algorithms.verify import Kind, Move, verify  # noqa: E402
from ringreduce.common.topology import Topology  # noqa: E402

CELL, GAP, NODE_GAP, ROW, LEFT, TOP = 26, 26, 30, 74, 64, 34
#: Of the drawing in a file, where time goes to the right: a block, from step to step, from rank to rank, margins.
SMALL, STEP, LINE, MARGIN, HEAD = 15, 104, 42, 58, 40
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1b1d21 } .count { font-size: 10px; text-anchor: middle }
.paper { fill: #ffffff } .cell { fill: #26a69a; stroke: #1b1d21; stroke-opacity: .5 } .head { text-anchor: middle }
path { fill: none; stroke-width: 1.6 } .sum { stroke: #d2691e } .copy { stroke: #85898f }
polygon.sum { fill: #d2691e } polygon.copy { fill: #85898f }
@media (prefers-color-scheme: dark) { .paper { fill: #1b1d21 } text { fill: #e4e4e4 }
.cell { fill: #14746b; stroke: #e4e4e4 } }
"""


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


def banner(name: str, size: int) -> str:
    """Return the picture of docs/concepts.md, a file of its own: a row for each rank, steps from left to right."""
    algorithm, topology = find(Collective.ALLREDUCE, name), Topology.uniform(1, size)
    nblocks, rounds = algorithm.nblocks(topology), verify(algorithm, topology).rounds
    terms = _begin(algorithm, topology)
    parts = [f'<text x="8" y="{HEAD + LINE * rank + 12}">rank {rank}</text>' for rank in range(size)]
    parts += (_small_arrow(move, number) for number, moves in enumerate(rounds, start=1) for move in moves)
    parts += _column(terms, 0, "begin")
    for number, moves in enumerate(rounds, start=1):
        terms = _after(terms, list(moves))
        parts += _column(terms, number, f"step {number}")
    assert all(len(held) == size for row in terms for held in row), "the drawing does not end with the sum"
    width, height = MARGIN + STEP * len(rounds) + SMALL * nblocks + 12, HEAD + LINE * (size - 1) + SMALL + 12
    title = f"{name} allreduce on {size} ranks: after each step, of how many ranks each block holds the sum"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f'<rect class="paper" width="{width}" height="{height}"/>\n' + "\n".join(parts) + "</svg>\n"
    )


def _column(terms: list[list[frozenset[int]]], number: int, label: str) -> Iterator[str]:
    left = MARGIN + STEP * number
    yield f'<text class="head" x="{left + SMALL * len(terms[0]) / 2:g}" y="{HEAD - 14}">{label}</text>'
    for rank, row in enumerate(terms):
        y = HEAD + LINE * rank
        yield f'<rect class="paper" x="{left}" y="{y}" width="{SMALL * len(row)}" height="{SMALL}"/>'  # over arrows
        for block, held in enumerate(row):
            x, share = left + SMALL * block, len(held) / len(terms)
            yield f'<rect class="cell" x="{x}" y="{y}" width="{SMALL}" height="{SMALL}" fill-opacity="{share:.2f}"/>'
            yield f'<text class="count" x="{x + SMALL / 2:g}" y="{y + 11.5}">{len(held)}</text>'


def _small_arrow(move: Move, number: int) -> str:
    """Return an arrow from block to block: down or up between the rows, as the next rank is below or the first one."""
    left = MARGIN + STEP * (number - 1)
    x, end = (left + SMALL * (each.start + each.stop) / 2 for each in (move.blocks, move.into))
    end += STEP
    down = move.target > move.source
    y, bottom = (HEAD + LINE * rank + SMALL * side for rank, side in ((move.source, down), (move.target, not down)))
    kind, tip, bend = "sum" if move.reduce else "copy", -6 if down else 6, 16 if down else -16
    return (
        f'<path class="{kind}" d="M{x:g} {y}C{x:g} {y + bend} {end:g} {bottom - bend} {end:g} {bottom + tip}"/>'
        f'<polygon class="{kind}" points="{end:g},{bottom} {end - 3.5:g},{bottom + tip} {end + 3.5:g},{bottom + tip}"/>'
    )


def main() -> int:
    """Draw or check; return the exit code."""
    path, drawn = DOCS / "ring.svg", banner("ring", 4)
    if "--check" in sys.argv[1:]:
        return int(path.read_text(encoding="utf-8") != drawn)
    path.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
