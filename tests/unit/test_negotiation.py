"""Negotiation by name: every rank does the same in the same order, whatever is heard when; groups and stalls."""

from __future__ import annotations

import marshal
import pickle
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.common.call_sites import AbortReason
from ringreduce.common.config import Config
from ringreduce.engine.coordinator import Coordinator, StallWatch, fuse
from ringreduce.engine.decisions import (
    Crossed,
    Detached,
    Expired,
    Joined,
    Late,
    Named,
    OperationKind,
    OperationSignature,
    Refuse,
    Run,
    Stalled,
    Waiting,
    Withdrawn,
)
from ringreduce.engine.exchange import Exchange
from ringreduce.engine.participant import Participant

SIZES = [1, 2, 3, 4]

BIG = 1 << 30

#: What a program does: ("submit", name, signature), ("wait",) for all that it has under way, ("join",) or ("detach",).
Action = tuple[Any, ...]


def summed(count: int = 4, dtype: str = "float32") -> OperationSignature:
    """Return the signature of an allreduce."""
    return OperationSignature(f"sum of {count} {dtype}", OperationKind.REDUCTION, "sum", ((dtype, count),))


def called(text: str = "broadcast") -> OperationSignature:
    """Return the signature of a collective that is no allreduce."""
    return OperationSignature(text)


class Rank:
    """A rank that carries out a program, and keeps a log of what it was told to do."""

    def __init__(self, number: int, size: int, program: Sequence[Action]) -> None:
        self.number = number
        self.participant = Participant(size, plans=number == 0)
        self.program = deque(program)
        self.pending: defaultdict[str, deque[OperationSignature]] = defaultdict(deque)
        self.joining = False
        self.waiting = False
        self.detached: int | None = None
        self.log: list[tuple[Any, ...]] = []

    @property
    def idle(self) -> bool:
        return not self.joining and not any(self.pending.values())

    def ready(self) -> bool:
        """Return whether the program can go on: it stands still while it waits."""
        return bool(self.program) and (self.idle or not self.waiting)

    def go_on(self) -> list[Any]:
        """Carry out one action; return what the coordinator is to hear."""
        kind, *arguments = self.program.popleft()
        self.waiting = kind in ("wait", "join")
        if kind == "submit":
            name, signature = arguments
            self.pending[name].append(signature)
            return self.participant.submit(name, signature)
        if kind == "wait":
            return self.participant.wait()
        if kind == "join":
            self.joining = True
            return self.participant.join()
        self.program.clear()
        return self.participant.detach(AbortReason())

    def receive(self, note: Any) -> None:
        """Do what the coordinator says."""
        decision = self.participant.receive(note)
        if isinstance(decision, Run):
            for named in decision.operations:
                self._finish(named.name, named.signature, submitted=decision.active == self.participant._size)
            self.log.append(("run", decision.operations, decision.active))
        elif isinstance(decision, Refuse):
            self._finish(decision.name)
            self.log.append(("refuse", decision.name, decision.values))
        elif isinstance(decision, Joined):
            self.joining = False
            self.log.append(("joined", decision.last))
        elif isinstance(decision, Detached):
            self.detached = decision.rank
            self.program.clear()
            self.pending.clear()
            self.joining = False
        else:
            assert decision is None

    def _finish(self, name: str, signature: OperationSignature | None = None, *, submitted: bool = False) -> None:
        assert self.pending[name] or not submitted, f"{name} runs on rank {self.number}, which has not submitted it"
        if self.pending[name]:
            mine = self.pending[name].popleft()
            assert signature is None or mine == signature, "what runs is what this rank submitted"

    @property
    def runs(self) -> list[tuple[str, ...]]:
        """The names that travelled together, in the order in which they did."""
        return [tuple(named.name for named in each[1]) for each in self.log if each[0] == "run"]


