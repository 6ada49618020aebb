"""Calls: collectives on lists of arrays, as values that compiled programs hold, carried out on the host's memory."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary, ref

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.sums.prefix import prefix
from ringreduce.common.call_sites import place_of, program_stack
from ringreduce.common.errors import ConfigError, MismatchError
from ringreduce.common.recent import Recent
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.engine.coordinator import fuse
from ringreduce.jax import ffi
from ringreduce.jax.ordering import put_in_order
from ringreduce.jax.private import before_compiling, keep_in_loops, trace_state
from ringreduce.jax.steps import StepReduction, steps_of
from ringreduce.runtime import count as tell
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.error_text import raise_unseen
from ringreduce.training.binding.identity import Identity, name_in
from ringreduce.training.calls.requests import Request, RequestBuilder, in_words
from ringreduce.transport.point_to_point import PROC_NULL

Host = npt.NDArray[Any]
Shape = tuple[int, ...]

#: So many requests of compiled programs are kept, of arrays up to this size.
_KEPT = 128
_LARGEST_REPEATED_NBYTES = 64 << 10

#: Compiled programs reduce so many buckets of the settings at a time: what an operation takes besides moving bytes.
#: Gradients of a step are reduced in place. Other arrays may be arguments of the program, of which XLA would make
#: copies for that: their results have memory of their own, so there are fewer at a time. By default these are 16 and 12
#: MiB: of 32 MiB, XLA would get memory from the system and give it back each time, with 9 700 page faults a step.
_BUCKETS_IN_PLACE = 2
_BUCKETS_BESIDE = 1.5

#: The process sets that calls have named, by their ranks.
_sets: dict[tuple[int, ...] | None, ProcessSet] = {None: global_process_set}


def ranks_of(process_set: ProcessSet) -> tuple[int, ...] | None:
    """Return how a `CompiledCall` names a process set."""
    ranks = None if process_set is global_process_set else tuple(process_set.ranks or ())
    _sets[ranks] = process_set
    return ranks


class CompiledCall(NamedTuple):
    """A collective on a list of arrays, as values that a compiled program can hold.

    Attributes:
        kind: of collective.
        name: of the operation; None: it has none.
        ranks: of the process set; None: all.
        op: how to reduce.
        prescale: multiplies what goes in.
        postscale: multiplies what comes out.
        wire: the format in which floats travel between nodes.
        root: the rank of the set that sends or receives; -1: there is none.
        peers: of a message, the ranks of the set that it goes to and comes from; None: no rank.
        tag: of a message.
        function: the key of a function of `FUNCTIONS` or `LISTS`, which carries out the collective.
        part: of a collective on more arrays, in words.
        step: whose gradients it reduces: the key of `ringreduce.jax.steps.Steps`, and the name of the operation, or of
            the first of several; of a program that has several calls of these, also which one it is, in words. None:
            these are no gradients.
        first, last: whether it is the first or the last part of the step.
        identity: an `Identity`, by which operations are named before ``name``; None: they have none.
    """

    kind: str
    name: str | None
    ranks: tuple[int, ...] | None
    op: str = SUM.value
    prescale: float = 1.0
    postscale: float = 1.0
    wire: str | None = None
    root: int = -1
    function: str | None = None
    part: str = ""
    step: Sequence[str] | None = None
    first: bool = True
    last: bool = True
    peers: Sequence[int | None] = (None, None)
    tag: int = 0
    identity: Identity | None = None

    @property
    def operation(self) -> str | None:
        """The name of the operation among the ranks there are now."""
        process_set = _sets[self.ranks]
        if self.identity is None or not (process_set.included() and process_set.connected):
            return self.name
        named = name_in(process_set.engine, self.identity)
        return named if self.name is None else f"{named}, {self.name}"


#: Functions of programs that were traced in this process, by text that is the same in all processes. They take arrays,
#: those for the results, whether sums are divided by the number of ranks, and the ranks; and return the results.
FUNCTIONS: dict[str, Callable[[Sequence[Host], Sequence[Host], bool, Communicator], Sequence[Host]]] = {}

#: The kind of calls that a function of `LISTS` carries out, with state of this process; its key is
#: `CompiledCall.function`.
LISTED = "listed"


class Listed(Protocol):
    """Reduces arrays with what this process keeps."""

    def carry_out(
        self, name: str | None, sources: Sequence[Host], targets: Sequence[Host], others: Callable[[], ffi.XlaArrays]
    ) -> None:
        """Reduce arrays into others, as the compiled program's operation of a name, which has others beside them."""


