"""The operations behind `ringreduce.torch.ops`, made of tensors that have no graph: they only have to be started."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch

from ringreduce.adasum import adasum
from ringreduce.arguments import CheckingArguments, real_number, shown
from ringreduce.communicator import Communicator
from ringreduce.engine import Call, Engine, Operation, Reduction, Refusal, unnamed
from ringreduce.errors import ConfigError, UnsupportedBufferError
from ringreduce.process_sets import ProcessSet
from ringreduce.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.reproducible import reproducible_allreduce
from ringreduce.runtime import global_process_set
from ringreduce.torch.streams import Crossing, gpu_of, on_host, on_this_stream, require_usable

__all__ = [
    "Adasum",
    "Handle",
    "Op",
    "Prepared",
    "ReproducibleSum",
    "Tensors",
    "averaged",
    "changed",
    "checking_submission",
    "listed",
    "looks",
    "prepare_allgather",
    "prepare_allreduce",
    "prepare_alltoall",
    "prepare_broadcast",
    "prepare_call",
    "prepare_reducescatter",
    "require_linear",
    "require_process_set",
    "require_rows",
    "require_tensors",
    "scaled",
    "set_to_tell",
    "without_graph",
]

#: Adaptive summation, see `ringreduce.adasum`.
Adasum = "adasum"

#: The exact sum, rounded once, whatever the number of ranks; see `ringreduce.reproducible`.
ReproducibleSum = "reproducible sum"

Tensors = Sequence[torch.Tensor]
Op = ReduceOp | str

_numbers = itertools.count(1)


class Handle:
    """An operation on its way, to be given to `poll` and `synchronize`; ``int(handle)`` is its number, as in Horovod.

    It is no number itself: `torch.compile` would take it for a constant, and compile again for every operation.
    """

    __slots__ = ("_number", "crossing", "engine", "operation")

    def __init__(self, operation: Operation, engine: Engine, crossing: Crossing | None = None) -> None:
        self._number = next(_numbers)
        self.operation, self.engine, self.crossing = operation, engine, crossing

    def __index__(self) -> int:
        return self._number


class Prepared(NamedTuple):
    """An operation that only has to be started.

    Attributes:
        tensors: what it reads and writes, if some of it lies on a GPU, and then it is a `Call`; else None.
    """

    operation: Operation
    process_set: ProcessSet
    unique: bool
    tensors: Tensors | None = None

    def submit(self) -> Handle:
        """Start it."""
        operation, process_set, unique, tensors = self
        engine = process_set.engine
        crossing = None
        if tensors is not None:
            assert isinstance(operation, Call)
            crossing = Crossing(tensors)
            operation.run = crossing.around(operation.run)
        engine.submit(operation, unique=unique)
        return Handle(operation, engine, crossing)

    def carry_out(self) -> Any:
        """Start it and wait for its result, on this thread: quicker than `submit` and `synchronize`."""
        operation, process_set, unique, tensors = self
        if tensors is not None:
            assert isinstance(operation, Call)
            operation.run = on_this_stream(operation.run, gpu_of(tensors))
        return process_set.engine.run(operation, unique=unique)


def checking_submission(kind: str, name: object, process_set: object) -> CheckingArguments:
    """Return a context for what is done to arguments before an operation is submitted.

    If that fails on this rank, the others hear of it when they come to the operation: it ends for them, too, and the
    next ones belong together again.

    Args:
        kind: of collective, as in `prepare_call`.
        name: that the program gave the operation, or None.
        process_set: the ranks that take part.

    Raises:
        ConfigError: the name is neither text nor None, and the others hear of it where they gave none; or the process
            set is none, or is not registered, and all ranks hear of it.
    """
    checking = CheckingArguments(partial(_tell, kind, name, process_set))
    named = name is None or isinstance(name, str)
    if not (named and isinstance(process_set, ProcessSet) and process_set.process_set_id is not None):
        with checking:
            require_process_set(process_set).included()  # raises unless it is registered
            if not named:
                raise ConfigError(f"the name of an operation must be a str or None, got {shown(name)}")
    return checking


def _tell(kind: str, name: object, process_set: object, error: Exception) -> None:
    """Let the others hear why this rank cannot submit an operation."""
    with suppress(ConfigError):  # no member, or no world: there is nobody to tell
        key = _key(kind, name if isinstance(name, str) else None)
        set_to_tell(process_set).engine.refuse(Refusal(key, kind, error))


def set_to_tell(process_set: object) -> ProcessSet:
    """Return who hears of wrong arguments: the ranks of the process set, all if it is none or is not registered."""
    registered = isinstance(process_set, ProcessSet) and process_set.process_set_id is not None
    return cast(ProcessSet, process_set) if registered else global_process_set


def prepare_allreduce(
    sources: Tensors,
    targets: Tensors,
    name: str | None,
    op: Op,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    result: Callable[[], Any],
    wire: str | None = None,
) -> Prepared:
    """Prepare to reduce one tensor, or several as one operation.

    Args:
        sources: this rank's.
        targets: where results go; the same list, or others of the same shapes.
        name: None: it meets those of the other ranks in the order of their submission.
        op: `Adasum` and `ReproducibleSum` as well.
        prescale: multiplies what goes in.
        postscale: multiplies what comes out.
        process_set: the ranks that take part.
        result: makes the operation's result when it is done.
        wire: the format in which floating point numbers travel; None: as they are.

    Raises:
        ConfigError, UnsupportedBufferError: at once, as all of these functions: it could not be carried out later.
    """
    if not sources:
        raise ConfigError("a group must have at least one tensor")
    prescale, postscale = real_number("prescale_factor", prescale), real_number("postscale_factor", postscale)
    text = _allreduce_text(op, prescale, postscale, tuple([(each.shape, each.dtype) for each in sources]))
    if wire is not None:
        text = f"{text} as {wire}"
    on_gpu = gpu_of(sources) is not None or (targets is not sources and gpu_of(targets) is not None)
    if on_gpu:
        text = f"{text} on {', '.join(each.device.type for each in sources)}"
    unscaled = sources if prescale == 1.0 else targets

    def before() -> None:
        for source, target in zip(sources, targets, strict=True):
            _scale(source, prescale, target)

    def after() -> Any:
        for target in targets:
            _scale(target, postscale, target)
        return result()

    in_place = _reduction_in_place(op, wire)
    if in_place is None and not on_gpu:
        reduction = Reduction(
            _key("allreduce", name),
            text,
            ReduceOp.parse(op),
            unscaled,
            targets,
            before=None if prescale == 1.0 else before,
            after=result if postscale == 1.0 else after,
        )
        return Prepared(reduction, process_set, name is not None)

    def run(communicator: Communicator) -> Any:
        if in_place is not None:
            before()
            in_place(communicator, targets)
        else:
            if prescale != 1.0:
                before()
            _reduce_together(communicator, ReduceOp.parse(op), unscaled, targets)
        return after()

    _check(process_set, sources, targets)
    return prepare_call("allreduce", name, text, run, process_set, sources, targets)


def _reduction_in_place(op: Op, wire: str | None) -> Callable[[Communicator, Tensors], None] | None:
    """Return what reduces tensors in place where that takes more than a reduction, which may travel with others."""
    if op == Adasum:

        def combine(communicator: Communicator, tensors: Tensors) -> None:
            with on_host(tensors) as lent:
                adasum(communicator, lent)

        return combine
    if op == ReproducibleSum:

        def add_up(communicator: Communicator, tensors: Tensors) -> None:
            with on_host(tensors) as lent:
                for each in lent:
                    reproducible_allreduce(communicator, each, out=each)

        return add_up
    if wire is not None:

        def encode(communicator: Communicator, tensors: Tensors) -> None:
            for each in tensors:
                communicator.allreduce(each, op, out=each, wire=wire if each.is_floating_point() else None)

        return encode
    return None


def _reduce_together(communicator: Communicator, op: ReduceOp, sources: Tensors, targets: Tensors) -> None:
    """Reduce tensors of which some lie on a GPU; those of one dtype that do travel together."""
    groups: dict[object, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for number, pair in enumerate(zip(sources, targets, strict=True)):
        groups.setdefault(pair[0].dtype if pair[0].is_cuda else number, []).append(pair)
    for pairs in groups.values():
        if len(pairs) == 1:
            ((source, target),) = pairs
            communicator.allreduce(source, op, out=target)
            continue
        flat = torch.cat([source.reshape(-1) for source, _ in pairs])
        communicator.allreduce(flat, op, out=flat)
        parts = flat.split_with_sizes([target.numel() for _, target in pairs])
        for (_, target), part in zip(pairs, parts, strict=True):
            with torch.inference_mode(target.is_inference()), torch.no_grad():
                target.copy_(part.view(target.shape))


def prepare_allgather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, result: Callable[[list[torch.Tensor]], Any]
) -> Prepared:
    """Prepare to concatenate tensors along their first dimension; ``result`` is given the list."""
    _check(process_set, tensors)
    require_rows(tensors, "allgather")
    text = f"allgather({looks(*tensors, any_rows=True)})"

    def run(communicator: Communicator) -> Any:
        return result([communicator.allgather(each) for each in tensors])

    return prepare_call("allgather", name, text, run, process_set, tensors)


def prepare_broadcast(
    values: torch.Tensor, in_place: torch.Tensor | None, root: int, name: str | None, process_set: ProcessSet
) -> Prepared:
    """Prepare to broadcast from a rank of the set.

    Args:
        values: the root's are sent.
        in_place: what the user calls ``values``, if they are to be overwritten; None: they are not.
        root: in the set.
        name: as in `prepare_allreduce`.
        process_set: likewise.
    """
    _check(process_set, [values], [values] if in_place is not None else [])
    text = f"broadcast(root {root}, {looks(values)})"

    def run(communicator: Communicator) -> torch.Tensor:
        if in_place is None:
            return cast(torch.Tensor, communicator.broadcast(values, root))
        communicator.broadcast(values, root, out=values)
        return changed(in_place)

    return prepare_call("broadcast", name, text, run, process_set, [values])


def prepare_alltoall(
    tensor: torch.Tensor, rows: list[int], name: str | None, process_set: ProcessSet, *, alone: bool
) -> Prepared:
    """Prepare to send so many rows to each rank; the result says how many came from each, unless it is ``alone``."""
    _check(process_set, [tensor])
    text = f"alltoall({looks(tensor, any_rows=True)})"

    def run(communicator: Communicator) -> Any:
        result, received = communicator.alltoall(tensor, rows)
        return result if alone else (result, torch.tensor(received, dtype=torch.int32, device="cpu"))

    return prepare_call("alltoall", name, text, run, process_set, [tensor])


def prepare_reducescatter(
    tensors: Tensors,
    name: str | None,
    op: Op,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    result: Callable[[list[torch.Tensor]], Any],
) -> Prepared:
    """Prepare to reduce tensors and scatter the results; ``result`` is given the list of this rank's parts."""
    if op == Adasum:
        raise ConfigError("there is no reducescatter with Adasum, which looks at whole tensors; use allreduce")
    kind = ReduceOp.parse(op)
    prescale, postscale = real_number("prescale_factor", prescale), real_number("postscale_factor", postscale)
    _check(process_set, tensors)
    require_rows(tensors, "reducescatter")
    text = f"reducescatter({kind.value}, {looks(*tensors)}, scaled by {prescale} and {postscale})"

    def run(communicator: Communicator) -> Any:
        parts = []
        for each in tensors:
            part = communicator.reduce_scatter(scaled(each, prescale), kind)
            parts.append(scaled(part, postscale))
        return result(parts)

    return prepare_call("reducescatter", name, text, run, process_set, tensors)