class Conversation:
    """Ranks and their coordinator. Notes between two of them arrive in order; all else is left to chance."""

    def __init__(self, programs: Sequence[Sequence[Action]], chance: random.Random, fusion_nbytes: int = BIG) -> None:
        size = len(programs)
        self.coordinator = Coordinator(size, fusion_nbytes)
        self.ranks = [Rank(number, size, program) for number, program in enumerate(programs)]
        self._chance = chance
        self._said: list[deque[Any]] = [deque() for _ in programs]
        self._told: list[deque[Any]] = [deque() for _ in programs]

    def play(self) -> list[Rank]:
        """Play until nothing more can happen; all programs must have come to their end."""
        while events := self._events():
            self._chance.choice(events)()
        assert all(rank.idle and not rank.program for rank in self.ranks), "a rank waits for ever"
        return self.ranks

    def _events(self) -> list[Callable[[], None]]:
        events: list[Callable[[], None]] = []
        for rank in self.ranks:
            if rank.ready():
                events.append(lambda rank=rank: self._said[rank.number].extend(rank.go_on()))
            if self._said[rank.number]:
                events.append(lambda rank=rank: self._receive(rank.number))
            if self._told[rank.number]:
                events.append(lambda rank=rank: rank.receive(self._told[rank.number].popleft()))
        return events

    def _receive(self, rank: int) -> None:
        for note in self.coordinator.receive(rank, _sent(self._said[rank].popleft())):
            for told in self._told:
                told.append(_sent(note))


def _sent(note: Any) -> Any:
    """Return what arrives of a note."""
    return marshal.loads(marshal.dumps(note, 2))


def play(programs: Sequence[Sequence[Action]], seed: int = 0, fusion_nbytes: int = BIG) -> list[Rank]:
    """Let programs run; return the ranks as they are at the end. What they were told is the same on all."""
    ranks = Conversation(programs, random.Random(seed), fusion_nbytes).play()
    assert all(rank.log == ranks[0].log for rank in ranks), "all ranks do the same in the same order"
    return ranks


def teach(coordinator: Coordinator, size: int, *names: str) -> list[Any]:
    """Let all ranks submit operations twice, which are known then; return what the last one was answered."""
    for _ in range(2):
        for rank in range(size):
            for name in names:
                told = coordinator.receive(rank, ["new", name, summed().encode()])
    return told


def submissions(*names: str) -> list[Action]:
    return [("submit", name, summed()) for name in names]


# ---- all that ranks agree on ----


@st.composite
def agreeing_programs(draw: st.DrawFn) -> list[list[Action]]:
    """Draw programs of equal rounds, each rank with an order and waits of its own."""
    size = draw(st.sampled_from(SIZES))
    names = [f"t{number}" for number in range(draw(st.integers(1, 6)))]
    signature = {name: summed(draw(st.integers(0, 3)), draw(st.sampled_from(["float32", "int64"]))) for name in names}
    rounds = draw(st.integers(1, 7))
    programs: list[list[Action]] = []
    for _ in range(size):
        chance = random.Random(draw(st.integers(0, 1 << 16)))
        keeps_order = draw(st.booleans())
        program: list[Action] = []
        for turn in range(rounds):
            actions = [("submit", name, signature[name]) for name in names]
            actions.append(("submit", f"once {turn}", called()))
            if not keeps_order:
                chance.shuffle(actions)
            program += [*actions, ("wait",)]
        programs.append(program)
    return programs


@settings(max_examples=300)
@given(agreeing_programs(), st.integers(0, 1 << 16), st.sampled_from([1, 16, BIG]))
def test_what_all_ranks_submit_runs_once_on_all_in_one_order(
    programs: list[list[Action]], seed: int, fusion_nbytes: int
) -> None:
    """Whatever the order of submissions and the time that notes take, each operation runs exactly as often as it was
    submitted, alike on all ranks, and everything comes to an end.
    """
    ranks = play(programs, seed, fusion_nbytes)
    submitted = Counter(Named(*each[1:]) for each in programs[0] if each[0] == "submit")
    assert Counter(named for each in ranks[0].log for named in each[1]) == submitted
    assert all(each[0] == "run" and each[2] == len(ranks) for each in ranks[0].log)