#: By a key that is the same in all processes. Transformations keep them alive.
LISTS: WeakValueDictionary[str, Listed] = WeakValueDictionary()

#: The kind of calls of the backward pass of a broadcast: a total at the root, zeros on other ranks.
BROADCAST_GRADIENT = "gradient of a broadcast"

#: Kinds whose results have the shapes of what goes in.
ALIKE = ("allreduce", "broadcast", "compressed allreduce", BROADCAST_GRADIENT, "reduce", "scan")

#: Kinds whose results may have other shapes on the root than on other ranks.
_ROOTED = ("gather", "scatter")

#: The kind of calls that are messages between two ranks, which have no names.
MESSAGE = "message"


def request_of(call: CompiledCall, sources: Sequence[Host], targets: Sequence[Host] | None = None) -> Request:
    """Return a collective of arrays of the host, whose results are new arrays, or ``targets``."""
    with RequestBuilder(call.kind, call.operation, _sets[call.ranks]) as prepare:
        scales = call.prescale, call.postscale
        if call.kind == "allreduce" and targets is None:
            return prepare.allreduce_new(sources, call.op, *scales, call.wire)
        outs: Sequence[Any] = targets or []
        if targets is None:
            outs = prepare.new_like(sources) if call.kind in ALIKE else [None] * len(sources)
        if call.kind == "allreduce":
            return prepare.allreduce(sources, outs, call.op, *scales, wire=call.wire, part=call.part)
        if call.kind == "reducescatter":
            return prepare.reducescatter(sources, ReduceOp(call.op), *scales, partial(_stored, outs))
        compared = sources if targets is None or call.kind in _ROOTED else targets
        any_rows = targets is None and call.kind in ("allgather", "gather")
        text = call.function or in_words(*compared, any_rows=any_rows)
        run = partial(_run, call, sources, outs)
        return prepare.call(f"{call.kind}({call.op}, root {call.root}, {text})", run, sources, targets or ())


def _stored(outs: Sequence[Host | None], made: Sequence[Host]) -> Sequence[Host]:
    for out, result in zip(outs, made, strict=True):
        if out is not None:
            np.copyto(out, result)
    return made


def _run(call: CompiledCall, sources: Sequence[Host], outs: Sequence[Any], ranks: Communicator) -> Sequence[Host]:
    """Carry out a call that is no request of ready make; ``outs`` are for the results, None: these are new arrays."""
    if call.function is not None:
        return FUNCTIONS[call.function](sources, outs, call.op == AVERAGE.value, ranks)
    run = _BLOCKING[call.kind]
    return [run(ranks, call, source, out) for source, out in zip(sources, outs, strict=True)]


def _total_or_zeros(ranks: Communicator, call: CompiledCall, source: Host, out: Any) -> Host:
    if ranks.reduce(source, call.root, call.op, out=out) is None:
        out.fill(0)
    return out  # type: ignore[no-any-return]


def _or_own(made: Host | None, source: Host, out: Any) -> Host:
    """Return what a root has got; on other ranks, which got None, their own array."""
    if made is not None:
        return made
    if out is None:
        return source
    np.copyto(out, source)
    return out  # type: ignore[no-any-return]


def _messages(call: CompiledCall) -> Communicator:
    """Return the communicator of the ranks of a call that has messages, unlike that of the engine."""
    return _sets[call.ranks].communicator


