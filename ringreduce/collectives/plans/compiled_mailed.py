"""The allreduce by mailboxes as a compiled call."""

from __future__ import annotations

from collections.abc import Callable

from ringreduce.buffers import Array, Operand
from ringreduce.collectives.plan import BoundCall, Place
from ringreduce.common.instruments import Instruments
from ringreduce.transport.shared.compiled import MailedCall


class CompiledMailed(BoundCall):
    """What `OneShot` and `MailedPair` do, compiled.

    Args:
        instruments: its observers, if there are any, see steps.
        otherwise: does it step by step, for those who observe steps.
        call: does it at once.
    """

    def __init__(self, instruments: Instruments, otherwise: BoundCall, call: MailedCall) -> None:
        self._instruments = instruments
        self._otherwise = otherwise
        self._call = call

    def run(self, source: Operand, place: Place) -> None:
        if self._instruments.observers:
            self._otherwise.run(source, place)
        else:
            self._call.bound(source.address, place(()).address)()

    def repeated(self, source: Operand, target: Operand) -> Callable[[], object]:
        return self._call.bound(source.address, target.address)

    def into_any(self, source: Operand) -> Callable[[Array], object]:
        return self._call.into_any(source.address)