def prepare_call(
    kind: str,
    name: str | None,
    text: str,
    run: Callable[[Communicator], Any],
    process_set: ProcessSet,
    sources: Tensors = (),
    targets: Tensors = (),
) -> Prepared:
    """Prepare what a function does with the communicator.

    Args:
        kind: of collective; those without a name are counted by it.
        name: as in `prepare_allreduce`.
        text: says what this rank wants; must agree on all ranks.
        run: returns the result.
        process_set: the ranks that take part.
        sources: the tensors that it reads.
        targets: those that it writes.
    """
    on_gpu = gpu_of(sources) is not None or gpu_of(targets) is not None
    tensors = [*sources, *targets] if on_gpu else None
    return Prepared(Call(_key(kind, name), text, run), process_set, name is not None, tensors)


def _key(kind: str, name: str | None) -> str:
    return unnamed(kind) if name is None else name


# ---- arguments ----


def _check(process_set: ProcessSet, sources: Tensors, targets: Tensors = ()) -> None:
    """Refuse on this rank, at the call, what could not be carried out later."""
    if not sources:
        raise ConfigError("a group must have at least one tensor")
    communicator = process_set.engine.communicator
    for source in sources:
        require_usable(communicator, source)
    for target in targets:
        require_usable(communicator, target, writable=True)


