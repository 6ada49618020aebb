"""The proof of schedules is itself put to the test: right ones pass, every kind of wrong one is found and located.

`interpret` is the other opinion: it carries schedules out on numbers, one rank at a time in random order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import ALGORITHMS, Algorithm, Collective, Schedule, Step, Transfer, find, names
from ringreduce.algorithms.verify import ScheduleError, run, verify
from ringreduce.common.topology import Topology

Schedules = list[Schedule]
Memory = list[list[float]]

ZERO, ONE = range(0, 1), range(1, 2)


def schedules_of(algorithm: Algorithm, topology: Topology, root: int = 0) -> Schedules:
    return [algorithm.schedule(rank, topology, root) for rank in range(topology.size)]


def made_of(nblocks: int, *ranks: Sequence[Step]) -> Schedules:
    return [Schedule(nblocks, tuple(steps)) for steps in ranks]


# ---- wrong schedules, written by hand: what is found and where it is said to be ----

CAST, REDUCE = Collective.BROADCAST, Collective.ALLREDUCE


def get(peer: int, blocks: range = ZERO) -> tuple[Transfer]:
    return (Transfer(peer, blocks),)


def add(peer: int, blocks: range = ZERO) -> tuple[Transfer]:
    return (Transfer(peer, blocks, reduce=True),)


def sends(peer: int, blocks: range = ZERO) -> Step:
    return Step(sends=get(peer, blocks))


def gets(peer: int, blocks: range = ZERO) -> Step:
    return Step(recvs=get(peer, blocks))


def adds(peer: int, blocks: range = ZERO) -> Step:
    return Step(recvs=add(peer, blocks))


BOTH = range(2)
#: What is wrong: the collective, the schedules, where it is (rank, step, peer, block), and what the error says.
WRONG: dict[str, tuple[Collective, Schedules, tuple[int | None, ...], str]] = {
    "nobody receives": (CAST, made_of(1, [sends(1)], []), (0, 1, 1, 0), "past its last step"),
    "nobody sends": (CAST, made_of(1, [], [gets(0)]), (1, 1, 0, 0), "past its last step"),
    "both send before they receive":
        (REDUCE, made_of(1, [sends(1), adds(1)], [sends(0), adds(0)]), (0, 1, 1, 0), "stuck in its step 1"),
    "different blocks at both ends": (CAST, made_of(2, [sends(1)], [gets(0, ONE)]), (1, 1, 0, 1), "may differ in size"),
    "a term twice":
        (REDUCE, made_of(1, [sends(1)] * 2, [adds(0)] * 2), (1, 2, 0, 0), "combines block 0 of 0, 1 with block 0 of 0"),
    "a term missing":
        (REDUCE, made_of(1, [sends(1)], [adds(0)]), (0, None, None, 0), "with block 0 of 0, not with block 0 of 0, 1"),
    "nothing to send": (CAST, made_of(1, [gets(1)], [sends(0)]), (1, 1, 0, 0), "nothing is yet"),
    "different bits":
        (REDUCE, made_of(1, [Step(sends=get(1), recvs=add(1))], [Step(sends=get(0), recvs=add(0))]),
         (1, None, None, 0), "in the order (1, 0), on rank 0 in the order (0, 1)"),
    "two halves":
        (REDUCE, made_of(1, [Step(loads=add(1)), Step(stores=get(1))], [], [adds(3), sends(3)], [sends(2), gets(2)]),
         (0, None, None, 0), "ends with block 0 of 0, 1, not with block 0 of 0, 1, 2, 3"),
    "a part of an average divided":
        (REDUCE, made_of(1, [sends(1), gets(2)], [adds(0), sends(2)], [adds(1), sends(0)]),
         (2, 1, 1, 0), "combines what an average has divided"),
    "an average divided nowhere":
        (REDUCE, made_of(1, [adds(1), sends(1), gets(1)], [sends(0), gets(0), sends(0)]),
         (0, None, None, 0), "ends with a sum where an average is divided"),
    "an average divided in a part":
        (REDUCE, made_of(2, [adds(1, BOTH), gets(1, ONE)], [sends(0, BOTH), sends(0, ONE)]),
         (0, 1, 1, None), "completes only a part"),
    "overwritten while it is sent":
        (CAST, made_of(1, [sends(1)], [Step(sends=get(0), recvs=get(0))]), (1, 1, 0, 0), "while it is sent"),
    "overwritten twice":
        (CAST, made_of(1, [Step(sends=get(1) * 2)], [Step(recvs=get(0) * 2)]), (1, 1, 0, 0), "overwritten while"),
    "stored to twice": (CAST, made_of(1, [Step(stores=get(1) * 2)], []), (0, 1, 1, 0), "stored to twice"),
    "race of loads":
        (REDUCE, made_of(1, [Step(loads=add(1))], [Step(loads=add(0))]),
         (1, 1, 0, 0), "rank 1's memory is written here and read by the peer in its step 1"),
    "race of store and load":
        (CAST, made_of(1, [Step(stores=get(1))], [Step(loads=get(0))]),
         (1, 1, 0, 0), "written here and written by the peer"),
    "messages and stores in one step":
        (CAST, made_of(1, [Step(sends=get(1), stores=get(1))], [gets(0)]),
         (0, 1, None, None), "messages and touches memory"),
    "a message to oneself": (CAST, made_of(1, [sends(0)], []), (0, 1, 0, None), "not another rank"),
    "no such rank": (CAST, made_of(1, [sends(2)], []), (0, 1, 2, None), "not another rank"),
    "no such block": (CAST, made_of(1, [sends(1, ONE)], []), (0, 1, 1, None), "not blocks of the buffer"),
    "a send that reduces": (CAST, made_of(1, [Step(sends=add(1))], [gets(0)]), (0, 1, 1, None), "only what comes in"),
    "a send that names the peer's blocks":
        (CAST, made_of(2, [Step(sends=(Transfer(1, ZERO, peer_blocks=ONE),))], [gets(0)]), (0, 1, 1, None), "no say"),
    "sides of different length":
        (CAST, made_of(2, [Step(stores=(Transfer(1, ZERO, peer_blocks=BOTH),))], []),
         (0, 1, 1, None), "differ in length"),
    "different buffers":
        (CAST, [Schedule(1, ()), Schedule(2, ())], (1, None, None, None), "has 2 blocks where rank 0 has 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_schedules_are_located(name: str) -> None:
    """The error names rank, step, peer and block, and says what is wrong there."""
    collective, schedules, where, problem = WRONG[name]
    with pytest.raises(ScheduleError) as caught:
        run(schedules, collective)
    error = caught.value
    assert (error.rank, error.step, error.peer, error.block) == where
    assert problem in str(error)


def test_direct_access_needs_a_common_node() -> None:
    """A load or store between nodes is refused, even where the schedule would be right on one node."""
    schedules = made_of(1, [], [Step(loads=get(0))])
    run(schedules, Collective.BROADCAST)
    with pytest.raises(ScheduleError, match="rank 1, step 1, peer 0: shares no memory"):
        run(schedules, Collective.BROADCAST, Topology.uniform(2, 1))


def test_an_alltoall_may_not_touch_what_is_sent() -> None:
    """Blocks to send belong to the caller: a schedule that overwrites one is wrong even if all arrives."""
    schedules = schedules_of(find(Collective.ALLTOALL, "direct"), Topology.uniform(1, 2))
    extra = Step(sends=(Transfer(1, range(2, 3)),)), Step(recvs=(Transfer(0, ONE),))
    longer = [replace(one, steps=(*one.steps, step)) for one, step in zip(schedules, extra, strict=True)]
    run(schedules, Collective.ALLTOALL)
    with pytest.raises(ScheduleError):
        run(longer, Collective.ALLTOALL)


@pytest.mark.parametrize("name", ["one_shot", "recursive_doubling"])
def test_order_by_rank_is_needed_where_all_ranks_reduce(name: str) -> None:
    """Where every rank reduces for itself, own value first would give different bits, and that is found."""
    topology = Topology.uniform(1, 4)
    schedules = schedules_of(find(Collective.ALLREDUCE, name), topology)
    careless = [replace(one, steps=tuple(replace(step, by_rank=False) for step in one.steps)) for one in schedules]
    with pytest.raises(ScheduleError, match="is combined in the order"):
        run(careless, Collective.ALLREDUCE)


@pytest.mark.parametrize("change", [{"steps": 7}, {"sent": 1.0}, {"touched": 0.1}], ids=str)
def test_a_wrong_cost_is_found(change: dict[str, float]) -> None:
    """An algorithm whose stated cost is not what its schedules do is wrong, however right the result."""
    ring = find(Collective.ALLREDUCE, "ring")
    lying = replace(ring, cost=lambda topology: replace(ring.cost(topology), **change))
    with pytest.raises(ScheduleError, match="ring states"):
        verify(lying, Topology.uniform(1, 4))


def test_an_outcome_counts_blocks_and_rounds() -> None:
    """Rounds, bytes sent and bytes touched are those of the rank that does most."""
    outcome = run(made_of(2, [Step(stores=(Transfer(1, range(2)),))], []), Collective.BROADCAST)
    assert (len(outcome.rounds), outcome.sent, outcome.touched) == (1, 0, 1)


# ---- the other opinion ----


def interpret(schedules: Schedules, memory: Memory, seed: int) -> None:
    """Carry out ``schedules`` on ``memory[rank][block]``, in place; whose step comes next is drawn by lot.

    Messages are buffered here, so what `run` accepts must also be right where senders run ahead.
    """
    lot = random.Random(seed)
    boxes: dict[tuple[int, int], deque[list[float]]] = {}
    done, sent = [0] * len(schedules), [False] * len(schedules)
    while True:
        unfinished = [rank for rank, one in enumerate(schedules) if done[rank] < len(one.steps)]
        if not unfinished:
            break
        rank = lot.choice(unfinished)
        step = schedules[rank].steps[done[rank]]
        if not sent[rank]:
            for send in step.sends:
                boxes.setdefault((rank, send.peer), deque()).append([memory[rank][b] for b in send.blocks])
            sent[rank] = True
        counts = {recv.peer: sum(other.peer == recv.peer for other in step.recvs) for recv in step.recvs}
        if any(len(boxes.get((peer, rank), ())) < count for peer, count in counts.items()):
            continue
        incoming = [(recv, boxes[recv.peer, rank].popleft()) for recv in step.recvs]
        incoming += [(load, [memory[load.peer][b] for b in load.remote]) for load in step.loads]
        apply(memory[rank], rank, incoming, step.by_rank)
        for store in step.stores:
            for block, remote in zip(store.blocks, store.remote, strict=True):
                memory[store.peer][remote] = memory[rank][block]
        done[rank], sent[rank] = done[rank] + 1, False
    assert not any(boxes.values()), "messages are left"


def apply(mine: list[float], rank: int, incoming: list[tuple[Transfer, list[float]]], by_rank: bool) -> None:
    """Overwrite or add what came in."""
    for block in range(len(mine)):
        terms = [(rank, mine[block])]
        for transfer, values in incoming:
            if block in transfer.blocks:
                value = values[transfer.blocks.index(block)]
                terms = [*terms, (transfer.peer, value)] if transfer.reduce else [(rank, value)]
        ordered = sorted(terms, key=lambda term: term[0]) if by_rank else terms
        mine[block] = reduce(lambda a, b: a + b, (value for _, value in ordered))


def inputs(size: int, nblocks: int, seed: int) -> Memory:
    """Return numbers whose sum depends on the order of the terms."""
    lot = random.Random(seed)
    return [[lot.uniform(-1, 1) * 10 ** lot.uniform(-8, 8) for _ in range(nblocks)] for _ in range(size)]


def allreduced(name: str, topology: Topology, column: list[float] | None = None) -> Memory:
    """Return what each rank holds after an allreduce, of random numbers or of ``column[rank]`` in every block."""
    algorithm = find(Collective.ALLREDUCE, name)
    nblocks = algorithm.nblocks(topology)
    memory = inputs(topology.size, nblocks, seed=7) if column is None else [[value] * nblocks for value in column]
    interpret(schedules_of(algorithm, topology), memory, seed=11)
    return memory


@pytest.mark.parametrize("name", names(Collective.ALLREDUCE))
@pytest.mark.parametrize("topology", [Topology.uniform(1, 7), Topology.uniform(3, 2)], ids=str)
def test_all_ranks_get_the_same_bits(name: str, topology: Topology) -> None:
    """Sums that depend on the order of their terms come out bitwise equal on all ranks."""
    if find(Collective.ALLREDUCE, name).refuses(topology) is None:
        memory = allreduced(name, topology)
        assert all(row == memory[0] for row in memory)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_some_algorithms_add_in_the_order_of_ranks(size: int) -> None:
    """one_shot, two_shot and direct give the bits of the sum from rank 0 upwards, in every block."""
    column = [row[0] for row in inputs(size, 1, seed=size)]
    expected = reduce(lambda a, b: a + b, column)
    for name in ("one_shot", "two_shot", "direct"):
        memory = allreduced(name, Topology.uniform(1, size), column)
        assert {value for row in memory for value in row} == {expected}, name


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 13])
def test_doubling_and_halving_add_along_the_same_tree(size: int) -> None:
    """recursive_doubling and halving_doubling give the same bits, whichever block an element is in."""
    column = [row[0] for row in inputs(size, 1, seed=size)]
    topology = Topology.uniform(1, size)
    results = [allreduced(name, topology, column) for name in ("recursive_doubling", "halving_doubling")]
    assert len({value for memory in results for row in memory for value in row}) == 1


# ---- mutations: schedules of all algorithms with one thing changed ----

Choice = TypeVar("Choice")
Mutation = Callable[[Schedules, Topology, st.DataObject], Schedules]
LISTS = ("sends", "recvs", "loads", "stores")


def pick(data: st.DataObject, options: Sequence[Choice], label: str) -> Choice:
    """Draw one of ``options``; where there are none, give this example up."""
    assume(options)
    return data.draw(st.sampled_from(options), label=label)


def each_transfer(schedules: Schedules) -> Iterator[tuple[int, int, str, int]]:
    """Yield where every transfer stands: rank, step, list, place in the list."""
    for rank, schedule in enumerate(schedules):
        for number, step in enumerate(schedule.steps):
            for name in LISTS:
                yield from ((rank, number, name, place) for place in range(len(getattr(step, name))))


def with_transfers(
    schedules: Schedules, rank: int, number: int, name: str, edit: Callable[[list[Transfer]], object]
) -> Schedules:
    """Return the schedules with one list of transfers edited."""
    transfers = list(getattr(schedules[rank].steps[number], name))
    edit(transfers)
    steps = list(schedules[rank].steps)
    steps[number] = replace(steps[number], **{name: tuple(transfers)})
    return with_steps(schedules, rank, steps)


def with_steps(schedules: Schedules, rank: int, steps: Sequence[Step]) -> Schedules:
    changed = list(schedules)
    changed[rank] = replace(schedules[rank], steps=tuple(steps))
    return changed


def chosen(schedules: Schedules, data: st.DataObject) -> tuple[int, int, str, int, Transfer]:
    """Draw one transfer: where it stands and what it is."""
    rank, number, name, place = pick(data, list(each_transfer(schedules)), "transfer")
    return rank, number, name, place, getattr(schedules[rank].steps[number], name)[place]


def drop(schedules: Schedules, topology: Topology, data: st.DataObject) -> Schedules:
    rank, number, name, place, _ = chosen(schedules, data)
    return with_transfers(schedules, rank, number, name, lambda transfers: transfers.pop(place))


def drop_step(schedules: Schedules, topology: Topology, data: st.DataObject) -> Schedules:
    rank, number, *_ = chosen(schedules, data)
    steps = schedules[rank].steps
    return with_steps(schedules, rank, steps[:number] + steps[number + 1 :])


def duplicate(schedules: Schedules, topology: Topology, data: st.DataObject) -> Schedules:
    rank, number, name, place, transfer = chosen(schedules, data)
    return with_transfers(schedules, rank, number, name, lambda transfers: transfers.insert(place, transfer))


def change_peer(schedules: Schedules, topology: Topology, data: st.DataObject) -> Schedules:
    rank, number, name, place, transfer = chosen(schedules, data)
    peer = pick(data, [p for p in range(topology.size) if p != transfer.peer], "new peer")
    changed = replace(transfer, peer=peer)
    return with_transfers(schedules, rank, number, name, lambda transfers: transfers.__setitem__(place, changed))


def change_blocks(schedules: Schedules, topology: Topology, data: st.DataObject) -> Schedules:
    rank, number, name, place, transfer = chosen(schedules, data)
    length, nblocks = len(transfer.blocks), schedules[rank].nblocks
    starts = [start for start in range(nblocks - length + 1) if start != transfer.blocks.start]
    start = pick(data, starts, "new first block")
    changed = replace(transfer, blocks=range(start, start + length))
    return with_transfers(schedules, rank, number, name, lambda transfers: transfers.__setitem__(place, changed))


def flip_reduce(schedules: Schedules, topology: Topology, data: st.DataObject) -> Schedules:
    rank, number, name, place, transfer = chosen(schedules, data)
    changed = replace(transfer, reduce=not transfer.reduce)
    return with_transfers(schedules, rank, number, name, lambda transfers: transfers.__setitem__(place, changed))


def racy_access(schedules: Schedules, topology: Topology, data: st.DataObject) -> Schedules:
    """Add a load or store of a block in a peer's memory that a third rank, or the peer itself, writes."""
    writers = {
        (owner, block, rank)
        for rank, schedule in enumerate(schedules)
        for step in schedule.steps
        for owner, block in written(rank, step)
    }
    ranks = [rank for rank, schedule in enumerate(schedules) if schedule.direct]
    targets = [
        (rank, owner, block)
        for owner, block, writer in sorted(writers)
        for rank in ranks
        if rank not in (owner, writer) and owner in topology.node_of(rank)
    ]
    rank, owner, block = pick(data, targets, "racy access")
    name = data.draw(st.sampled_from(["loads", "stores"]))
    numbers = [n for n, step in enumerate(schedules[rank].steps) if step.loads or step.stores]
    extra = Transfer(owner, range(block, block + 1))
    return with_transfers(schedules, rank, pick(data, numbers, "step"), name, lambda each: each.append(extra))


