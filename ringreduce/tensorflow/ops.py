"""Collectives on tensors, by Horovod's names.

They run at once, in a `tf.function`, or in a session of TensorFlow 1. Gradients flow through them: those of the sum of
all ranks' losses, as the chain rule gives them, or by Horovod's conventions (`ringreduce.common.conventions`). Data
goes through host memory; results of an eager call on a GPU are on the CPU.

A collective of a graph that has no name gets one: its number in the graph, and the name of the function. Graphs have to
be equal on all ranks. In a graph of TensorFlow 1 collectives run in the order in which they were made, so that a
session runs those before the one that it needs, too.

All functions raise what those of `ringreduce.torch.ops` raise; see `ringreduce.tensorflow.calls` for TensorFlow's
errors. Common arguments:

    name: matches it with the other ranks' calls; must agree.
    process_set: the ranks that take part.
    device_dense, device_sparse, ignore_name_scope: without meaning here, taken for Horovod's sake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce import runtime
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.tensorflow.calls import (
    Host,
    Spec,
    any_rows,
    are_recorded,
    entry,
    run,
    tensor_of,
    tensors_of,
    traced_name,
)
from ringreduce.tensorflow.compression import Compression
from ringreduce.tensorflow.numbers import asked
from ringreduce.tensorflow.slices import added_up, places_of, times
from ringreduce.training.binding.host import HostArrays
from ringreduce.training.calls import handles
from ringreduce.training.calls.differentiable import Differentiable
from ringreduce.training.calls.requests import Request, RequestBuilder
from ringreduce.training.compression.tensors import wire_of
from ringreduce.training.options.options import Op, chosen_op

_Tensors = Sequence[Any]


class _Zeros(HostArrays):
    def zeros_like(self, array: Any) -> Any:
        with tf.control_dependencies([array]):  # A session would else run nothing of it, on this rank alone.
            return tf.zeros_like(array)


_ZEROS = _Zeros()


class _Collectives(Differentiable):
    """Collectives on tensors that gradients flow through.

    Numbers of rows are tensors here: a graph is made before they are known, and may run with others each time.
    """

    def allgather(self, values: _Tensors) -> _Tensors:
        def adjoint(back: Differentiable, grads: _Tensors) -> _Tensors:
            rows = tf.stack([tf.shape(value)[0] for value in values])
            counts = _Collectives(_ZEROS, f"rows of {self._name}", self._process_set)
            starts = tf.reduce_sum(counts.allgather([rows[None]])[0][: self._process_set.rank()], 0)
            totals = back.allreduce(grads, self._conventions.gradient_op)
            return [total[starts[n] : starts[n] + rows[n]] for n, total in enumerate(totals)]

        return self._flow(
            "allgather", lambda prepare, arrays: prepare.allgather(arrays, list), adjoint=adjoint, values=values
        )

    def _times(self, value: Any, factor: float) -> Any:
        return times(value, factor)

    def exchange(self, tensor: Any, splits: Any) -> _Tensors:
        """Send rows to each rank, so many as a tensor says, None: equal parts; return what came, and how many rows."""

        def prepared(prepare: RequestBuilder, arrays: _Tensors) -> Request:
            rows = prepare.row_counts(arrays[0], None if splits is None else arrays[1])
            return prepare.alltoall(arrays[0], rows, lambda received, counts: [received, np.array(counts, np.int32)])

        def adjoint(back: Differentiable, grads: _Tensors) -> _Tensors:
            assert isinstance(back, _Collectives)
            return [back.exchange(grads[0], counts)[0], None][: len(values)]

        values = [tensor] if splits is None else [tensor, tf.cast(splits, tf.int64)]
        specs = [(tensor.dtype, any_rows(tensor)), (tf.int32, [self._process_set.size()])]
        received, counts = self._flow("alltoall", prepared, adjoint=adjoint, values=values, specs=specs)
        return received, counts

    def _flow(
        self,
        kind: str,
        prepared: Callable[[RequestBuilder, _Tensors], Request],
        adjoint: Callable[[Differentiable, _Tensors], _Tensors],
        values: _Tensors,
        specs: Sequence[Spec] | None = None,
        **how: Any,
    ) -> _Tensors:
        if self._name is None:
            self._name = traced_name(kind)

        def carry_out(arrays: list[Host]) -> Sequence[Host]:
            with RequestBuilder(kind, self._name, self._process_set) as prepare:
                request = prepared(prepare, arrays)
            made = request.carry_out()
            return made if isinstance(made, list) else [made]

        def found_specs() -> Sequence[Spec]:
            elementwise = kind in ("allreduce", "broadcast")
            return specs or [(value.dtype, value.shape if elementwise else any_rows(value)) for value in values]

        def recorded(*given: Any) -> Any:
            results = run(carry_out, given, found_specs)
            back = self._back()
            return results, lambda *grads: adjoint(back, list(map(_as, grads, results)))

        return (
            list(tf.custom_gradient(recorded)(*values)) if are_recorded(values) else run(carry_out, values, found_specs)
        )


def _as(grad: Any, result: Any) -> Any:
    """Return the gradient of a result, which TensorFlow may give in another form or dtype, as it should be."""
    return tf.zeros_like(result) if grad is None else tf.cast(tf.convert_to_tensor(grad), result.dtype)


# ---- what programs call ----


@entry
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce tensors over all ranks, element by element, into a new one. Collective.

    Args:
        tensor: a tensor, a variable, or what can become one, of any shape; shape and dtype must agree on all ranks. Or
            `tf.IndexedSlices`, of which the ranks may have different numbers: they are gathered, and rows of equal
            index become one. By Horovod's conventions they do not, and averages of integers are floats.
        average: deprecated; use ``op``.
        compression: of `Compression`, but not ``powersgd`` and ``topk``; must agree.
        op: `Average` (also if None), `Sum`, `Min`, `Max`, `Product`, `Adasum` or `ReproducibleSum`; must agree.
            Integers are averaged toward zero. Gradients flow through `Average`, `Sum` and `ReproducibleSum`.
        prescale_factor: multiplies what goes in; must agree.
        postscale_factor: multiplies what comes out; must agree.

    Raises:
        NotImplementedError: `tf.IndexedSlices` are to be reduced otherwise than by `Average` or `Sum`, or scaled.
    """
    factors = prescale_factor, postscale_factor
    how = device_dense, device_sparse, compression, op, *factors, process_set, ignore_name_scope, name
    return grouped_allreduce([tensor], average, *how)[0]