def require_process_set(process_set: object) -> ProcessSet:
    """Return it; raise `ConfigError` unless it is a process set."""
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(
            f"process_set must be a ProcessSet, as hvd.add_process_set([0, 1]) returns it, got {process_set!r}"
        )
    return process_set


def require_rows(tensors: Tensors, what: str) -> None:
    """Raise `UnsupportedBufferError` unless all are tensors that have a first dimension."""
    require_tensors(*tensors)
    if any(each.dim() == 0 for each in tensors):
        raise UnsupportedBufferError(f"{what} needs tensors with at least one dimension, got a scalar")


def require_linear(op: Op, collective: str) -> None:
    """Raise `ConfigError` unless gradients flow through an operation."""
    if op not in (AVERAGE, SUM, "average", "sum", ReproducibleSum):
        word = op.value if isinstance(op, ReduceOp) else op
        raise ConfigError(f"no gradient flows through {collective} with op {word}; use average or sum, or detach")


@lru_cache(maxsize=4096)
def _allreduce_text(
    op: Op, prescale: float, postscale: float, tensors: tuple[tuple[torch.Size, torch.dtype], ...]
) -> str:
    kind = "allreduce" if len(tensors) == 1 else "grouped allreduce"
    word = op if isinstance(op, str) else op.value
    looks = ", ".join(_look(shape, dtype) for shape, dtype in tensors)
    scales = f", scaled by {prescale} and {postscale}" if (prescale, postscale) != (1.0, 1.0) else ""
    return f"{kind}({word}, {looks}{scales})"


