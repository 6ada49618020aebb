"""The agreement before a step: in one small reduction the ranks exchange which gradients they have, and what else."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from ringreduce.common.errors import ConfigError, MismatchError, UnsupportedBufferError
from ringreduce.common.reduce_ops import MAX
from ringreduce.engine import InPlaceAllreduce, Operation
from ringreduce.training.binding.framework import Found
from ringreduce.training.data.subsets import Subsets
from ringreduce.training.gradients.checks import Settings
from ringreduce.training.gradients.record import Record
from ringreduce.training.strategies.strategy import Contribution, Partner, StepContext


class Patience:
    """After how many steps that are alike a rank tries to repeat the last one, without an agreement.

    The more often the ranks have come to a step in different ways, the longer they wait.

    """

    def __init__(self) -> None:
        self._alike = 0  # agreements in a row that have found the same
        self._needed = 1  # so many it takes
        # Whether an operation of this step was refused, as some ranks repeated the last step and others agreed first.
        self._refused = False

    @property
    def is_over(self) -> bool:
        """Whether enough agreements have found the same."""
        return self._alike >= self._needed

    def count(self, *, alike: bool) -> None:
        """Count the agreement of a step that ends; ``alike``: whether it has found the same as the last one."""
        self._refused = False
        self._alike = self._alike + 1 if alike else 0

    def heed(self, error: MismatchError, operation: Operation) -> None:
        """Take note that some ranks would repeat a step, and others not; raise any other error."""
        if self._refused:
            raise error
        operation.was_refused(error)
        self._refused = True
        self._alike = 0
        self._needed *= 2

    def excuse(self) -> None:
        """Take back the last doubling: the numbers of samples have changed, which says nothing of gradients."""
        if self._refused:
            self._needed = max(self._needed // 2, 1)


class StepAgreement:
    """What the ranks exchange before a step.

    Args:
        context: of the optimizer.
        partners: say something, too.
        settings: returns this rank's hyper-parameters, as text by name. The ranks compare theirs in steps 1, 2, 4, 8
            and so on, as that takes a while.
        patience: hears of agreements that are refused as other ranks would repeat a step.
    """

    def __init__(
        self, context: StepContext, partners: Sequence[Partner], settings: Settings, patience: Patience
    ) -> None:
        self._context = context
        self._partners = partners
        self._patience = patience
        self._settings: Settings | None = settings
        # Before which step `Checks` compares weights; None: the agreement does, in its first step.
        self._first = context.memory.advice.first
        self._compares = self._first is None  # as long as they are equal
        self._record: Record | None = None
        self._subsets: Subsets = context.ranks.engine.attached[Subsets]

    def agree(self, contribution: Contribution) -> tuple[Record, int]:
        """Exchange with the other ranks which gradients each has, and what it knows of them. Collective.

        Returns:
            The record of all ranks, and how many contribute to the step.

        Raises:
            ConfigError, UnsupportedBufferError: on all ranks; as `GradientReducer.reduce`.
        """
        context = self._context
        count = context.count
        samples = contribution.samples
        record = self._empty(len(contribution.found))
        record.begin(contribution.found)
        for partner in self._partners:
            partner.report(record, contribution.parameters)
        if self._compares and count.looks_closer and count.reduced != 1:  # as after a join, see `StepCount.restart`
            record.sign("weights", context.memory.checksum(contribution.parameters))
        settings = None
        if self._settings is not None and (context.options.is_late or count.reduced >= (self._first or 0)):
            settings = self._settings() if count.looks_closer else None
        if settings is not None:
            record.sign("settings", zlib.crc32(repr(settings).encode()))
        if count.looks_closer:
            for kind, checksum in self._subsets.checksums().items():
                record.sign(kind, checksum)
        if context.checks.compares_data:
            record.sign("data", context.checks.data_checksum(contribution.gradients))
        record.sign("layout", context.buckets.layout)
        if context.options.in_backward:
            record.sign("stepped", count.stepped)
        # The maximum over the ranks shows of each whether some rank has said so.
        record.counted[:] = isinstance(samples, int)
        record.uncounted[:] = samples is None
        record.miscounted[:] = isinstance(samples, ConfigError)
        active = self._exchange(record)
        if isinstance(samples, ConfigError):  # which the others have learnt by now
            raise samples
        self._judge(record, settings, active=active)
        return record, active

    def _empty(self, count: int) -> Record:
        overlaps = any(partner.overlaps for partner in self._partners)
        if self._record is None or self._record.key != (count, overlaps):
            self._record = Record(self._context.ranks.engine.communicator, count, overlaps)
        return self._record

    def _exchange(self, record: Record) -> int:
        """Make the record that of all ranks; return how many contribute to the step."""
        ranks = self._context.ranks
        while True:
            text = f"the gradients of {ranks.name}"
            operation = InPlaceAllreduce(f"{ranks.name}, step", text, MAX, [record.memory], about=ranks.about)
            try:
                ranks.run(operation)
            except MismatchError as error:
                self._patience.heed(error, operation)
            else:
                return operation.active

    def _judge(self, record: Record, settings: Mapping[str, str] | None, active: int) -> None:
        """Warn of what differs between the ranks, or raise."""
        context = self._context
        described = context.ranks.described
        if record.miscounted.any() or (record.counted.any() and record.uncounted.any()):
            raise ConfigError(
                f"some rank gives a wrong number of samples, or none, in a step of {described}: give it on all ranks, "
                "or on none"
            )
        for partner in self._partners:
            partner.heed(record)
        if context.checks.compares_data:  # a rank that has joined did not compute the same
            alike = active == context.ranks.size and not record.differs("data")
            context.checks.heed_data(context.count.reduced, alike)
        if record.differs("weights"):
            self._compares = False
            context.checks.warn_of_weights(context.count.reduced)
        if settings is not None and record.differs("settings"):
            self._settings = None  # once
            context.checks.heed_settings(settings)
        self._subsets.tell(context.ranks.rank, record.differs)
        if record.differs("stepped"):
            raise ConfigError(
                f"the ranks make the backward passes of different steps of {described}: with "
                'reduce_in="backward" every rank makes the same passes before each step, and each of them adds to a '
                "gradient of the optimizer"
            )
        if record.differs("layout"):  # a rank has joined while others have placed gradients
            record.forget_early()
            context.buckets.clear()
        if Found.UNSUPPORTED in record.found:
            number = record.found.tolist().index(Found.UNSUPPORTED)
            raise UnsupportedBufferError(
                f"the gradient of {context.named()[number][0]} is neither on the CPU "
                "nor on a GPU that can be used (one for each process), or of a layout that is neither strided nor "
                "sparse COO, on some rank"
            )
