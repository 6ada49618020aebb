"""The exceptions that ringreduce raises, all of them.

    RingReduceError (RuntimeError)
    ├── ConfigError (ValueError)                        a setting, an argument or the launch itself is wrong
    │   └── ForeignFileError                                ... or a file or key of somebody else is in its place
    ├── UnsupportedBufferError (TypeError, ValueError)  an array that no collective can take
    ├── NotFiniteError (FloatingPointError)             a gradient holds NaN or infinity, and the settings forbid it
    └── CollectiveError                                 something that the ranks do together failed
        ├── MismatchError (ValueError)                      the ranks called different things
        ├── CollectiveTimeoutError (TimeoutError)           a peer did not arrive within the time limit
        ├── TransportError                                  bytes could not be moved
        │   ├── ChangedMessageError                         ... without being changed on their way
        │   └── PeerLostError                               ... because a peer has failed
        └── ShutdownError                                   the world was shut down under the call

Each also inherits the builtins that programs catch in its place, so that ``except ValueError`` works. All are
RuntimeErrors, as most errors of torch and of Horovod are: Horovod finds some mistakes (a scalar to be gathered) only
after the negotiation, ringreduce finds them at the call. A broken invariant of ringreduce itself is an
``AssertionError`` and never one of these.
"""

from __future__ import annotations

from collections.abc import Mapping


class RingReduceError(RuntimeError):
    """Base of every error that ringreduce raises on purpose."""

    # Else Keras and AutoGraph raise another error in its place, made of its text.
    _keras_call_info_injected = ag_pass_through = True


class ConfigError(RingReduceError, ValueError):
    """A setting, an argument or the way the job was launched is wrong."""


class ForeignFileError(ConfigError):
    """A file or a folder is not used: others may read or write it, it is another user's, or of another key."""


class UnsupportedBufferError(RingReduceError, TypeError, ValueError):
    """An array cannot take part: its dtype, device, writability or memory layout is not supported."""


class NotFiniteError(RingReduceError, FloatingPointError):
    """A gradient holds NaN or infinity, where ``RINGREDUCE_CHECK_FINITE`` asks for that to be looked at."""


class CollectiveError(RingReduceError):
    """What the ranks do together failed, through no fault of this rank's arguments alone."""


class MismatchError(CollectiveError, ValueError):
    """The ranks of one collective call disagree about what is to be done, or some cannot do it.

    Raised on every rank, before any user data has moved. If all of them made the same call of the program, only with
    different arguments, they are in step, and later calls work. If not, one rank may have left out a call that the
    others made; then the ranks would go on with calls that do not belong together, so no later call is accepted.

    Attributes:
        values: what each rank called, rank -> description.
        in_step: whether later calls work.
        places: where the program made the calls, rank -> ``file:line``; empty where that does not matter.
        remedy: what the program can do to go on if the ranks are not in step.
        advice: what to change in the program; empty: the values say it.
    """

    remedy = "call shutdown() and init() on all ranks"

    def __init__(
        self,
        values: Mapping[int, str],
        *,
        in_step: bool = True,
        places: Mapping[int, str] | None = None,
        advice: str = "",
    ) -> None:
        self.values: dict[int, str] = dict(sorted(values.items()))
        self.in_step = in_step
        self.places: dict[int, str] = dict(places or {})
        self.advice = advice
        super().__init__(self.values)

    def __str__(self) -> str:
        groups: dict[str, list[int]] = {}
        for rank, value in self.values.items():
            place = self.places.get(rank)
            groups.setdefault(f"{value}, called at {place}" if place else value, []).append(rank)
        lines = ["the ranks disagree:", *(f"  {name_ranks(ranks)}: {value}" for value, ranks in groups.items())]
        if self.advice:
            lines.append(self.advice)
        if not self.in_step:
            lines.append(
                "these calls come from different lines of the program, so it is unknown which of the later ones match, "
                f"and they are refused; {self.remedy} to continue"
            )
        return "\n".join(lines)


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A peer did not do its part within the time limit; the message names it and what was waited for."""


class TransportError(CollectiveError):
    """Bytes could not be moved between ranks; the state of the transport is unknown afterwards."""


class ChangedMessageError(TransportError):
    """A message has changed on its way, or another one has come in its place: by a fault, or by somebody."""


class PeerLostError(TransportError):
    """A rank that a collective needs has failed.

    Attributes:
        rank: the rank that has failed; -1: it is not known which.
        reason: why, as far as is known.
        ends_job: whether that rank has said itself why it ends, and ends the job.
    """

    def __init__(self, rank: int, reason: str, ends_job: bool = False) -> None:
        self.rank = rank
        self.reason = reason
        self.ends_job = ends_job
        super().__init__(f"{f'rank {rank}' if rank >= 0 else 'a rank'} is lost: {reason}")

    def __reduce__(self) -> tuple[type[PeerLostError], tuple[int, str, bool]]:
        return type(self), (self.rank, self.reason, self.ends_job)


def during(error: TransportError, call: str) -> TransportError:
    """Return an error that also says in which call it came; the same, if it does so, or if a rank has failed."""
    if isinstance(error, PeerLostError) or call in str(error):
        return error
    named = type(error)(f"{error}, in {call}")
    named.__cause__ = error.__cause__
    return named


def since(failure: BaseException, what: str) -> TransportError:
    """Return what a call raises that comes after a failure: the loss of a rank again, if that was it.

    Args:
        failure: what has ended all.
        what: it ended, ``"collective"``; a message concerns two ranks, and leaves no others out of step.
    """
    if isinstance(failure, PeerLostError):
        return PeerLostError(failure.rank, f"{failure.reason} (in an earlier {what})", failure.ends_job)
    if what == "message":
        return TransportError(f"no message can follow an earlier failure: {failure!r}")
    return TransportError(f"an earlier {what} failed, so the ranks are out of step: {failure!r}")


class ShutdownError(CollectiveError):
    """ringreduce was shut down while, or before, the operation ran."""


def name_ranks(ranks: list[int]) -> str:
    """Write ``[0, 1, 2, 5]`` as ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


for _error in list(vars().values()):
    if isinstance(_error, type) and issubclass(_error, RingReduceError):
        _error.__module__ = "ringreduce"  # Users import it from there, as tracebacks and pickles should say.