@settings(max_examples=200)
@given(
    st.sampled_from(SIZES[1:]),
    st.integers(2, 6),
    st.integers(0, 1 << 16),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3), st.integers(1, 5)), max_size=6),
)
def test_programs_that_pause_in_the_middle_of_a_group_come_to_an_end(
    size: int, count: int, seed: int, pauses: list[tuple[int, int, int]]
) -> None:
    """A rank that waits before it has submitted all of a group breaks it: what it has submitted runs nevertheless."""
    names = [f"t{number}" for number in range(count)]
    programs = []
    for rank in range(size):
        program: list[Action] = []
        for turn in range(8):
            stops = {after for at, who, after in pauses if at == turn and who % size == rank}
            for number, name in enumerate(names):
                program += [*submissions(name), *([("wait",)] if number + 1 in stops else [])]
            program.append(("wait",))
        programs.append(program)
    # All keep one order, so none waits for what another submits only after a wait for something else.
    ranks = play(programs, seed)
    assert Counter(name for names in ranks[0].runs for name in names) == Counter(dict.fromkeys(names, 8))


@settings(max_examples=200)
@given(
    st.sampled_from(SIZES),
    st.lists(st.sampled_from(["float32", "float64"]), min_size=2, max_size=7),
    st.sampled_from([16, 64, BIG]),
    st.integers(0, 1 << 16),
    st.integers(0, 1 << 16),
)
def test_what_travels_together_does_not_depend_on_when_notes_arrive(
    size: int, dtypes: list[str], fusion_nbytes: int, one: int, other: int
) -> None:
    """Once the plan is agreed, the groups follow from the programs alone."""
    chance = random.Random(one ^ other)
    programs: list[list[Action]] = [[] for _ in range(size)]
    for _ in range(9):
        for program in programs:
            order = list(range(len(dtypes)))
            if program is not programs[0]:
                chance.shuffle(order)
            program += [("submit", f"t{number}", summed(2, dtypes[number])) for number in order]
            program.append(("wait",))

    def grouping(seed: int) -> list[tuple[str, ...]]:
        # Names come the second time in the second round, are planned in the third, and known as groups in the fifth.
        runs, left = play(programs, seed, fusion_nbytes)[0].runs, 3 * len(dtypes)
        last: list[tuple[str, ...]] = []
        while left:
            last.append(runs.pop())
            left -= len(last[-1])
        assert left == 0
        return sorted(last)

    assert grouping(one) == grouping(other)


@pytest.mark.parametrize("size", SIZES)
def test_a_plan_fuses_what_the_coordinators_program_submits_between_two_waits(size: int) -> None:
    """Groups are of one dtype and op, in the coordinator's order, and closed by what fills them."""
    kinds = {"a": summed(2), "b": summed(2, "int64"), "c": summed(2), "d": summed(2), "e": summed(2, "int64")}
    coordinator = [("submit", name, signature) for name, signature in kinds.items()]
    others = coordinator[::-1]
    programs = [[*(coordinator if rank == 0 else others), ("wait",)] * 8 for rank in range(size)]
    runs = play(programs, fusion_nbytes=16)[0].runs
    assert sorted(runs[-4:]) == [("a", "c"), ("b",), ("d",), ("e",)]


def test_collectives_that_are_no_allreduce_travel_alone() -> None:
    """Nothing is fused but allreduces of one dtype."""
    mixed = OperationSignature("group", OperationKind.REDUCTION, "sum", (("float32", 2), ("int64", 2)))
    program = [("submit", "a", called()), ("submit", "b", called()), ("submit", "c", mixed), ("submit", "d", mixed)]
    runs = play([[*program, ("wait",)] * 8] * 2)[0].runs
    assert all(len(each) == 1 for each in runs)


def test_an_operation_whose_groups_keep_breaking_travels_alone_for_good() -> None:
    """A plan that proves wrong again and again is not made again: the traffic of a round settles."""
    whole = [*submissions("a", "b"), ("wait",)]
    apart = [*submissions("a"), ("wait",), *submissions("b"), ("wait",)]
    (first, _) = play([whole * 60, apart * 60])
    assert all(len(each) == 1 for each in first.runs)
    assert not first.participant._group_of
    assert not first.participant._unused


def test_an_operation_of_a_group_that_comes_twice_in_a_round_breaks_the_group() -> None:
    """The second submission is no part of the plan; all run, in the order of submission."""
    planned = [*submissions("a", "b"), ("wait",)] * 6
    twice = [*submissions("a", "a", "b", "b"), ("wait",)]
    ranks = play([planned + twice + planned] * 3)
    assert Counter(name for names in ranks[0].runs for name in names) == {"a": 14, "b": 14}
    assert ("a", "b") in ranks[0].runs[:12]


# ---- what they do not agree on ----


