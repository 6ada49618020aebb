"""Draw a schedule as text, a line per round: for the documentation and for authors of algorithms.

r0->r1[b2]      rank 0 sends its block 2 to rank 1
r0->r1[b2+]     ... which combines it with its own
r0<=r1[b2+]     rank 0 loads block 2 from rank 1's memory and combines it with its own
r0=>r1[b2]      rank 0 stores its block 2 into rank 1's memory
[b2-5]          blocks 2 to 5
[b2>b5]         block 2 there becomes block 5 here
"""

from __future__ import annotations

import textwrap

from ringreduce.algorithms.schedule import Algorithm
from ringreduce.algorithms.verify import Kind, Move, verify
from ringreduce.common.topology import Topology


def draw(algorithm: Algorithm, topology: Topology, root: int = 0, width: int = 110) -> str:
    """Return the steps of ``algorithm`` on ``topology``, lines of at most ``width`` characters.

    Raises:
        ScheduleError: the schedules are wrong, so that there is nothing to draw.
    """
    nblocks = algorithm.nblocks(topology)
    title = (
        f"{algorithm.name} {algorithm.collective.value}, {topology.describe()}, {nblocks} block{'s' * (nblocks != 1)}"
    )
    lines = [title]
    for number, moves in enumerate(verify(algorithm, topology, root).rounds, start=1):
        label = f"step {number:<3d}"
        arrows = "  ".join(sorted(map(_arrow, moves), key=_by_numbers))
        # Only the two spaces between arrows may become a line break: no arrow holds a space.
        lines += textwrap.wrap(arrows, width, initial_indent=label, subsequent_indent=" " * len(label))
    return "\n".join(lines)


def _arrow(move: Move) -> str:
    actor, other = (move.target, move.source) if move.kind is Kind.LOAD else (move.source, move.target)
    blocks = _span(move.blocks) if move.blocks == move.into else f"{_span(move.blocks)}>{_span(move.into)}"
    return f"r{actor}{move.kind.value}r{other}[{blocks}{'+' * move.reduce}]"


def _by_numbers(arrow: str) -> tuple[bool, list[int]]:
    """Order arrows by kind (loads come before stores), then by rank."""
    digits = "".join(char if char.isdigit() else " " for char in arrow)
    return Kind.STORE.value in arrow, [int(number) for number in digits.split()]


def _span(blocks: range) -> str:
    return f"b{blocks.start}" if len(blocks) == 1 else f"b{blocks.start}-{blocks.stop - 1}"