def swap_steps(schedules: Schedules, topology: Topology, data: st.DataObject) -> Schedules:
    """Swap neighbouring steps, unless they are independent and the swap therefore provably harmless."""
    neighbours = [
        (rank, number)
        for rank, schedule in enumerate(schedules)
        for number in range(len(schedule.steps) - 1)
        if not independent(rank, *schedule.steps[number : number + 2])
    ]
    rank, number = pick(data, neighbours, "first of two steps")
    steps = list(schedules[rank].steps)
    steps[number : number + 2] = reversed(steps[number : number + 2])
    return with_steps(schedules, rank, steps)


def written(rank: int, step: Step) -> set[tuple[int, int]]:
    """Return whose blocks the step of ``rank`` writes: (owner, block)."""
    own = {(rank, block) for transfer in (*step.recvs, *step.loads) for block in transfer.blocks}
    return own | {(store.peer, block) for store in step.stores for block in store.remote}


def read(rank: int, step: Step) -> set[tuple[int, int]]:
    """Return whose blocks the step of ``rank`` reads: (owner, block)."""
    own = {(rank, block) for transfer in (*step.sends, *step.stores) for block in transfer.blocks}
    return own | {(load.peer, block) for load in step.loads for block in load.remote}


def independent(rank: int, first: Step, second: Step) -> bool:
    """Tell whether two steps can change places: no message overtakes another, no value depends on the order.

    Two that add to the same block do depend on it, but only in the last bits.
    """
    one_peer = any(
        {each.peer for each in getattr(first, name)} & {each.peer for each in getattr(second, name)}
        for name in ("sends", "recvs")
    )
    overwrites = {
        (rank, block)
        for step in (first, second)
        for transfer in (*step.recvs, *step.loads)
        for block in transfer.blocks
        if not transfer.reduce
    }
    both_write = written(rank, first) & written(rank, second)
    flows = (written(rank, first) & read(rank, second)) | (read(rank, first) & written(rank, second))
    return not (one_peer or flows or both_write & overwrites)