@settings(max_examples=200)
@given(
    st.sampled_from(SIZES[1:]),
    st.integers(0, 1 << 16),
    st.sets(st.tuples(st.integers(0, 6), st.integers(0, 3))),
    st.data(),
)
def test_mismatches_are_refused_on_all_ranks_and_nothing_else_is(
    size: int, seed: int, wrong: set[tuple[int, int]], data: st.DataObject
) -> None:
    """An operation that signature different on one rank is refused everywhere, with what each rank submitted; what was
    announced with it runs.
    """
    odd = data.draw(st.integers(0, size - 1))
    programs: list[list[Action]] = [[] for _ in range(size)]
    for turn in range(7):
        for rank, program in enumerate(programs):
            for number in range(4):
                differs = rank == odd and (turn, number) in wrong
                program.append(("submit", f"t{number}", summed(9 if differs else 4)))
            program.append(("wait",))
    ranks = play(programs, seed)
    refused = [each for each in ranks[0].log if each[0] == "refuse"]
    texts = {rank: summed(9 if rank == odd else 4).text for rank in range(size)}
    assert Counter(each[1] for each in refused) == Counter(f"t{number}" for _, number in wrong)
    assert all(each[2] == texts for each in refused)
    ran = Counter(name for names in ranks[0].runs for name in names)
    assert ran + Counter(each[1] for each in refused) == {f"t{number}": 7 for number in range(4)}


def test_operations_of_one_name_match_in_order() -> None:
    """Those without a name share one: the first of one rank belongs to the first of the others, and so on, though they
    look different from each other.
    """
    program = [("submit", "nameless", summed(count)) for count in (1, 2, 3, 2)]
    for seed in range(40):
        ranks = play([[*program, ("wait",)] * 6] * 3, seed)
        counts = [named.signature.counts[0][1] for each in ranks[0].log for named in each[1]]
        assert counts == [1, 2, 3, 2] * 6


def test_operations_of_one_name_in_another_order_are_refused() -> None:
    """That they were submitted in the order of the others before, and travelled together, changes nothing."""
    one, two = ("submit", "nameless", summed(1)), ("submit", "nameless", summed(2))
    agreed: list[Action] = [one, two, ("wait",)] * 7
    for seed in range(40):
        ranks = play([[*agreed, one, two, ("wait",), *agreed], [*agreed, two, one, ("wait",), *agreed]], seed)
        refused = [each[2] for each in ranks[0].log if each[0] == "refuse"]
        texts = summed(1).text, summed(2).text
        assert refused == [dict(enumerate(texts)), dict(enumerate(reversed(texts)))]


# ---- ranks that come to an end ----


@settings(max_examples=200)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(0, 1 << 16))
def test_ranks_that_joined_are_done_without(rounds: list[int], seed: int) -> None:
    """Allreduces run with those that are left, the last rank to join is the same for all, and then all begin anew."""
    round_ = [*submissions("a", "b"), ("wait",)]
    after = [*submissions("a", "after"), ("submit", "call", called()), ("wait",)]
    ranks = play([[*round_ * count, ("join",), *after] for count in rounds], seed)
    size = len(rounds)
    active = [each[2] for each in ranks[0].log if each[0] == "run" for named in each[1] if named.name == "b"]
    assert active == [sum(count > turn for count in rounds) for turn in range(max(rounds))]
    (joined,) = [each for each in ranks[0].log if each[0] == "joined"]
    assert rounds[joined[1]] == max(rounds)
    assert all(each[0] == "run" and each[2] == size for each in ranks[0].log[ranks[0].log.index(joined) + 1 :])


def test_what_a_rank_submitted_before_it_joined_runs_with_it() -> None:
    """Joining does not take back a submission, and what only one rank ever submitted runs when all have joined."""
    programs = [[*submissions("a", "only here"), ("join",)], [*submissions("a"), ("join",)]]
    for seed in range(40):
        ranks = play(programs, seed)
        active = {named.name: each[2] for each in ranks[0].log[:-1] for named in each[1]}
        assert active == {"a": 2, "only here": 1}


def test_all_that_waits_under_a_name_runs_when_the_last_rank_that_is_missing_joins() -> None:
    """Not only the first of them."""
    many = [*submissions("x", "x", "x"), ("wait",), ("join",)]
    for seed in range(20):
        ranks = play([[("join",)], many, many], seed)
        assert ranks[0].runs == [("x",)] * 3


