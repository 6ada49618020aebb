"""Torch's private parts; no other module of this binding touches any.

Each function says what it touches, why nothing public does the same, and what is done without it. All were tried with
the versions in `TRIED`. Where a new version lacks a part, `doctor` names the function, and only that function is to
be changed. What is called for each tensor of a step is bound once, when this module is imported.
"""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from operator import attrgetter, methodcaller
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler
from torch.utils.hooks import RemovableHandle

from ringreduce.common.errors import ConfigError
from ringreduce.common.private_parts import Part, lacking, mentions

if TYPE_CHECKING:
    from torch.nn.modules import batchnorm

    BatchNorm = batchnorm._BatchNorm
else:
    #: What all of torch's batch normalisations are, whatever its name is: `torch.nn` has its subclasses alone.
    BatchNorm = torch.nn.BatchNorm1d.__base__

#: The versions of torch with which all of this was tried; the tests run with the last one.
TRIED = ("2.13.0",)

_C: Any = torch._C
_profiler: Any = profiler


def _lacking(part: str, instead: str) -> ConfigError:
    return lacking(library="torch", version=torch.__version__, part=part, instead=instead)


# ---- tensors and their memory ----

#: Return the number of changes in place of a tensor, none of inference mode. Nothing public counts them. Without
#: ``_version`` it is always 0: writes of the program between two calls go unnoticed.
version_of: Callable[[torch.Tensor], int] = (
    attrgetter("_version") if hasattr(torch.Tensor, "_version") else lambda tensor: 0
)

#: Return the address of torch's C++ object for a storage, by which its users are counted. Nothing public tells it.
#: Without ``_cdata`` it is the address of its memory, which identifies it, too, and users cannot be counted.
storage_address: Callable[[Any], int] = (
    attrgetter("_cdata") if hasattr(torch.UntypedStorage, "_cdata") else methodcaller("data_ptr")
)

_counts_holders = hasattr(torch.UntypedStorage, "_cdata") and hasattr(_C, "_storage_Use_Count")

#: Return how many things, views and arrays of NumPy among them, hold the storage at a `storage_address`; Python's
#: counts of references do not know these. Without ``_storage_Use_Count`` it is always 0: only holders of the tensor
#: itself are noticed, and a storage that an operation has used is never resized again.
holders_at: Callable[[int], int] = _C._storage_Use_Count if _counts_holders else lambda address: 0

_STORAGE_NBYTES = 80  # of torch's C++ object for a storage, as far as its flags go at most


def references(tensor: torch.Tensor) -> int:
    """Return how many things hold a tensor or, as far as `holders_at` knows, a view of it of any kind.

    The number has a constant in it: compare it with an earlier one of the same tensor.
    """
    return sys.getrefcount(tensor) + holders_at(storage_address(tensor.untyped_storage()))


def forbid_resizing(storage: Any) -> ctypes.c_bool | None:
    """Let torch refuse to resize a storage in host memory; return the flag that allows it again once it is True.

    Writes to torch's C++ object: Python can forbid it, by showing the storage to NumPy, and not allow it again. Without
    a flag that is plain to see, returns None: the storage is never resized again.
    """
    offset = _resizable_offset()
    if offset is None:
        _show_to_numpy(storage)
        return None
    flag = ctypes.c_bool.from_address(storage_address(storage) + offset)
    flag.value = False
    return flag


def _show_to_numpy(storage: Any) -> None:
    """Let NumPy see a storage, which torch never resizes again then."""
    torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


@cache
def _resizable_offset() -> int | None:
    """Return where in its object torch keeps whether a storage can be resized; None if that is not plain to see."""
    if not _counts_holders:  # then nobody can say when it may be allowed again
        return None
    storage: Any = torch.empty(1, device="cpu").untyped_storage()
    address = storage_address(storage)
    before = ctypes.string_at(address, _STORAGE_NBYTES)
    _show_to_numpy(storage)
    after = ctypes.string_at(address, _STORAGE_NBYTES)
    changed = [index for index, pair in enumerate(zip(before, after, strict=True)) if pair == (1, 0)]
    if len(changed) != 1:
        return None
    ctypes.c_bool.from_address(address + changed[0]).value = True
    return changed[0] if storage.resizable() else None