def looks(*tensors: torch.Tensor, any_rows: bool = False) -> str:
    """Say the shapes and dtypes of tensors; with a star for rows that may differ between ranks."""
    return ", ".join(_look(["*", *each.shape[1:]] if any_rows else each.shape, each.dtype) for each in tensors)


def _look(dims: Sequence[int | str], dtype: torch.dtype) -> str:
    shape = "x".join(map(str, dims)) if dims else "scalar"
    return f"{shape} {str(dtype)[6:]}"


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor times a factor, itself if that is 1; integers are truncated toward zero."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return (tensor.to(torch.float64) * factor).to(tensor.dtype)


def _scale(source: torch.Tensor, factor: float, target: torch.Tensor) -> None:
    """Store the scaled tensor in ``target``, which may be the source itself."""
    if factor == 1.0:
        if target is not source:
            target.copy_(source)
        return
    # On whatever thread this is, tensors that were made in inference mode may be changed in it alone.
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if source.is_floating_point() or source.is_complex():
            torch.mul(source, factor, out=target)
        else:
            target.copy_(scaled(source, factor))


def averaged(total: torch.Tensor, size: int) -> torch.Tensor:
    """Divide by a number of ranks; integers toward zero."""
    whole = not (total.is_floating_point() or total.is_complex())
    return torch.div(total, size, rounding_mode="trunc" if whole else None)


def listed(tensors: Any) -> Tensors:
    """Return the tensors of a group, which may come from a generator, as a sequence.

    Raises:
        ConfigError: it is no group.
    """
    if type(tensors) is list or type(tensors) is tuple:
        return tensors
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        raise ConfigError(f"a group is a list of tensors, got one of type {type(tensors).__name__}; pass [tensor]")
    return list(tensors)


def require_tensors(*tensors: object) -> None:
    """Raise `UnsupportedBufferError` unless all are tensors."""
    for each in tensors:
        if not isinstance(each, torch.Tensor):
            raise UnsupportedBufferError(
                f"expected a torch tensor, got {type(each).__name__}; pass torch.as_tensor(...), or call the function "
                "of ringreduce itself, which takes NumPy arrays, too"
            )


def without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it can be, because calls that are repeated with the same object are fastest."""
    require_tensors(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Tell autograd that a collective wrote into a tensor, so that it refuses to use a saved value that is gone."""
    try:
        torch.autograd.graph.increment_version(tensor)
    except RuntimeError:
        if not tensor.is_inference():  # those have no version, and asking for it first takes a microsecond
            raise
    return tensor