def test_a_collective_that_needs_all_ranks_is_refused_once_one_has_joined() -> None:
    """It says who has joined."""
    programs = [[("join",)], [("submit", "c", called("broadcast(root 0)")), ("wait",), ("join",)]]
    ranks = play(programs)
    assert ranks[0].log[0] == ("refuse", "c", {0: "joined", 1: "broadcast(root 0)"})


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_leaves_ends_everything(size: int, leaver: int) -> None:
    """What had not become ready by then never will: all hear so, those that have joined too."""
    round_ = [*submissions("a", "b"), ("wait",)]
    for seed in range(20):
        programs: list[list[Action]] = [[*round_ * 5, ("join",)] for _ in range(size)]
        programs[leaver] = [*round_ * 4, *submissions("a"), ("detach",)]
        programs[-1] = programs[-1] if size - 1 == leaver else [*round_ * 3, ("join",)]
        ranks = Conversation(programs, random.Random(seed)).play()
        assert {rank.detached for rank in ranks} == {leaver}
        assert sum(name == "b" for names in ranks[0].runs for name in names) == 4


def test_ranks_that_all_wait_for_what_others_have_not_submitted_end_at_once() -> None:
    """Each rank has said that it waits, and for what: these operations end on all ranks, and all others go on."""
    ranks = [Participant(3, plans=number == 0) for number in range(3)]
    coordinator = Coordinator(3, BIG)
    for number, name in enumerate(["a", "b", "b"]):
        for note in ranks[number].submit(name, summed()):
            assert coordinator.receive(number, _sent(note)) == []
    assert coordinator.receive(1, ranks[1].submit("other", summed())[0]) == []
    said = [ranks[number].block(name, f"waits for {name}", f"x.py:{number}")[0] for number, name in enumerate("abb")]
    assert coordinator.receive(0, said[0]) == coordinator.receive(2, said[2]) == []
    (note,) = coordinator.receive(1, said[1])
    assert ranks[2].receive(_sent(note)) == Crossed(
        ("a", "b"), {0: "waits for a", 1: "waits for b", 2: "waits for b"}, {0: "x.py:0", 1: "x.py:1", 2: "x.py:2"}
    )
    assert [each.name for each in coordinator.waiting()] == ["other"]


def test_a_rank_that_goes_on_does_not_wait_any_more() -> None:
    """What it waited for may have run, or it has submitted something else since: then nothing is known of it."""
    ranks = [Participant(2, plans=number == 0) for number in range(2)]
    coordinator = Coordinator(2, BIG)

    def submit(rank: int, name: str) -> list[Any]:
        return [each for note in ranks[rank].submit(name, summed()) for each in coordinator.receive(rank, note)]

    def block(rank: int, name: str) -> list[Any]:
        return coordinator.receive(rank, ranks[rank].block(name, name, "x.py:1")[0])

    assert submit(0, "a") == block(0, "a") == []
    assert submit(1, "a") != []  # both run it
    assert submit(1, "b") == block(1, "b") == []  # rank 0 computes
    assert submit(0, "c") == []
    assert block(1, "b") == []
    assert [note[0] for note in block(0, "c")] == ["crossed"]


def test_nothing_that_was_said_before_a_rank_left_runs_after() -> None:
    """Its own word counts no more, for it is not there to carry out what it submitted."""
    coordinator = Coordinator(2, BIG)
    assert coordinator.receive(1, ["new", "x", summed().encode()]) == []
    assert coordinator.receive(1, ["detach", ("", None, False)]) == [["detached", 1, ("", None, False)]]
    assert coordinator.receive(0, ["new", "x", summed().encode()]) == []
    assert coordinator.waiting() == []


# ---- what waits for long ----


def test_what_waits_is_listed_with_who_is_missing() -> None:
    """Also what was announced by number, and in a group."""
    coordinator, participant = Coordinator(3, BIG), Participant(3, plans=False)
    said = ["new", "x", summed().encode()]
    assert coordinator.receive(2, said, 5.0) == []
    assert coordinator.receive(0, said, 7.0) == []
    (waiting,) = coordinator.waiting()
    assert (waiting.name, waiting.since, waiting.present, waiting.missing) == ("x", 5.0, (0, 2), (1,))
    order = participant.receive(_sent(coordinator.stalled(waiting, 65.0)))
    assert order == Stalled("x", (1,), 60.0, 0)