@entry
def grouped_allreduce(
    tensors: _Tensors,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> _Tensors:
    """Reduce several tensors as one operation; see `allreduce`. Collective."""
    if not tensors:
        return tensors
    factors = prescale_factor, postscale_factor
    with RequestBuilder("allreduce", name, process_set):
        chosen = chosen_op(op, average)
        wire = wire_of(compression)
        slices = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
        if slices and (chosen not in (AVERAGE, SUM) or factors != (1.0, 1.0)):
            raise NotImplementedError("tf.IndexedSlices are averaged or summed, and not scaled: make them dense first")
        dense = [tensor_of(tensor, n) for n, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
        pairs = list(map(compression.compress, dense))
    gathered = iter(_gather_slices(slices, chosen, name=name, process_set=process_set) if slices else [])
    sent = [tensor for tensor, _ in pairs]
    reduced = _Collectives(_ZEROS, name, process_set).allreduce(sent, chosen, *factors, wire) if sent else []
    decompressed = (compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True))
    return [next(gathered if isinstance(tensor, tf.IndexedSlices) else decompressed) for tensor in tensors]


def _gather_slices(slices: Sequence[Any], op: Op, name: str | None, process_set: ProcessSet) -> list[Any]:
    parts = [*(each.values for each in slices), *(each.indices for each in slices)]
    gathered = grouped_allgather(parts, name and f"{name}, slices", process_set=process_set)
    values = gathered[: len(slices)]
    indices = gathered[len(slices) :]
    size = asked(process_set.size) if op is AVERAGE else 1
    if runtime.config().conventions.adds_up_slices:

        def find(arrays: list[Host]) -> list[Host]:
            return [each for array in arrays for each in places_of(array)]

        found = run(find, indices, lambda: [(dtype, [None]) for each in indices for dtype in (each.dtype, tf.int64)])
        indices = found[::2]
        rows = zip(values, found[1::2], map(tf.size, indices), strict=True)
        values = [added_up(each, places, count=count, divisor=size) for each, places, count in rows]
    elif op is AVERAGE:
        values = [value / tf.cast(size, value.dtype) for value in values]
    return [
        tf.IndexedSlices(*each) for each in zip(values, indices, (each.dense_shape for each in slices), strict=True)
    ]


@entry
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the ranks' tensors along the first dimension, in rank order. Collective.

    Args:
        tensor: at least one dimension. The first may differ between ranks; the others and the dtype must agree.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@entry
def grouped_allgather(
    tensors: _Tensors,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _Tensors:
    """Gather several tensors as one operation; see `allgather`. Collective."""
    with RequestBuilder("allgather", name, process_set):
        tensors = tensors_of(tensors)
    return _Collectives(_ZEROS, name, process_set).allgather(tensors)


@entry
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's tensor. Collective.

    Args:
        tensor: any shape; shape and dtype must agree on all ranks, values count at the root only.
        root_rank: the sender, as a rank of the world; must agree.
    """
    with RequestBuilder("broadcast", name, process_set):
        (tensor,), root = tensors_of([tensor]), process_set.rank_of(root_rank)
    return _Collectives(_ZEROS, name, process_set).broadcast(tensor, root)


@entry
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of one's tensor to every rank, and get one's part of theirs. Collective.

    Args:
        tensor: at least one dimension; all but the first must agree on all ranks, and the dtype.
        splits: rows for rank 0, 1, ... of the set; may differ between ranks. None: equal parts.

    Returns:
        What the ranks sent here, in rank order; with ``splits`` also how many rows came from each (int32).
    """
    with RequestBuilder("alltoall", name, process_set):
        (tensor,) = tensors_of([tensor])
    received, counts = _Collectives(_ZEROS, name, process_set).exchange(tensor, splits)
    return received if splits is None else (received, counts)


@entry
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op = AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce tensors over all ranks and return this rank's part. Collective.

    Args:
        tensor: at least one dimension, cut along the first as `numpy.array_split` does; shape and dtype must agree.

    The other arguments are those of `allreduce`; there is no `Adasum` here, and no fp8, int8 or int4.
    """
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], device_dense, compression, op, process_set, *factors, name=name)[0]


@entry
def grouped_reducescatter(
    tensors: _Tensors,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Op = AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
) -> _Tensors:
    """Reduce and scatter several tensors as one operation; see `reducescatter`. Collective."""
    if not tensors:
        return tensors
    with RequestBuilder("reducescatter", name, process_set):
        if (wire := wire_of(compression)) is not None:
            raise ConfigError(f"reducescatter does not travel in {wire}; use Compression.none, fp16 or bf16")
        sent, contexts = zip(*map(compression.compress, tensors_of(tensors)), strict=True)
    parts = _Collectives(_ZEROS, name, process_set).reducescatter(sent, op, prescale_factor, postscale_factor)
    return list(map(compression.decompress, parts, contexts))


@entry
def join() -> Any:
    """Say that this rank has no more data, and wait until all ranks have; see
    `ringreduce.training.calls.handles.join`.
    """
    return run(lambda _: [np.array(handles.join(), np.int32)], [], lambda: [(tf.int32, [])])[0]


def cuda_built() -> bool:
    """Return whether TensorFlow is built for CUDA. What is on a GPU goes through the host."""
    return bool(tf.test.is_built_with_cuda())


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow has a GPU in this process; the arguments are taken for Horovod's sake."""
    return bool(tf.config.list_physical_devices("GPU"))
