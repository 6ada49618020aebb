"""Which named operations run, and in which order: state machines without thread or clock.

Ranks submit operations in any order. Every rank has a `Participant`, which sends the `Coordinator` notes of what its
rank has submitted; the coordinator, on rank 0 of the process set, matches operations by name and sends its decisions
to all ranks. What both send depends only on what they receive, so that a test can play every interleaving.

* A participant sends a name that is new to it in full, with the operation's signature. The coordinator compares the
  signatures that it gets under one name. Once all ranks have sent it, they run the operation, or refuse it, as the
  coordinator decides. All ranks run operations in the order of its decisions.
* A name that comes again gets a number, and travels as that number from then on. Names that are used once
  (``f"loss {step}"``) leave nothing behind.
* Fusible operations that the coordinator's own program submits between two waits become a group: the plan follows from
  the order of the program, not from timing. A participant holds back the operations of a group until the program has
  submitted all of them or waits for one, and then announces them together. A group that all ranks announced travels as
  one; if a rank did not, each of its operations travels alone. So what travels together does not depend on timing.
* Reductions run without data of the ranks that have joined. These take part with neutral elements, for which the
  signature says all they need.
* A rank that cannot make a call submits a refusal under its name, and all ranks refuse the operation.
* A speculative operation may be submitted by some ranks only: no rank waits for it, and it can be withdrawn until it
  runs.
* A rank that has waited for an operation for a while says so. If every rank waits for one that others have not
  submitted, none can go on, and these operations end at once. That is certain where one thread of each rank submits
  what it waits for. A rank of which several threads have waited at the same time never says so.
* Operations without a name share one name for each kind, under which they match in order.

If a rank does not submit an operation within the time limit, all operations end: it may be late or have skipped the
call, and then its next operations may not match the others'.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from ringreduce.buffers import DType
from ringreduce.common.instruments import LATE_S
from ringreduce.engine.decisions import Named, Note, OperationKind, OperationSignature, Waiting
from ringreduce.engine.pacemaker import Paces

_REMEMBERED = 4096  # names that came once
_BREAKS = 8  # how often a plan for an operation may prove wrong before it travels alone for good


class _Claim(NamedTuple):
    """What the coordinator knows of an operation that a rank has submitted, and the group that it announced it with."""

    signature: OperationSignature
    group: int | None
    since: float


class Coordinator:
    """Hears all ranks' participants, and decides what runs when.

    Args:
        size: the number of ranks.
        fusion_nbytes: a group that holds so many bytes is closed.
    """

    def __init__(self, size: int, fusion_nbytes: int) -> None:
        self._size = size
        self._fusion_nbytes = fusion_nbytes
        self._claims: defaultdict[str, dict[int, deque[_Claim]]] = defaultdict(dict)
        # Operations that ranks announced by number alone are counted as one, which is quicker than a claim for each.
        self._whole: dict[int, dict[int, float]] = {}  # number -> rank -> since
        self._whole_of: dict[str, int] = {}
        self._seen: OrderedDict[Named, None] = OrderedDict()
        self._numbers: dict[Named, int] = {}
        self._named: dict[int, Named] = {}
        self._names: dict[int, tuple[str, ...]] = {}  # of the operation, or the operations of the group, of a number
        self._groups: dict[int, tuple[int, ...]] = {}  # never forgotten: a note that uses one may be under way
        self._grouped: set[int] = set()
        self._apart: set[int] = set()
        self._breaks: Counter[int] = Counter()
        self._last_number = 0
        self._joined: list[int] = []
        self._blocked: dict[int, tuple[str, str, str]] = {}  # by rank, what it waited for when it last said something
        self._paces = Paces(size)
        self._last_note_s = 0.0  # when a rank last submitted something or joined
        self._over = False  # a rank takes part in nothing any more, or did not come: nothing can run then

    def receive(self, rank: int, note: Note, now: float = 0.0) -> list[Note]:
        """Take a note of a rank; return the notes to send to all ranks, in this order.

        Args:
            rank: who says it.
            note: what its `Participant` returned.
            now: the time, on any clock that does not go back.
        """
        if self._over:
            return []
        kind, *said = note
        self._last_note_s = now
        if self._blocked:
            self._blocked.pop(rank, None)
        if kind == "known":
            notes: list[Note] = []
            for number in said:
                notes += self._receive_number(rank, number, now)
            return notes
        if kind == "new":
            name, signature = said
            self._claim(rank, name, _Claim(OperationSignature.decode(signature), None, now))
            return self._decide([name])
        if kind == "together":
            return self._plan(said)
        if kind == "apart":
            return self._ungroup(said[0])
        if kind == "pace":
            return self._paces.receive(rank, *said)
        if kind == "blocked":
            self._blocked[rank] = (said[0], said[1], said[2])
            return self._cross()
        if kind == "join":
            return self._join(rank)
        if kind == "withdraw":
            return self._withdraw(rank, *said)
        assert kind == "detach", note
        self._end()
        return [["detached", rank, tuple(said[0])]]

    def waiting(self) -> list[Waiting]:
        """Return what ranks wait for, in the order of first submission under each name; if nothing, a join."""
        found = []
        for number, ranks in self._whole.items():
            missing = tuple(rank for rank in range(self._size) if rank not in ranks)
            since = min(ranks.values())
            found += [
                Waiting(name, since=since, present=tuple(sorted(ranks)), missing=missing)
                for name, signature in self._operations(number)
                if not signature.speculative
            ]
        for name, claims in self._claims.items():
            if any(queue[0].signature.speculative for queue in claims.values()):
                continue
            missing = tuple(rank for rank in self._expected() if rank not in claims)
            since = min(queue[0].since for queue in claims.values())
            found.append(Waiting(name, since=since, present=tuple(sorted(claims)), missing=missing))
        if self._joined and not found:
            found.append(
                Waiting(
                    "join",
                    since=self._last_note_s,
                    present=tuple(sorted(self._joined)),
                    missing=tuple(self._expected()),
                    is_join=True,
                )
            )
        return found

    def stalled(self, waiting: Waiting, now: float) -> Note:
        """Return the note to all ranks about an operation, or a join, that has waited for long."""
        name, since, present, missing, is_join = waiting
        return ["stalled", name, missing, now - since, present[0], is_join]

    def expire(self, waiting: Waiting, now: float) -> Note:
        """Give up an operation, or a join, and all others with it; return the note to all ranks."""
        name, since, present, missing, is_join = waiting
        others = [each for each in self.waiting() if each.name != name]
        instead = {rank: each.name for each in reversed(others) for rank in missing if rank in each.present}
        self._end()
        return ["expired", name, present, missing, now - since, is_join, instead]

    # ---- claims ----

    def _receive_number(self, rank: int, number: int, now: float) -> list[Note]:
        """Record that a rank has submitted the operation or group of a number; return the notes to all ranks."""
        ranks = self._whole.get(number)
        if ranks is None:
            names = self._names[number]
            # Operations of one name are matched in order: one that waits already must be counted in the same way.
            if not self._joined and self._claims.keys().isdisjoint(names) and self._whole_of.keys().isdisjoint(names):
                ranks = self._whole[number] = {}
                self._whole_of.update(dict.fromkeys(names, number))
        if ranks is not None and rank not in ranks:
            ranks[rank] = now
            if len(ranks) < self._size:
                return []
            self._forget_whole(number)
            seconds = now - min(ranks.values())
            return [["late", rank, seconds], ["all", number]] if seconds > LATE_S else [["all", number]]
        operations = self._operations(number)
        for name, signature in operations:
            self._claim(rank, name, _Claim(signature, number if number in self._groups else None, now))
        return self._decide([name for name, _ in operations])

    def _operations(self, number: int) -> list[Named]:
        return [self._named[member] for member in self._groups.get(number, (number,))]

    def _forget_whole(self, number: int) -> dict[int, float]:
        for name in self._names[number]:
            self._whole_of.pop(name, None)  # a group may have several of one name
        return self._whole.pop(number)

    def _open(self, name: str) -> None:
        """Turn the number under which an operation was announced into claims, one for each of its operations."""
        number = self._whole_of.get(name)
        if number is None:
            return
        group = number if number in self._groups else None
        for rank, since in self._forget_whole(number).items():
            for member, signature in self._operations(number):
                self._claims[member].setdefault(rank, deque()).append(_Claim(signature, group, since))

    def _claim(self, rank: int, name: str, claim: _Claim) -> None:
        self._open(name)
        self._claims[name].setdefault(rank, deque()).append(claim)

    def _take(self, name: str, ranks: Iterable[int]) -> dict[int, _Claim]:
        """Remove the oldest claim of each of ``ranks`` and return them."""
        claims = self._claims[name]
        taken = {}
        for rank in ranks:
            taken[rank] = claims[rank].popleft()
            if not claims[rank]:
                del claims[rank]
        if not claims:
            del self._claims[name]
        return taken

    def _expected(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._joined]

    # ---- decisions ----

    def _decide(self, names: Iterable[str]) -> list[Note]:
        """Return the notes that run or refuse what all expected ranks have submitted."""
        notes: list[Note] = []
        fused: dict[tuple[int, int], list[int | Note]] = {}
        expected = set(self._expected())
        for name in names:
            claims = self._claims.get(name)
            if claims is None or not claims.keys() >= expected:
                continue
            # A rank that submitted and then joined takes part like the others.
            taken = self._take(name, sorted(claims))
            since = {rank: claim.since for rank, claim in taken.items()}
            last = max(since, key=since.__getitem__)
            seconds = since[last] - min(since.values())
            if seconds > LATE_S:
                notes.append(["late", last, seconds])
            signatures = {rank: claim.signature for rank, claim in taken.items()}
            first = next(iter(signatures.values()))
            refused = OperationKind.REFUSAL in [each.kind for each in signatures.values()]
            differ = any(map(first.__ne__, signatures.values()))
            if refused or differ or (len(taken) < self._size and first.kind is OperationKind.CALL):
                alike = len({each.text for each in signatures.values()}) == 1
                said = {rank: each.in_full if alike else each.text for rank, each in signatures.items()}
                texts = {rank: said.get(rank, "joined") for rank in range(self._size)}
                notes.append(["refuse", name, texts, tuple(signatures)])
                continue
            entry = self._entry(Named(name, first), notes)
            groups = {claim.group for claim in taken.values()}
            group = groups.pop() if len(groups) == 1 else None
            if group is None:
                notes.append(["run", [entry], len(taken)])
            elif (group, len(taken)) in fused:
                fused[group, len(taken)].append(entry)
            else:
                fused[group, len(taken)] = [entry]
                notes.append(["run", fused[group, len(taken)], len(taken)])
        return notes

    def _entry(self, named: Named, notes: list[Note]) -> int | Note:
        """Return how notes name an operation: in full the first time, then by a number, which ``notes`` announce."""
        number = self._numbers.get(named)
        if number is not None:
            return number
        if named not in self._seen:
            self._seen[named] = None
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
            return [named.name, named.signature.encode()]
        del self._seen[named]
        self._last_number += 1
        number = self._last_number
        self._numbers[named] = number
        self._named[number] = named
        self._names[number] = (named.name,)
        notes.append(["number", number, named.name, named.signature.encode()])
        return number

    def _cross(self) -> list[Note]:
        """Return the note that ends what all ranks wait for, if none of that can run."""
        expected = self._expected()
        for rank in expected:
            name, *_ = self._blocked.get(rank, ("",))
            number = self._whole_of.get(name)
            if rank not in self._claims.get(name, ()) and (number is None or rank not in self._whole[number]):
                return []  # it goes on, or will once it hears that this has run
        names = tuple(dict.fromkeys(self._blocked[rank][0] for rank in expected))
        for name in names:
            self._open(name)
            self._take(name, list(self._claims[name]))
        values, places = ({rank: self._blocked[rank][part] for rank in expected} for part in (1, 2))
        self._blocked.clear()
        return [["crossed", names, values, places]]

    # ---- the plan ----

    def _plan(self, numbers: Sequence[int]) -> list[Note]:
        """Return the notes that group what the coordinator's program submitted between two waits."""
        times = Counter(numbers)
        free = [
            number
            for number in numbers
            if times[number] == 1 and number not in self._grouped and self._breaks[number] < _BREAKS
        ]
        items: list[tuple[Hashable, int]] = []
        for number in free:  # each reduces elements of one dtype, or it could not be fused
            signature = self._named[number].signature
            ((dtype, count),) = signature.counts
            items.append(((signature.op, dtype), count * DType.of(dtype).itemsize))
        notes: list[Note] = []
        for members in fuse(items, self._fusion_nbytes):
            if len(members) > 1:
                self._last_number += 1
                group = self._last_number
                self._groups[group] = tuple(free[index] for index in members)
                self._names[group] = tuple(name for name, _ in self._operations(group))
                self._grouped.update(self._groups[group])
                notes.append(["group", group, *self._groups[group]])
        return notes

    def _ungroup(self, group: int) -> list[Note]:
        if group in self._apart:
            return []
        self._apart.add(group)
        self._grouped.difference_update(self._groups[group])
        self._breaks.update(self._groups[group])
        return [["ungroup", group]]

    # ---- ranks that join, withdraw or leave ----

    def _join(self, rank: int) -> list[Note]:
        for name in list(self._whole_of):
            self._open(name)
        self._joined.append(rank)
        # Of a name that was submitted several times, all may be ready now.
        notes = self._decide(
            [name for name, claims in self._claims.items() for _ in range(max(map(len, claims.values())))]
        )
        if len(self._joined) == self._size:
            self._joined.clear()
            notes.append(["joined", rank])
        return notes

    def _withdraw(self, rank: int, name: str) -> list[Note]:
        self._open(name)
        if rank not in self._claims.get(name, ()):  # it has run, and this rank will get that note before long
            return []
        self._take(name, [rank])
        return [["withdrawn", rank, name]]

    def _end(self) -> None:
        self._over = True
        self._joined.clear()
        self._whole.clear()
        self._whole_of.clear()
        self._claims.clear()