@pytest.mark.parametrize("announced", [["new", "x", summed().encode()], ["known", 1]])
def test_nothing_runs_after_something_was_given_up(announced: list[Any]) -> None:
    """A rank that comes late, or has left something out, never meets the others in what is not the same."""
    coordinator, participant = Coordinator(3, BIG), Participant(3, plans=False)
    assert teach(coordinator, 3, "x")[0][:2] == ["number", 1]
    assert coordinator.receive(0, announced, 1.0) == []
    (waiting,) = coordinator.waiting()
    assert participant.receive(_sent(coordinator.expire(waiting, 31.0))) == Expired("x", (0,), (1, 2), 30.0)
    assert coordinator.waiting() == []
    for rank in (1, 2, 0):
        assert coordinator.receive(rank, announced, 32.0) == []
    assert coordinator.waiting() == []


def test_a_join_waits_since_anything_was_last_submitted() -> None:
    """Ranks that go on may take as long as they like; one that is silent is named, and given up like any other."""
    coordinator, participant = Coordinator(3, BIG), Participant(3, plans=False)
    coordinator.receive(0, ["join"], 1.0)
    coordinator.receive(2, ["join"], 2.0)
    assert coordinator.waiting() == [Waiting("join", 2.0, (0, 2), (1,), is_join=True)]
    coordinator.receive(1, ["new", "x", summed().encode()], 40.0)
    (waiting,) = coordinator.waiting()
    assert waiting.since == 40.0
    assert participant.receive(_sent(coordinator.stalled(waiting, 50.0))) == Stalled(
        "join", (1,), 10.0, 0, is_join=True
    )
    assert participant.receive(_sent(coordinator.expire(waiting, 70.0))) == Expired(
        "join", (0, 2), (1,), 30.0, is_join=True
    )
    assert coordinator.waiting() == []


@pytest.mark.parametrize("before", [0, 2])
def test_a_call_that_a_rank_cannot_make_is_refused_on_all(before: int) -> None:
    """Under its name, also where the others' signature has a number, and also if all ranks refuse alike."""
    coordinator, participant = Coordinator(2, BIG), Participant(2, plans=False)
    right, refused = summed(), OperationSignature("allreduce(refused: no such op)", OperationKind.REFUSAL)
    for _ in range(before):
        for rank in range(2):
            coordinator.receive(rank, ["new", "x", right.encode()])
    assert coordinator.receive(0, ["new", "x", refused.encode()]) == []
    (note,) = coordinator.receive(1, ["known", 1] if before else ["new", "x", right.encode()])
    assert participant.receive(_sent(note)) == Refuse("x", {0: refused.text, 1: right.text}, (0, 1))
    for rank in range(2):
        told = coordinator.receive(rank, ["new", "x", refused.encode()])
    assert [each[0] for each in told] == ["refuse"]
    assert coordinator.waiting() == []


@pytest.mark.parametrize("known", [False, True])
def test_all_ranks_hear_who_was_late(known: bool) -> None:
    """The last rank is named when the first has waited for more than a millisecond, and not for less."""
    coordinator, participant = Coordinator(3, BIG), Participant(3, plans=False)
    announced: list[Any] = ["known", 1] if known else ["new", "x", summed().encode()]
    if known:
        teach(coordinator, 3, "x")
    for last, seconds, expected in ((1, 0.5, [Late(1, 0.5)]), (2, 0.0005, []), (0, 0.002, [Late(0, 0.002)])):
        first, second = (rank for rank in range(3) if rank != last)
        assert coordinator.receive(first, announced, 0.0) == []
        assert coordinator.receive(second, announced, seconds / 2) == []
        orders = [
            participant.receive(_sent(note))
            for note in coordinator.receive(last, announced, seconds)
            if note[0] == "late"
        ]
        assert orders == expected


