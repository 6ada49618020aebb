"""One round of messages of all ranks, as arrays, and the queues before links.

Ranks are numbered by their place along the nodes here, see `Topology.order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Lines:
    """Queues of messages, one before each link; a link takes its messages in the order in which they are ready.

    Of messages that are ready at the same time, the first in ``order`` goes first.

    Args:
        links: of each message.
        order: of each message.
    """

    def __init__(self, links: Numbers, order: Numbers) -> None:
        self.links, counts = np.unique(links, return_counts=True)
        self.of = np.searchsorted(self.links, links)
        arranged = np.lexsort((order, links))
        self._single = bool((counts == 1).all())
        self._messages = arranged if self._single else np.full((len(counts), counts.max()), len(links))
        if not self._single:
            self._messages[np.arange(counts.max()) < counts[:, None]] = arranged

    def serve(self, ready: Floats, taking: Floats, free: Floats) -> Floats:
        """Return when each message ends that is ready then and takes so long.

        Args:
            ready: seconds, of each message.
            taking: seconds, of each message.
            free: when each link is free; changed to when it has done all.
        """
        ends = np.empty_like(ready)
        if self._single:
            mine = self._messages
            ends[mine] = free[self.links] = np.maximum(ready[mine], free[self.links]) + taking[mine]
            return ends
        padded = np.append(ready, np.inf)[self._messages]
        by_time = np.argsort(padded, axis=1, kind="stable")
        messages = np.take_along_axis(self._messages, by_time, axis=1)
        busy = np.append(taking, 0.0)[messages]
        real = messages < len(ready)
        ready_then = np.where(real, np.append(ready, 0.0)[messages], -np.inf)
        total = np.cumsum(busy, axis=1)
        begins = np.maximum(ready_then, free[self.links][:, None]) - (total - busy)
        there = np.maximum.accumulate(begins, axis=1) + total
        free[self.links] = there[:, -1]
        ends[messages[real]] = there[real]
        return ends


class Started(NamedTuple):
    """The messages that start in a round.

    Attributes:
        source, target: the ranks that send and receive each.
        number: which of the messages it is that its rank starts in this round, from 1.
        nblocks: what it carries.
    """

    source: Numbers
    target: Numbers
    number: Numbers
    nblocks: Numbers


@dataclass(eq=False, slots=True)
class Round:
    """One round of all ranks.

    A rank that begins a step in it starts messages; one that ends a step in it has waited for messages, which may have
    been started before.

    Attributes:
        started: the messages that start.
        outside: which of them go from node to node.
        leaving, entering: the queues of those before the links out of nodes and into nodes.
        waited: positions, among the messages under way and then those that start, of what is waited for, by receiver.
        waiting: the ranks that wait, ascending.
        first: the position in ``waited`` of each one's first message.
        under_way: positions of the messages that are under way after this round.
        sent, received: messages that each rank starts, and that it has waited for.
        reduced, touched: blocks that each rank reduces, and that it loads and stores, at the end of its step.
        copied: blocks in messages of ranks of its node, which its processor copies then.
    """

    started: Started
    outside: Numbers
    leaving: Lines
    entering: Lines
    waited: Numbers
    waiting: Numbers
    first: Numbers
    under_way: Numbers
    sent: Floats
    received: Floats
    reduced: Floats
    touched: Floats
    copied: Floats


def make_round(
    started: Started,
    nodes: Numbers,
    outside: Numbers,
    waited: Numbers,
    receivers: Numbers,
    under_way: Numbers,
    work: Floats,
) -> Round:
    """Return a round.

    Args:
        started: the messages that start.
        nodes: of each rank, ascending.
        outside: the positions of messages between nodes.
        waited: positions of the messages that are waited for.
        receivers: the rank that waits for each of them.
        under_way: positions of the messages that are under way after this round.
        work: of each rank, in five rows: messages sent and waited for, blocks reduced, touched and copied.
    """
    locals_ = np.arange(len(nodes)) - np.searchsorted(nodes, nodes)
    sources = started.source[outside]
    targets = started.target[outside]
    order = locals_[sources] * (int(started.number.max(initial=0)) + 1) + started.number[outside]
    by_receiver = np.argsort(receivers, kind="stable")
    waiting, first = np.unique(receivers[by_receiver], return_index=True)
    leaving = Lines(nodes[sources], order)
    entering = Lines(nodes[targets], order)
    return Round(started, outside, leaving, entering, waited[by_receiver], waiting, first, under_way, *work)