def raw_entries(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices, a column for each entry, and the values of a sparse COO tensor, as it has them.

    By ``_indices`` and ``_values``: ``indices`` and ``values`` want a coalesced tensor. Without them it is coalesced,
    and entries of 16 bits that have one index are added up with 16 bits.
    """
    given: Any = tensor
    if hasattr(given, "_indices") and hasattr(given, "_values"):
        return given._indices(), given._values()
    whole = tensor.coalesce()
    return whole.indices(), whole.values()


def _copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _zero_each(targets: Sequence[torch.Tensor]) -> None:
    for target in targets:
        target.zero_()


#: Copy, or clear, many tensors in one call, which no public function does. Without them it is a call for each tensor.
copy_all: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object] = getattr(
    torch, "_foreach_copy_", _copy_each
)
zero_all: Callable[[Sequence[torch.Tensor]], object] = getattr(torch, "_foreach_zero_", _zero_each)


# ---- backward passes ----


def _no_end_of_pass(action: Callable[[], object]) -> None:
    instead = "average gradients by allreduce_ before step()"
    raise _lacking("torch.autograd.Variable._execution_engine", instead=instead)


#: What `current_pass` is outside of a pass, or where passes cannot be told apart.
NO_PASS = -1

#: Return the number of the backward pass in which this thread is. Nothing public tells passes apart. Without
#: ``_current_graph_task_id`` it is always `NO_PASS`: a pass that an exception ends counts with the next one.
current_pass: Callable[[], int] = getattr(_C, "_current_graph_task_id", lambda: NO_PASS)

#: Call a function at the end of the backward pass in which this thread is. Nothing public does; torch's own
#: data-parallel training uses it. Without ``_execution_engine`` it raises ConfigError.
at_end_of_pass: Callable[[Callable[[], object]], object] = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "queue_callback", _no_end_of_pass
)

#: What runs a backward pass, and what evaluates a node that is written in Python.
_RUN = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
_evaluate: Any = getattr(getattr(torch.autograd.function, "BackwardCFunction", None), "apply", None)
_EVALUATE = getattr(_evaluate, "__code__", None)


def following_in_outer_pass() -> list[Any] | None:
    """Return the nodes that follow the one of which the evaluation has made this thread's pass.

    Finds torch's functions on the stack: nothing public tells that one pass is made within another. Without
    ``_engine_run_backward``, passes within others count like those; without ``BackwardCFunction.apply``, the end of the
    outer one is unknown.

    Returns:
        None if the pass was not made within another one. Empty if it is not known which node has made it.
    """
    inside = False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _RUN and inside:
            return []
        if frame.f_code is _EVALUATE and inside:
            return [node for node, _ in frame.f_locals["self"].next_functions if node is not None]
        inside = inside or frame.f_code is _RUN
        frame = frame.f_back
    return None


def is_called_by_autograd() -> bool:
    """Return whether the caller's caller is torch's C++ in a backward pass, as it is where DDP communicates.

    By the stack, as nothing public tells. Without ``_engine_run_backward`` this is known only on autograd's own
    threads: DDP's hook for float16 fails on the others.
    """
    try:
        frame = sys._getframe(2)
    except ValueError:  # a thread of autograd's own
        return True
    return frame.f_code is _RUN


def call_first(handle: RemovableHandle) -> None:
    """Let a hook be called before those of the program: after additions to a gradient, where these may make a step, or
    after a step, where they may read what other ranks have updated.

    Reorders what ``hooks_dict_ref`` refers to; torch has no order to ask for. Without it, hooks are called in the order
    in which they were registered: a program must register its own after the optimizer is wrapped, or after a step.
    """
    hooks: dict[int, Any] | None = getattr(handle, "hooks_dict_ref", lambda: None)()
    if hooks is not None and handle.id in hooks:
        later = {number: hook for number, hook in hooks.items() if number != handle.id}
        for number in later:
            del hooks[number]
        hooks.update(later)


# ---- optimizers ----

#: Return the frame so many calls above.
frame_above: Callable[[int], FrameType] = sys._getframe

#: The method in which a GradScaler, or a subclass of it, reads an optimizer's gradients.
_UNSCALING = "_unscale_grads_"
_NO_SCALER = "train in bfloat16, without a GradScaler"
_has_unscaling = hasattr(torch.amp.GradScaler, _UNSCALING)


def scaler_of(caller: FrameType) -> torch.amp.GradScaler | None:
    """Return the GradScaler that reads gradients in a frame; None: there is none.

    By the name of its method: optimizers are not told who asks for their parameters. Without a method of that name,
    each method of a GradScaler counts that asks for them.
    """
    code = caller.f_code
    if (code.co_name != _UNSCALING and _has_unscaling) or not code.co_argcount:
        return None
    scaler = caller.f_locals.get(code.co_varnames[0])
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def scaler_state(scaler: torch.amp.GradScaler, optimizer: int) -> dict[str, Any]:
    """Return what a GradScaler knows, until it has made the step, of the optimizer with this ``id``.

    Nothing public tells whether it has looked for overflows yet.

    Raises:
        ConfigError: this version has no ``_per_optimizer_states``.
    """
    states: Mapping[int, dict[str, Any]] | None = getattr(scaler, "_per_optimizer_states", None)
    if states is None:
        raise _lacking("GradScaler._per_optimizer_states", instead=_NO_SCALER)
    return states[optimizer]


def has_looked(state: Mapping[str, Any]) -> bool:
    """Return whether the GradScaler of a `scaler_state` has looked for overflows since the last step.

    Raises:
        ConfigError: the state has no ``found_inf_per_device`` in this version.
    """
    if "found_inf_per_device" not in state:
        raise _lacking('_per_optimizer_states["found_inf_per_device"]', instead=_NO_SCALER)
    return bool(state["found_inf_per_device"])


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let schedules of learning rates know that an optimizer has made a step, of which its own `step` knows nothing.

    They look at ``_opt_called``. Without it they warn that the optimizer has made none.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


# ---- modules and other trees ----


def children_of(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module | None]]:
    """Return names and children of a module; a child of two names twice.

    ``named_children`` leaves out the second one. Without ``_modules`` it is taken for all.
    """
    found: Mapping[str, torch.nn.Module | None] = getattr(module, "_modules", None) or dict(module.named_children())
    return list(found.items())


def leaves(tree: Any) -> list[Any]:
    """Return what is in a tree of whatever containers torch knows.

    By ``torch.utils._pytree``, for which nothing public stands yet. Without it, mappings, lists and tuples are known.
    """
    known = getattr(getattr(torch.utils, "_pytree", None), "tree_leaves", None)
    return list(_leaves(tree) if known is None else known(tree))


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (Mapping, list, tuple)):
        for each in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _leaves(each)
    else:
        yield tree


# ---- compiler ----


_eval_frame: Any = None
with suppress(ImportError):
    _eval_frame = import_module("torch._C._dynamo.eval_frame")
_can_skip = all(hasattr(_eval_frame, name) for name in ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy"))


def skip_in_compiler(function: FunctionType, codes: Sequence[CodeType], *, callees: bool) -> None:
    """Let `torch.compile` leave a function as it is.

    By marks on the function, and by strategies for code, since torch 2.7: `torch.compiler.disable` returns a wrapper,
    which makes each call slower, and imports the compiler. Without these, or before, this does nothing: functions that
    communicate are not to be compiled there.

    Args:
        function: to be marked for functions that are compiled and call it.
        codes: its code, and that of functions that it makes, for when torch itself calls it.
        callees: whether it leaves what they call alone, too. If not, it compiles that by itself.
    """
    if not _can_skip:
        return
    action = _eval_frame._FrameAction
    how = _eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if callees else action.DEFAULT)
    vars(function)["_torchdynamo_disable"] = True
    vars(function)["_torchdynamo_disable_msg"] = "it has to do with other processes"
    for code in codes:
        _eval_frame.set_code_exec_strategy(code, how)


# ---- torch.distributed ----

_c10d: Any = getattr(_C, "_distributed_c10d", None)
#: The method by which DDP gives its reducer the work of a forward pass.
_KEEPING = "_set_forward_pass_work_handle"
_keep_work = getattr(getattr(_c10d, "Reducer", None), _KEEPING, None)
_work_of = getattr(_c10d, "_create_work_from_future", None)

_can_profile = (
    hasattr(profiler, "_is_profiler_enabled")
    and hasattr(profiler, "_disable_profiler")
    and hasattr(profiler.record_function, "_call_end_callbacks_on_future")
)


def is_profiling() -> bool:
    """Return whether torch's profiler is on, and spans can last as long as a collective.

    By ``_is_profiler_enabled``: nothing public tells. Without that, or what `end_span_with` and
    `before_profiler_stops` need, it is False: profiles do not show collectives.
    """
    return _can_profile and bool(_profiler._is_profiler_enabled)


def end_span_with(span: Any, future: Any) -> None:
    """Let a span of the profiler last until a future is done; called only while it `is_profiling`.

    By ``_call_end_callbacks_on_future``; the public way ends a span with a block of code.
    """
    span._call_end_callbacks_on_future(future)


def before_profiler_stops(action: Callable[[], object]) -> None:
    """Call a function from now on before the profiler stops; for this, torch has no hook.

    Puts another function into the place of ``_disable_profiler``. Without that nothing is shown, and this does nothing.
    """
    if not _can_profile:
        return
    disable = _profiler._disable_profiler

    def act_and_disable() -> Any:
        action()
        return disable()

    _profiler._disable_profiler = act_and_disable


def keep_whole_works(future_of: Callable[[Any], Any]) -> None:
    """Let DDP's C++ keep works of its own in place of those that are written in Python.

    C++ keeps its half of a work alone, and waits for ever in that of a class in Python once the other half is gone.
    Puts another function into the place of ``_set_forward_pass_work_handle`` of DDP's reducer, and makes works by
    ``_create_work_from_future``; there is no hook for it. Without them this does nothing, and
    ``Join(..., divide_by_initial_world_size=False)`` hangs.

    Args:
        future_of: returns the future of a work that is written in Python; None for any other.
    """
    if _keep_work is None or _work_of is None:
        return

    def keep(reducer: Any, work: Any, *others: Any) -> Any:
        return _keep_work(reducer, work if (future := future_of(work)) is None else _work_of(future), *others)

    setattr(_c10d.Reducer, _KEEPING, wraps(_keep_work)(keep))


# ---- loaders ----

_Iterator: Any = getattr(torch.utils.data.dataloader, "_BaseDataLoaderIter", None)


def get_batches_by(get: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Let programs get the batches of each ``DataLoader`` by a function from now on; for this, torch has no hook.

    Puts another function into the place of ``__next__`` of ``_BaseDataLoaderIter``. Without that this does nothing.

    Args:
        get: takes what was in that place and the iterator, and returns the next batch.
    """
    if _Iterator is None:
        return
    following = _Iterator.__next__

    @wraps(following)
    def get_next(iterator: Any) -> Any:
        return get(following, iterator)

    _Iterator.__next__ = get_next


def backend_class() -> Any:
    """Return the C++ class of which backends of process groups are instances; `torch.distributed.Backend` names them.

    Raises:
        ConfigError: this version has none.
    """
    found = getattr(_c10d, "Backend", None)
    if found is None:
        raise _lacking("torch._C._distributed_c10d.Backend", instead='call init_process_group("ringreduce") alone')
    return found


def is_open_group(group: Any) -> bool:
    """Return whether `torch.distributed` has made this process group, and not destroyed it.

    Nothing public lists them. Without ``_world`` it is False: torch's flight recorder does not watch the group.
    """
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return group in getattr(world, "pg_map", ())


def cpu_backend_of(group: Any) -> Any:
    """Return a process group's backend for tensors in host memory; nothing public does.

    Without ``_get_backend`` it is the group itself, as it is for a group that has no other backend.

    Raises:
        RuntimeError: it has none.
    """
    return group._get_backend(torch.device("cpu")) if hasattr(group, "_get_backend") else group


def accelerate_state() -> Mapping[str, Any] | None:
    """Return what Accelerate has found out of the job, empty before it has; None: it is not used here.

    By ``PartialState._shared_state``: to make a `PartialState` would let it find out. Without it, None: users are not
    warned that each rank would train alone. `PARTS` does not have it, as importing Accelerate takes seconds.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return getattr(state, "_shared_state", None)


# ---- what is there ----


def _knows_overflows() -> bool:
    return "found_inf_per_device" in scaler_state(torch.amp.GradScaler("cpu"), 0)


def _has(thing: Any, *names: str) -> Callable[[], bool]:
    return lambda: all(hasattr(thing, name) for name in names)


def _in_distributed(is_there: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: not torch.distributed.is_available() or is_there()


PARTS = (
    Part(
        "version_of", _has(torch.Tensor, "_version"), "writes to gradients between backward() and step() go unnoticed"
    ),
    Part("holders_at", lambda: _counts_holders, "gradients that the program has kept may be overwritten"),
    Part("forbid_resizing", lambda: _resizable_offset() is not None, "tensors of operations cannot be resized later"),
    Part("raw_entries", _has(torch.Tensor, "_indices", "_values"), "sparse gradients of 16 bits are less exact"),
    Part("copy_all", _has(torch, "_foreach_copy_", "_foreach_zero_"), "steps of many small gradients are slower"),
    Part("current_pass", _has(_C, "_current_graph_task_id"), "a pass that an exception ends counts with the next"),
    Part("at_end_of_pass", lambda: at_end_of_pass is not _no_end_of_pass, "DistributedOptimizer cannot be used"),
    Part(
        "following_in_outer_pass",
        lambda: None not in (_RUN, _EVALUATE),
        "passes that reentrant checkpoints make count as the program's",
    ),
    Part("is_called_by_autograd", lambda: _RUN is not None, "DDP's hooks that compress gradients fail"),
    Part(
        "call_first",
        lambda: hasattr(RemovableHandle(OrderedDict()), "hooks_dict_ref"),
        "steps in hooks of the program may take unreduced gradients",
    ),
    Part("scaler_of", lambda: _has_unscaling, "a GradScaler is recognised by less"),
    Part("scaler_state", _knows_overflows, "a GradScaler cannot be used"),
    Part(
        "mark_stepped",
        lambda: mentions(torch.optim.lr_scheduler.LRScheduler.step, "_opt_called"),
        "schedules of sharded optimizers warn without reason",
    ),
    Part(
        "children_of",
        lambda: hasattr(torch.nn.Identity(), "_modules"),
        "modules with two names are converted under one",
    ),
    Part(
        "leaves",
        lambda: hasattr(getattr(torch.utils, "_pytree", None), "tree_leaves"),
        "less is known of tensors within objects, in commits and traces",
    ),
    Part("BatchNorm", lambda: issubclass(torch.nn.SyncBatchNorm, BatchNorm), "batch normalisations are not converted"),
    Part("skip_in_compiler", lambda: _can_skip, "functions that communicate must not be compiled"),
    Part("is_profiling", lambda: _can_profile, "torch's profiles do not show collectives"),
    Part(
        "get_batches_by", lambda: _Iterator is not None, "waiting for a DataLoader counts as input only with loading()"
    ),
    Part(
        "keep_whole_works",
        _in_distributed(lambda: None not in (_keep_work, _work_of)),
        "DDP's Join that counts the ranks of each step hangs",
    ),
    Part(
        "backend_class",
        _in_distributed(_has(_c10d, "Backend")),
        "torch.distributed takes no second backend beside ringreduce",
    ),
    Part(
        "is_open_group",
        _in_distributed(lambda: hasattr(torch.distributed.distributed_c10d._world, "pg_map")),
        "torch's flight recorder does not watch process groups",
    ),
    Part(
        "cpu_backend_of",
        _in_distributed(lambda: hasattr(torch.distributed.ProcessGroup, "_get_backend")),
        "process groups with a second backend are not recognised",
    ),
)