def test_what_a_group_waits_for_is_told_of_each_of_its_operations() -> None:
    """By name."""
    coordinator = Coordinator(2, BIG)
    teach(coordinator, 2, "a", "b")
    (group,) = coordinator.receive(0, ["together", 1, 2])
    assert group[0] == "group"
    assert coordinator.receive(1, ["known", group[1]], 3.0) == []
    assert [(waiting.name, waiting.missing) for waiting in coordinator.waiting()] == [("a", (0,)), ("b", (0,))]


# ---- memory ----


def test_names_that_are_used_once_leave_nothing_behind() -> None:
    """Neither a participant nor, beyond the last few thousand, the coordinator remembers them."""
    coordinator, participant = Coordinator(1, BIG), Participant(1, plans=True)

    def use(first: int, last: int) -> tuple[int, int]:
        for number in range(first, last):
            for note in participant.submit(f"loss {number:06}", summed()):
                for told in coordinator.receive(0, note):
                    assert isinstance(participant.receive(told), Run)
            assert participant.wait() == []
        return len(pickle.dumps(participant)), len(pickle.dumps(coordinator))

    use(0, 4200)
    before = use(4200, 6000)
    assert use(6000, 9000) == pytest.approx(before, rel=0.01)
    assert before[0] < 1000


def test_a_repeated_round_adds_nothing() -> None:
    """After some rounds the state of all stays as large as it is."""
    round_ = [*submissions("a", "b", "c"), ("wait",)]
    sizes = []
    for rounds in (10, 40):
        conversation = Conversation([round_ * rounds] * 2, random.Random(1))
        first, second = conversation.play()
        sizes.append(
            [len(pickle.dumps(each)) for each in (first.participant, second.participant, conversation.coordinator)]
        )
    assert sizes[0] == sizes[1]


#: The signature of what other ranks may leave out.
GUESS = OperationSignature("a part", OperationKind.IN_PLACE, "sum", (("float32", 3),), speculative=True)


def test_nobody_waits_for_what_is_speculative() -> None:
    """It is in no list of what waits, runs when all ranks have submitted it, and can be withdrawn until then."""
    coordinator, participant = Coordinator(2, 1 << 20), Participant(2, plans=False)
    guess = participant.submit("part", GUESS)
    assert guess == [["new", "part", ("a part", 2, "sum", (("float32", 3),), "", False, True)]]
    assert coordinator.receive(1, guess[0]) == []
    assert coordinator.waiting() == []
    (withdraw,) = participant.withdraw("part")
    (answer,) = coordinator.receive(1, withdraw)
    assert participant.receive(answer) == Withdrawn(1, "part")
    assert coordinator.receive(0, guess[0]) == []  # the other's is not taken up by what was withdrawn
    assert [note[0] for note in coordinator.receive(1, guess[0])] == ["run"]
    assert coordinator.receive(1, withdraw) == []  # too late: it runs


def test_what_is_speculative_runs_without_ranks_that_have_joined() -> None:
    """As other reductions do."""
    coordinator, guess = Coordinator(2, 1 << 20), ["new", "part", GUESS.encode()]
    assert coordinator.receive(1, guess) == []
    assert coordinator.receive(0, ["join"]) == [["run", [["part", GUESS.encode()]], 1]]