MUTATIONS: dict[str, Mutation] = {
    "drop a transfer": drop,
    "drop a step": drop_step,
    "duplicate a transfer": duplicate,
    "change a peer": change_peer,
    "change blocks": change_blocks,
    "flip reduce": flip_reduce,
    "add a racy access": racy_access,
    "swap steps": swap_steps,
}

TOPOLOGIES = [
    *(Topology.uniform(1, size) for size in range(2, 8)),
    *(Topology.from_hosts(hosts) for hosts in ("ab", "aab", "aabb", "abab", "abbb", "aaabbb", "aabbcc", "aabbbcc")),
]
CASES = [
    (algorithm, topology) for algorithm in ALGORITHMS for topology in TOPOLOGIES if algorithm.refuses(topology) is None
]
deterministic = partial(
    settings, derandomize=True, database=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


@pytest.mark.parametrize("name", MUTATIONS)
@deterministic(max_examples=150)
@given(data=st.data())
def test_mutated_schedules_are_rejected(name: str, data: st.DataObject) -> None:
    """A schedule with one thing changed never passes, whatever the algorithm, the ranks and the place of the change."""
    algorithm, topology = data.draw(st.sampled_from(CASES))
    root = data.draw(st.integers(0, topology.size - 1)) if algorithm.collective.rooted else 0
    schedules = schedules_of(algorithm, topology, root)
    mutated = MUTATIONS[name](schedules, topology, data)
    assume(mutated != schedules)
    event(f"{algorithm.collective.value} {algorithm.name}")
    with pytest.raises(ScheduleError):
        run(mutated, algorithm.collective, topology, root)


def with_steps_shuffled(schedules: Schedules, data: st.DataObject) -> Schedules:
    ranks = [rank for rank, schedule in enumerate(schedules) if len(schedule.steps) > 1]
    rank = pick(data, ranks, "rank")
    steps = data.draw(st.permutations(schedules[rank].steps))
    return with_steps(schedules, rank, steps)


@deterministic(max_examples=300)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_what_passes_is_right_in_every_order(data: st.DataObject, seed: int) -> None:
    """Whatever order of steps passes the proof gives the sum on every rank, and the same bits, in any interleaving."""
    cases = [case for case in CASES if case[0].collective is Collective.ALLREDUCE]
    algorithm, topology = data.draw(st.sampled_from(cases))
    schedules = with_steps_shuffled(schedules_of(algorithm, topology), data)
    try:
        run(schedules, Collective.ALLREDUCE, topology)
    except ScheduleError:
        event("rejected")
        return
    event("accepted")
    memory = inputs(topology.size, schedules[0].nblocks, seed)
    expected = [sum(column) for column in zip(*memory, strict=True)]
    scale = [sum(map(abs, column)) for column in zip(*memory, strict=True)]
    interpret(schedules, memory, seed)
    assert all(row == memory[0] for row in memory)
    assert all(abs(a - b) <= 1e-14 * s for a, b, s in zip(memory[0], expected, scale, strict=True))