def exchange(call: CompiledCall, sent: Sequence[Host], received: Sequence[Host]) -> None:
    """Send and receive arrays of the host, in pairs as long as there are two.

    They are copied: a transfer that has failed may still use its arrays, which XLA gives to others.
    """
    failed = None
    for pair in zip_longest(sent, received):
        try:
            _exchange_pair(call, *pair)
        except MismatchError as error:  # The others go on: their arrays would be taken for those of later calls.
            failed = failed or error
    if failed is not None:
        raise failed


def _exchange_pair(call: CompiledCall, given: Host | None, taken: Host | None) -> None:
    ranks = _messages(call)
    dest, source = (PROC_NULL if peer is None else peer for peer in call.peers)
    if taken is None:
        assert given is not None
        ranks.send(given.copy(), dest, call.tag)
        return
    came = taken.copy() if source is PROC_NULL else np.empty_like(taken)
    if given is None:
        ranks.recv(came, source, call.tag)
    else:
        ranks.sendrecv(given.copy(), dest, came, source, call.tag)
    np.copyto(taken, came)


#: How collectives that are no reductions to all ranks are made of one array, by kind.
_BLOCKING: dict[str, Callable[[Communicator, CompiledCall, Host, Any], Host]] = {
    "allgather": lambda ranks, call, source, out: ranks.allgather(source, out=out),
    "alltoall": lambda ranks, call, source, out: ranks.alltoall(source, out=out),
    "broadcast": lambda ranks, call, source, out: ranks.broadcast(source, call.root, out=out),
    "gather": lambda ranks, call, source, out: _or_own(ranks.gather(source, call.root, out=out), source, out),
    BROADCAST_GRADIENT: _total_or_zeros,
    "reduce": lambda ranks, call, source, out: _or_own(ranks.reduce(source, call.root, call.op, out=out), source, out),
    "scan": lambda ranks, call, source, out: prefix(_messages(call), source, call.op, out, inclusive=True),
    "scatter": lambda ranks, call, source, out: ranks.scatter(source, call.root, out=out),
}


# ---- in compiled programs ----

#: The traces that are under way, each with its number of collectives, which numbers those of one line.
_traces: deque[tuple[Any, list[int]]] = deque(maxlen=16)


_AT_ONCE = trace_state(convention="ringreduce")


def is_tracing() -> bool:
    """Return whether a program is being traced, whatever it does with arrays."""
    return bool(trace_state(convention="ringreduce") != _AT_ONCE)


def name_here(kind: str, leaves: Sequence[Any]) -> str | None:
    """Return the name of a collective that the program gave none: None, unless the arrays are those of a trace.

    Then it is the line of the program, and the collective's number in the trace.
    """
    if not is_traced(leaves):
        return None
    trace = trace_state(convention="ringreduce")
    count = next((count for other, count in _traces if other == trace), None)
    if count is None:
        count = [0]
        _traces.append((trace, count))
    count[0] += 1
    place = place_of(program_stack(1)).rpartition("/")[2]
    return f"{kind} {count[0]} compiled at {place}"