class Channel:
    """Messages that have come, and those that were posted."""

    def __init__(self) -> None:
        self.came: deque[tuple[int, bytes]] = deque()
        self.posted: list[tuple[int, Any]] = []

    def poll(self) -> tuple[int, bytes] | None:
        return self.came.popleft() if self.came else None

    def post(self, message: bytes, rank: int) -> None:
        self.posted.append((rank, marshal.loads(message)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_follows_from_one_message_travels_as_one(size: int) -> None:
    """A rank runs what it has heard before it reads on: of two messages, the second would wait for what the first runs,
    on a rank that waits itself until the second is read.
    """
    channel = Channel()
    exchange = Exchange(channel, 0, size, Config(), lambda: 0.0)
    notes = [["new", name, summed().encode()] for name in "abc"]
    exchange.send(notes)
    channel.came += [(rank, marshal.dumps(notes)) for rank in range(1, size)]
    for last in [False] * (size - 2) + [True]:
        assert exchange.poll()
        assert len(channel.posted) == (size - 1 if last else 0)
    decided = [["run", [[name, summed().encode()]], size] for name in "abc"]
    assert [rank for rank, _ in channel.posted] == list(range(1, size))
    assert all(message == channel.posted[0][1] for _, message in channel.posted)
    assert [
        [kind, [list(entry) for entry in entries], active] for kind, entries, active in channel.posted[0][1]
    ] == decided
    assert [run.names for run in exchange.decisions if isinstance(run, Run)] == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("items", "limit", "groups"),
    [
        ([], 10, []),
        ([("f", 4)], 10, [[0]]),
        ([("f", 4), ("f", 4)], 10, [[0, 1]]),
        ([("f", 4), ("f", 6), ("f", 1)], 10, [[0, 1], [2]]),
        ([("f", 4), ("f", 99), ("f", 1)], 10, [[0, 1], [2]]),
        ([("f", 99), ("f", 1), ("f", 1)], 10, [[0], [1, 2]]),
        ([("f", 4), ("i", 4), ("f", 4), ("i", 4)], 10, [[0, 2], [1, 3]]),
        ([("f", 9), ("i", 1), ("f", 9), ("f", 1), ("i", 1)], 10, [[0, 2], [1, 4], [3]]),
        ([("f", 0), ("f", 0), ("f", 0)], 10, [[0, 1, 2]]),
        ([("f", 1), ("f", 1)], 1, [[0], [1]]),
    ],
)
def test_groups(items: list[tuple[str, int]], limit: int, groups: list[list[int]]) -> None:
    """Of one kind, in order, closed by the item that fills them; an item larger than the limit fills any."""
    assert fuse(items, limit) == groups


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20))), st.integers(1, 40))
def test_every_item_has_one_place(items: list[tuple[str, int]], limit: int) -> None:
    """Groups hold all items, each once and in order, of one kind; all but the last of a kind are full, and no group
    was full before its last item came.
    """
    groups = fuse(items, limit)
    assert sorted(index for members in groups for index in members) == list(range(len(items)))
    assert [members[0] for members in groups] == sorted(members[0] for members in groups)
    last = {items[members[0]][0]: members for members in groups}
    for members in groups:
        (kind,) = {items[index][0] for index in members}
        assert members == sorted(members)
        assert sum(items[index][1] for index in members[:-1]) < limit
        assert sum(items[index][1] for index in members) >= limit or members is last[kind]


def waiting(name: str = "x", since: float = 0.0) -> Waiting:
    return Waiting(name, since, (0,), (1,))


@pytest.mark.parametrize(
    ("warning_s", "limit_s", "times", "warned", "expired"),
    [
        (60.0, 300.0, [0, 59.9, 60, 61, 119, 120, 200, 240, 299.9], [60, 120, 240], []),
        (60.0, 300.0, [100, 150, 199, 200, 300, 301], [100, 200], [300, 301]),
        (None, 300.0, [60, 120, 299, 300], [], [300]),
        (60.0, 30.0, [29, 30, 60], [], [30, 60]),
    ],
)
def test_when_it_warns_and_gives_up(
    warning_s: float | None, limit_s: float, times: list[float], warned: list[float], expired: list[float]
) -> None:
    """It warns after the time that was set, then each time that twice as long has passed; at the limit it gives up,
    and warns no more.
    """
    watch, one = StallWatch(warning_s, limit_s), waiting()
    seen = {now: watch.check([one], now) for now in times}
    assert [now for now, (late, _) in seen.items() if late == [one]] == warned
    assert [now for now, (_, over) in seen.items() if over == [one]] == expired


def test_each_operation_has_its_own_time() -> None:
    """Also one that uses the name of an earlier one: it is not late because that one was."""
    watch = StallWatch(10.0, 100.0)
    early, late = waiting("x", 0.0), waiting("y", 5.0)
    assert watch.check([early, late], 12.0) == ([early], [])
    assert watch.check([early, late], 16.0) == ([late], [])
    again = waiting("x", 20.0)
    assert watch.check([again], 29.0) == ([], [])
    assert watch.check([again], 30.0) == ([again], [])
    assert watch.check([again, late], 105.0) == ([again], [late])


def test_what_has_come_to_an_end_is_forgotten() -> None:
    """The watch grows with what waits, not with what has waited."""
    watch = StallWatch(10.0, 100.0)
    watch.check([waiting(f"x{number}") for number in range(50)], 12.0)
    watch.check([], 13.0)
    assert not watch._next
