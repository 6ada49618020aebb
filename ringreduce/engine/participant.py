"""One rank's side of the negotiation; `ringreduce.engine.coordinator` explains the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.common.call_sites import AbortReason
from ringreduce.engine import decisions
from ringreduce.engine.decisions import Decision, Named, Note, OperationSignature, Run

#: The decisions that a note spells out, by its kind.
_SPELLED_OUT: dict[str, Callable[..., Decision]] = {
    "crossed": decisions.Crossed,
    "expired": decisions.Expired,
    "joined": decisions.Joined,
    "late": decisions.Late,
    "paces": decisions.Paced,
    "refuse": decisions.Refuse,
    "stalled": decisions.Stalled,
    "withdrawn": decisions.Withdrawn,
}


class Participant:
    """Turns what the program of a rank does into notes, and the coordinator's notes into decisions.

    Args:
        size: the number of ranks.
        plans: whether this is the coordinator's rank, whose program decides what is fused.
    """

    def __init__(self, size: int, *, plans: bool) -> None:
        self._size = size
        self._plans = plans
        self._numbers: dict[str, dict[OperationSignature, int]] = {}
        self._named: dict[int, Named] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._group_of: dict[int, int] = {}
        self._runs: dict[int, Run] = {}  # of all ranks, by number
        self._held: dict[int, dict[int, None]] = {}  # group -> those of its operations that wait for the others
        self._holders: dict[str, int] = {}  # name -> the group in which an operation of this name waits
        self._unused: list[Note] = []  # changes of the plan, to be made when the program has waited
        self._since_wait: list[int] = []
        self._has_waited = True  # since the last submission

    def submit(self, name: str, signature: OperationSignature) -> list[Note]:
        """Return the notes to the coordinator when the program submits an operation."""
        if self._has_waited:  # only then: a group whose first operations are submitted already would break
            self._has_waited = False
            if self._unused:
                self._apply_plan()
        known = self._numbers.get(name)
        number = None if known is None else known.get(signature)
        notes: list[Note] = []
        holder = self._holders.get(name)
        if holder is not None and not self._follows(number, name, holder):
            notes = self._dissolve(holder)  # operations that share a name are matched in the order of submission
        if number is None:
            return [*notes, ["new", name, signature.encode()]]
        if self._plans and signature.fusible:
            self._since_wait.append(number)
        group = self._group_of.get(number)
        if group is None:
            notes.append(["known", number])
            return notes
        held = self._held.setdefault(group, {})
        held[number] = None
        if len(held) < len(self._groups[group]):
            self._holders[name] = group
            return notes
        self._release(group)
        notes.append(["known", group])
        return notes

    def wait(self) -> list[Note]:
        """Return the notes to send when the program waits; gives up the groups that it has begun."""
        self._has_waited = True
        notes: list[Note] = []
        for group in list(self._held):
            notes += self._dissolve(group)
        submitted = self._since_wait
        if submitted:
            self._since_wait = []
            if len(submitted) > 1:
                together = [number for number in submitted if number not in self._group_of]
                if len(together) > 1:
                    notes.append(["together", *together])
        return notes

    def join(self) -> list[Note]:
        """Return the notes to send when the program submits nothing more until all ranks have joined."""
        return [*self.wait(), ["join"]]

    def withdraw(self, name: str) -> list[Note]:
        """Return the notes to send when the program withdraws a speculative operation."""
        return [["withdraw", name]]

    def block(self, name: str, described: str, place: str) -> list[Note]:
        """Return the notes to send when the program submits nothing before an operation of this name has ended."""
        return [["blocked", name, described, place]]

    def detach(self, why: AbortReason) -> list[Note]:
        """Return the notes to send when this rank takes part in no further operation."""
        return [["detach", tuple(why)]]

    def receive(self, note: Note) -> Decision | None:
        """Return what this rank has to do now that the coordinator has said this; None: nothing."""
        kind, *said = note
        if kind == "all":
            return self._runs[said[0]]
        if kind == "number":
            number, name, signature = said
            named = Named(name, OperationSignature.decode(signature))
            self._numbers.setdefault(name, {})[named.signature] = number
            self._named[number] = named
            self._runs[number] = Run((named,), self._size)
            return None
        if kind in ("group", "ungroup"):
            self._unused.append(note)
            if kind == "group":
                group, *numbers = said
                self._runs[group] = Run(tuple(self._named[number] for number in numbers), self._size)
            return None
        if kind == "run":
            entries, active = said
            return Run(tuple(self._decode(entry) for entry in entries), active)
        if kind == "detached":
            rank, why = said
            return decisions.Detached(rank, AbortReason(*why))
        return _SPELLED_OUT[kind](*said)

    def _decode(self, entry: int | Sequence[Any]) -> Named:
        if isinstance(entry, int):
            return self._named[entry]
        name, signature = entry
        return Named(name, OperationSignature.decode(signature))

    def _apply_plan(self) -> None:
        for kind, group, *numbers in self._unused:
            if kind == "group":
                self._groups[group] = tuple(numbers)
                self._group_of.update(dict.fromkeys(numbers, group))
            elif group in self._groups:
                self._forget(group)
        self._unused.clear()

    def _dissolve(self, group: int) -> list[Note]:
        """Give up a group; return the notes that announce its operations one by one."""
        held = self._release(group)
        self._forget(group)
        return [["apart", group], *([["known", *held]] if held else [])]

    def _follows(self, number: int | None, name: str, group: int) -> bool:
        """Return whether an operation comes later in a group than those of its name that are held back for it."""
        order = self._groups[group]
        held = [each for each in self._held[group] if self._named[each].name == name]
        return number in order and order.index(number) > max(map(order.index, held))

    def _release(self, group: int) -> dict[int, None]:
        held = self._held.pop(group)
        for number in held:
            self._holders.pop(self._named[number].name, None)
        return held

    def _forget(self, group: int) -> None:
        for number in self._groups.pop(group):
            del self._group_of[number]