def is_traced(leaves: Sequence[Any]) -> bool:
    """Return whether some arrays are those of a trace."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def run_compiled(
    call: CompiledCall,
    shapes: Sequence[Shape],
    adjoint: Callable[[Sequence[Any]], Sequence[Any]],
    leaves: Sequence[Any],
    wrap: Callable[[Any], Any] = lambda function: function,
    step: StepReduction | None = None,
    *,
    always: bool = False,
) -> Sequence[Any]:
    """Return what a call of the compiled program makes of arrays.

    Args:
        call: what to do.
        shapes: of the results, whose dtypes are those of the arrays.
        adjoint: takes the gradients of the results, and returns those of the arrays.
        leaves: the arrays.
        wrap: changes how the function that calls is transformed.
        step: whose gradients the arrays are; the first of them, if there are others.
        always: as for `ffi.call`; no allreduce.
    """
    beside: Sequence[Any] = ()
    place = call.name
    if place is None:
        step = None
    elif step is not None:
        call = call._replace(step=(step.owner.key, place))
        beside = step.arrays
        step.owner.note(place, step)
    if call.kind == "allreduce":
        function = partial(_in_buckets, call, shapes, step)
    else:
        function = partial(_at_once, call, shapes, step, always)
    run = jax.custom_vjp(wrap(function))
    dtypes = [leaf.dtype for leaf in leaves]

    def backward(_: None, cotangents: Sequence[Any]) -> Sequence[Any]:
        # Integers have no gradients (float0); what becomes of the zeros in their place, JAX ignores.
        given = [
            jnp.zeros(shape, dtype) if each.dtype == jax.dtypes.float0 else each
            for shape, dtype, each in zip(shapes, dtypes, cotangents, strict=True)
        ]
        return *adjoint(given), *(None for _ in beside)

    run.defvjp(lambda *given: (run(*given), None), backward)
    return run(*leaves, *beside)  # type: ignore[no-any-return]


def _at_once(
    call: CompiledCall, shapes: Sequence[Shape], step: StepReduction | None, always: bool, *arrays: Any
) -> Sequence[Any]:
    batched = "broadcast_all" if call.kind in ALIKE else "sequential"
    leaves = arrays[: len(shapes)]
    beside = arrays[len(shapes) :]
    if step is not None:
        step.owner.note_part(str(call.name), call.part, step.names())
    return ffi.call(json.dumps(call), leaves, shapes, batched=batched, after=beside, always=always)


def _in_buckets(call: CompiledCall, shapes: Sequence[Shape], step: StepReduction | None, *arrays: Any) -> Sequence[Any]:
    """Reduce one bucket of arrays after the other, the last arrays first: in the order of most backward passes.

    XLA then has memory for few gradients at a time, which it uses again and again, and not for all of them, which it
    would get anew from the system in every step. All ranks have the buckets in the same order, as a bucket waits for a
    result of the one before.
    """
    leaves = arrays[: len(shapes)]
    after = list(arrays[len(shapes) :])
    numbers = list(reversed(range(len(leaves))))
    items = [(None, leaves[number].size * leaves[number].dtype.itemsize) for number in numbers]
    in_place = step is not None
    at_once = _BUCKETS_IN_PLACE if in_place else _BUCKETS_BESIDE
    buckets = fuse(items, int(at_once * _sets[call.ranks].communicator.config.bucket_nbytes))
    made = list(leaves)
    names = [] if step is None else step.names()
    for count, bucket in enumerate(buckets):
        members = [numbers[index] for index in bucket]
        name = call.name if count == 0 else f"{call.name}, bucket {count}"  # The first one compares how many there are.
        part = call._replace(name=name, part=f", bucket {count} of {len(buckets)}" if len(buckets) > 1 else "")
        if step is not None:
            part = part._replace(first=count == 0, last=count == len(buckets) - 1)
            step.owner.note_part(str(call.name), part.part, [names[number] for number in members])
        given = [leaves[member] for member in members]
        own = [shapes[member] for member in members]
        results = ffi.call(json.dumps(part), given, own, batched="broadcast_all", in_place=in_place, after=after)
        for number, result in zip(members, results, strict=True):
            made[number] = result
        after = sorted(results, key=lambda each: (each.size == 0, each.size))[:1]
    return made


class _Repeated(NamedTuple):
    """A small request of a compiled program, on memory of its own: looking at other memory takes longer than a copy.

    Attributes:
        request: it can be carried out again and again.
        sources, targets: its arrays.
    """

    request: Request
    sources: ffi.XlaArrays
    targets: ffi.XlaArrays

    @classmethod
    def of(cls, call: CompiledCall, arguments: ffi.XlaArrays, results: ffi.XlaArrays) -> _Repeated:
        into, targets = results.beside()
        given, sources = (into, targets) if call.kind == "allreduce" else arguments.beside()
        return cls(request_of(call, sources, targets), given, into)


#: Those that are not under way; the last used is the last.
_repeated = Recent[tuple[Any, ...], _Repeated](_KEPT)


def _handle(text: bytes, arguments: ffi.XlaArrays, results: ffi.XlaArrays, others: Callable[[], ffi.XlaArrays]) -> None:
    """Carry out a call of a compiled program."""
    raise_unseen()
    call = _read(text)
    if call.step is not None:
        _look(call, arguments, others)
    if call.kind == MESSAGE:
        exchange(call, others().views(), results.views())
        return
    if call.kind == LISTED:
        listed = LISTS.get(str(call.function))
        if listed is None:
            raise ConfigError("the transformation that this program was compiled with does not exist any more")
        listed.carry_out(call.operation, arguments.views(), results.views(), others)
        return
    if max(arguments.nbytes, results.nbytes) > _LARGEST_REPEATED_NBYTES:
        targets = results.views()
        request_of(call, targets if arguments == results else arguments.views(), targets).carry_out()
        return
    process_set = _sets[call.ranks]
    key = text, arguments.layout, results.layout, ref(process_set.engine) if process_set.connected else None
    repeated = _repeated.pop(key, None)  # Taken out, as other threads come here, too.
    if repeated is None:
        _repeated.make_room()
        repeated = _Repeated.of(call, arguments, results)
    arguments.copy_to(repeated.sources)
    repeated.request.carry_out()
    repeated.targets.copy_to(results)
    _repeated[key] = repeated


def _look(call: CompiledCall, arguments: ffi.XlaArrays, others: Callable[[], ffi.XlaArrays]) -> None:
    """Count a step, and look at what it is about to reduce, if anything is due."""
    assert call.step is not None
    if call.first:
        tell(steps=1)
    key, name, *which = call.step
    if (steps := steps_of(key)) is not None:
        how: dict[str, Any] = {"first": call.first, "last": call.last, "which": "".join(which)}
        steps.look(name, lambda: str(call.operation), call.part, arguments.views, lambda: others().views(), **how)


def _numbered(texts: Sequence[str]) -> list[str]:
    """Number those of the calls of a program that have the same name, as places that use one function have.

    How many there are is a part of the names: some ranks may have left out calls, of which others make use.
    """
    calls = [_read(text.encode()) for text in texts]
    names = Counter((call.name, call.ranks) for call in calls if call.first and call.kind != MESSAGE)
    seen: Counter[Any] = Counter()
    which: dict[str | None, str] = {}  # By place, the names of the further parts of a step.
    made = []
    for call, text in zip(calls, texts, strict=True):
        if call.kind == MESSAGE:
            made.append(text)
            continue
        name = call.name, call.ranks
        place = call.name if call.step is None else call.step[1]
        if call.first:
            seen[name] += 1
            which[place] = f", call {seen[name]} of {names[name]}" if names[name] > 1 else ""
        words = which.get(place, "")
        step = None if call.step is None else (*call.step, words)
        made.append(json.dumps(call._replace(name=f"{call.name}{words}", step=step)))
    return made


@lru_cache(4096)
def _read(text: bytes) -> CompiledCall:
    kind, name, ranks, *rest, identity = json.loads(text)
    of = None if identity is None else Identity(identity[0], tuple(identity[1]))
    return CompiledCall(kind, name, None if ranks is None else tuple(ranks), *rest)._replace(identity=of)


ffi.register(_handle)
keep_in_loops(ffi.TARGET)
before_compiling(lambda module: put_in_order(module, ffi.TARGET, ordered=ffi.ORDERED, numbered=_numbered))
# Else a compiled program returns before it has run, and JAX raises its failure only where a result is read. JAX looks
# at this when it makes its first array; if there is one already, the next collective raises it (`raise_unseen`).
jax.config.update("jax_cpu_enable_async_dispatch", False)
