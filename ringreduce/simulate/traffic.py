"""The messages of all ranks, round by round, from the schedules that are executed.

A schedule of P ranks can have P * 2(P - 1) steps. But where it is that long, the steps of one rank, or of the ranks of
one node, are everyone's: moved by a shift of the ranks, or by an exclusive or. That is found by comparing steps, and
then a round is a few arrays. Where ranks also begin at the same time, on equal links, all nodes do the same at the same
time, and the arrays hold one of them. Other schedules have few steps: all are generated.

Ranks are numbered by their place along the nodes here, see `Topology.order`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ringreduce.algorithms import Algorithm, Step
from ringreduce.common.errors import ConfigError
from ringreduce.common.topology import Topology
from ringreduce.simulate.rounds import Floats, Numbers, Round, Started, make_round

#: Messages in a round, and steps that are not symmetric of all ranks together, at most: what memory and patience allow.
_MOST_MESSAGES = 1 << 23
_MOST_LISTED = 1 << 20
_MOST_STEPS = 1 << 21
#: Up to so many ranks, all are compared to find a symmetry; of more, some.
_ALL_COMPARED = 64
_SAMPLES = 6


@dataclass(frozen=True, slots=True)
class Traffic:
    """All that a schedule sends.

    Attributes:
        rounds: and how many times in a row each comes.
        nblocks: of a buffer.
        nodes: of each rank that is simulated, the number of its node; ascending.
        direct: whether ranks touch each other's memory.
    """

    rounds: tuple[tuple[Round, int], ...]
    nblocks: int
    nodes: Numbers
    direct: bool


def traffic_of(algorithm: Algorithm, topology: Topology, *, whole: bool = True, written_down: bool = False) -> Traffic:
    """Return the messages of an allreduce.

    Args:
        algorithm: whose schedules to take.
        topology: the ranks.
        whole: whether ranks may differ in time; else one node is enough where the schedule is symmetric.
        written_down: generate all steps even where they are symmetric, for tests.

    Raises:
        ConfigError: the algorithm cannot run there, or there are more messages than can be simulated.
    """
    if (why_not := algorithm.refuses(topology)) is not None:
        raise ConfigError(why_not)
    nblocks = algorithm.nblocks(topology)
    direct = algorithm.cost(topology).touched > 0
    nodes = np.array([topology.home_of(rank) for rank in topology.order])
    found = None if written_down else _symmetry(algorithm, topology)
    if found is None:
        rounds = tuple((each, 1) for each in _written_down(algorithm, topology, nodes))
        return Traffic(rounds, nblocks, nodes=nodes, direct=direct)
    symmetry, forms = found
    ranks = np.arange(topology.size if whole or not topology.homogeneous else topology.lanes)
    made: dict[tuple[_Form, ...], Round] = {}
    repeated = []
    for key, several in groupby(zip(*forms, strict=True)):
        if key not in made:
            made[key] = _moved_round(key, symmetry, ranks=ranks, nodes=nodes)
        repeated.append((made[key], sum(1 for _ in several)))
    return Traffic(tuple(repeated), nblocks, nodes=nodes[ranks], direct=direct)


# ---- symmetric schedules ----


class _Form(NamedTuple):
    """A step, as its rank sees it.

    Attributes:
        sends, recvs: the group of the peer, relative to one's own; the peer's number in it; blocks.
        reduced: blocks that are reduced.
        touched: blocks that are loaded and stored.
    """

    sends: tuple[tuple[int, int, int], ...]
    recvs: tuple[tuple[int, int, int], ...]
    reduced: int
    touched: int


class _Symmetry(NamedTuple):
    """Groups of ranks, each of which does what the first one does, moved by its number.

    Attributes:
        width: ranks of a group.
        ngroups: how many there are.
        xor: whether they are moved by an exclusive or; else by a shift.
    """

    width: int
    ngroups: int
    xor: bool

    def forms(self, algorithm: Algorithm, topology: Topology, place: int) -> list[_Form]:
        """Return the steps of a rank."""
        group = place // self.width

        def seen(peer: int, nblocks: int) -> tuple[int, int, int]:
            other, local = divmod(topology.place_of(peer), self.width)
            return (other ^ group if self.xor else (other - group) % self.ngroups), local, nblocks

        def form(step: Step) -> _Form:
            sends = tuple(seen(each.peer, len(each.blocks)) for each in step.sends)
            recvs = sorted(seen(each.peer, len(each.blocks)) for each in step.recvs)  # all are waited for
            return _Form(sends, tuple(recvs), *_done(step))

        return [form(step) for step in algorithm.schedule(topology.order[place], topology).steps]

    def holds(self, algorithm: Algorithm, topology: Topology, forms: list[list[_Form]]) -> bool:
        """Return whether other groups do what the first one does, and receive in a step what is sent to them in it."""
        places: Sequence[int] = range(self.width, topology.size)
        if topology.size > _ALL_COMPARED:
            groups = np.random.default_rng(0).integers(1, self.ngroups, _SAMPLES).tolist()
            numbered = enumerate([1, *groups, self.ngroups - 1])
            places = [group * self.width + number % self.width for number, group in numbered]
        same = all(self.forms(algorithm, topology, place) == forms[place % self.width] for place in places)
        return same and all(map(self._pairs_up, set(zip(*forms, strict=True))))

    def _pairs_up(self, forms: Sequence[_Form]) -> bool:
        sent = []
        received = []
        back = 1 if self.xor else -1  # to shift back is to shift by the opposite
        for local, form in enumerate(forms):
            sent += [(group, local, peer, nblocks) for group, peer, nblocks in form.sends]
            received += [(back * group % self.ngroups, peer, local, nblocks) for group, peer, nblocks in form.recvs]
        return sorted(sent) == sorted(received)


def _symmetry(algorithm: Algorithm, topology: Topology) -> tuple[_Symmetry, list[list[_Form]]] | None:
    """Return how the ranks do the same, and the steps of the first group; None: they do not."""
    widths = dict.fromkeys((1, topology.lanes) if topology.homogeneous else (1,))
    for width in widths:
        ngroups = topology.size // width
        for xor in (False, True) if ngroups & (ngroups - 1) == 0 else (False,):
            symmetry = _Symmetry(width, ngroups, xor)
            forms = [symmetry.forms(algorithm, topology, place) for place in range(width)]
            if len({len(each) for each in forms}) == 1 and symmetry.holds(algorithm, topology, forms):
                return symmetry, forms
    return None


def _moved_round(forms: Sequence[_Form], symmetry: _Symmetry, ranks: Numbers, nodes: Numbers) -> Round:
    """Return the round of these ranks, in which each does what one of the first group does.

    Args:
        forms: of the first group.
        symmetry: of all ranks.
        ranks: all of them, or those of the first of equal nodes.
        nodes: of all ranks.
    """
    width = symmetry.width
    counts = np.array([len(form.sends) for form in forms])
    _require(int(counts.sum()) * len(ranks) // width, _MOST_MESSAGES, "messages in a round")
    table = np.array([each for form in forms for each in form.sends], np.int64).reshape(-1, 3)
    group, local = np.divmod(ranks, width)
    source = np.repeat(ranks, counts[local])
    nsent = counts[local]
    place = np.arange(len(source)) - np.repeat(np.cumsum(nsent) - nsent, nsent)  # of a message among those of its rank
    by, peer, nblocks = table[np.repeat((np.cumsum(counts) - counts)[local], nsent) + place].T
    away = np.repeat(group, nsent)
    target = (away ^ by if symmetry.xor else (away + by) % symmetry.ngroups) * width + peer
    outside = np.flatnonzero(nodes[source] != nodes[target])
    target %= len(ranks)  # where one node stands for all, a message to another one is like one from another one
    work = np.array([(len(each.sends), len(each.recvs), each.reduced, each.touched) for each in forms], np.float64)
    inside = np.delete(np.arange(len(target)), outside)
    copied = np.bincount(target[inside], nblocks[inside], len(ranks))
    started = Started(source, target, number=place + 1, nblocks=nblocks)
    none = np.empty(0, np.int64)
    return make_round(
        started,
        nodes[ranks],
        outside=outside,
        waited=np.arange(len(target)),
        receivers=target,
        under_way=none,
        work=np.vstack([work[local].T, copied]),
    )


# ---- other schedules ----


def _written_down(algorithm: Algorithm, topology: Topology, nodes: Numbers) -> Iterator[Round]:
    """Yield the rounds of all ranks, each of which goes on in every round unless it waits for a message.

    Messages between two ranks are received in the order in which they are sent.
    """
    first = algorithm.schedule(0, topology).steps
    _require(topology.size * len(first), _MOST_STEPS, "steps that are not symmetric")
    steps = [algorithm.schedule(rank, topology).steps for rank in topology.order]
    at = [0] * topology.size
    posted: dict[tuple[int, int], list[int]] = defaultdict(list)  # messages by (source, target), the oldest first
    under_way: list[int] = []
    count = 0
    beginning = [place for place in range(topology.size) if steps[place]]
    active = list(beginning)
    while active:
        work = np.zeros((5, topology.size))
        sends: list[tuple[int, int, int, int]] = []
        for place in beginning:
            for number, each in enumerate(steps[place][at[place]].sends, 1):
                peer = topology.place_of(each.peer)
                posted[place, peer].append(count + len(sends))
                sends.append((place, peer, number, len(each.blocks)))
            work[0, place] = len(steps[place][at[place]].sends)
            _require(len(sends), _MOST_LISTED, "messages in a round that is not symmetric")
        under_way += range(count, count + len(sends))
        count += len(sends)
        waited = []
        ended = []
        for place in active:
            step = steps[place][at[place]]
            needed = Counter(topology.place_of(each.peer) for each in step.recvs)
            if all(len(posted[peer, place]) >= times for peer, times in needed.items()):
                waited += [(posted[topology.place_of(each.peer), place].pop(0), place) for each in step.recvs]
                copied = sum(
                    len(each.blocks) for each in step.recvs if nodes[topology.place_of(each.peer)] == nodes[place]
                )
                work[1:, place] = len(step.recvs), *_done(step), copied
                ended.append(place)
        assert ended, "the ranks wait for each other"
        yield _listed_round(sends, waited, under_way=under_way, nodes=nodes, work=work)
        taken = {message for message, _ in waited}
        under_way = [message for message in under_way if message not in taken]
        for place in ended:
            at[place] += 1
        beginning = [place for place in ended if at[place] < len(steps[place])]
        finished = set(ended).difference(beginning)
        active = [place for place in active if place not in finished]


def _listed_round(
    sends: list[tuple[int, int, int, int]],
    waited: list[tuple[int, int]],
    under_way: list[int],
    nodes: Numbers,
    work: Floats,
) -> Round:
    """Return a round of messages that are listed.

    Args:
        sends: source, target, number, blocks.
        waited: (message, rank that waits for it).
        under_way: the messages that have not been waited for before, with those that start.
        nodes: of each rank.
        work: see `make_round`.
    """
    started = Started(*np.array(sends, np.int64).reshape(-1, 4).T)
    messages, receivers = np.array(waited, np.int64).reshape(-1, 2).T
    known = np.array(under_way, np.int64)
    positions = np.searchsorted(known, messages)  # messages are numbered in ascending order
    rest = np.setdiff1d(np.arange(len(known)), positions)
    outside = np.flatnonzero(nodes[started.source] != nodes[started.target])
    return make_round(started, nodes, outside=outside, waited=positions, receivers=receivers, under_way=rest, work=work)


def _done(step: Step) -> tuple[int, int]:
    """Return how many blocks a step reduces, and how many it loads and stores."""
    reduced = sum(len(each.blocks) for each in (*step.recvs, *step.loads) if each.reduce)
    return reduced, sum(len(each.blocks) for each in (*step.loads, *step.stores))


def _require(count: int, most: int, what: str) -> None:
    if count > most:
        raise ConfigError(f"{count} {what}, where {most} can be simulated")