def fuse(items: Sequence[tuple[Hashable, int]], limit_nbytes: int) -> list[list[int]]:
    """Group items: one kind in each group, in order; the item that fills a group to the limit closes it.

    Args:
        items: kind (dtype, op, ...) and size (bytes) of each.
        limit_nbytes: a group that holds so many bytes is closed.

    Returns:
        The indices of the items of each group; groups in the order of their first items.
    """
    groups: list[list[int]] = []
    open_groups: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, nbytes) in enumerate(items):
        members, filled = open_groups.pop(kind, ([], 0))
        if not members:
            groups.append(members)
        members.append(index)
        if filled + nbytes < limit_nbytes:
            open_groups[kind] = members, filled + nbytes
    return groups


class StallWatch:
    """Decides when to warn about an operation that not all ranks submit, and when to give it up.

    Args:
        warning_s: warn about one that has waited for so long (seconds), and again whenever it has waited for twice as
            long as at its last warning. None: never.
        limit_s: give it up after so long (seconds).
    """

    def __init__(self, warning_s: float | None, limit_s: float) -> None:
        self._warning_s = warning_s
        self._limit_s = limit_s
        self._next: dict[tuple[str, float], float] = {}

    def check(self, waiting: Iterable[Waiting], now: float) -> tuple[list[Waiting], list[Waiting]]:
        """Return the operations to warn about, and those to give up.

        Args:
            waiting: all operations that wait.
            now: the time (seconds), on the clock of ``since``.
        """
        late = []
        expired = []
        known = {}
        for each in waiting:
            seconds = now - each.since
            key = each.name, each.since
            if seconds >= self._limit_s:
                expired.append(each)
                continue
            if self._warning_s is None:
                continue
            due = self._next.get(key, self._warning_s)
            if seconds >= due:
                late.append(each)
                due = 2 * seconds
            known[key] = due
        self._next = known
        return late, expired
