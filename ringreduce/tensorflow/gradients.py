"""Gradients: lists of tensors, `tf.IndexedSlices` or None that are reduced over the ranks, and tapes that do so."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ringreduce.common.errors import ConfigError
from ringreduce.common.finalizers import when_ended
from ringreduce.common.reduce_ops import AVERAGE
from ringreduce.runtime import config, global_process_set
from ringreduce.runtime import count as tell
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.tensorflow.calls import (
    Host,
    Spec,
    any_rows,
    entry,
    is_of_session,
    is_variable,
    made_as,
    name_of,
    reader_of,
    require_dense,
    run,
    traced_name,
    values_when,
)
from ringreduce.tensorflow.compression import Compression
from ringreduce.tensorflow.private import copy_of_tape, end_recording
from ringreduce.tensorflow.slices import added_up, each_index_once, places_of
from ringreduce.training.binding.framework import Advice
from ringreduce.training.binding.host import ArraySpec, HostMemory
from ringreduce.training.binding.identity import Identity, identity_of, name_in, numbers
from ringreduce.training.calls.parameters import in_words
from ringreduce.training.calls.requests import RequestBuilder
from ringreduce.training.compression import has_reducers
from ringreduce.training.compression.tensors import NoneCompressor
from ringreduce.training.data.shares import is_by_speed
from ringreduce.training.gradients.checks import CheckedModel
from ringreduce.training.gradients.weights import Weights
from ringreduce.training.optimizers.applying import Distribution, ListReduction, variables_of, with_methods
from ringreduce.training.optimizers.optimizer import ListTraining
from ringreduce.training.optimizers.refusals import refusal
from ringreduce.training.optimizers.user_options import GRADIENT_OPTIONS, GradientArguments, checked, named_options
from ringreduce.training.options.features import ADASUM, SAMPLES, SHARES
from ringreduce.training.options.options import Adasum, Op, averaging

if TYPE_CHECKING:
    from ringreduce.training.options.declared import Unpack

_Gradients = list[Any]

ADVICE = Advice(
    "call broadcast_variables(model.variables, root_rank=0) before the first step, or right after it",
    "dataset.shard(size(), rank()) of a tf.data.Dataset, for example",
    first=1,
)

_MOST_TRAININGS = 16  # Limits a reduction: gradients may have other shapes in each step.


class GradientReduction(ListReduction):
    """Reduces the gradients of some variables over the ranks, all of them as one operation. Collective.

    Args:
        kind: what errors call it.
        op: `Average`, `Sum` or `Adasum`; must agree on all ranks, as all of these must.
        compression: of `Compression`, or a `Compressor`.
        sparse_as_dense: whether `tf.IndexedSlices` become tensors first.
        predivide: averages are divided by this before they are summed, and by the rest afterwards.
        groups: lists of variables, or a number of lists: the gradients of each are reduced together.
        process_set: the ranks that train together.
        staleness: by how many steps averages are applied late.

    Attributes:
        advice: for warnings.

    Raises:
        ConfigError: an argument is wrong; the other ranks get a `MismatchError`.
    """

    advice: Advice = ADVICE

    def __init__(
        self,
        kind: str,
        *,
        op: Op = AVERAGE,
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        predivide: float = 1.0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        staleness: int = 0,
    ) -> None:
        with RequestBuilder(kind, None, process_set):
            chosen, factor = averaging(op, predivide)
            if staleness:
                rounds = compression is Compression.none or hasattr(compression, "wire")  # It rounds, or does nothing.
                custom = None if rounds else compression
                options = named_options(op=op, compression=custom, predivide_factor=predivide, staleness=staleness)
                checked(options, config(), [])
        super().__init__(staleness)
        self._kind = kind
        self._op = chosen
        self._compression = compression
        self._factor = factor
        self._sparse_as_dense = sparse_as_dense
        self._groups = groups
        self._process_set = process_set
        self._saved: dict[int, Any] = {}
        self._identities: dict[Any, Identity] = {}  # By variables.

    @classmethod
    def of(cls, kind: str, options: GradientArguments) -> GradientReduction:
        """Return the reduction of an optimizer or a tape of these options."""
        return cls(
            kind,
            op=options["op"],
            compression=options["compression"],
            sparse_as_dense=options["sparse_as_dense"],
            predivide=options["gradient_predivide_factor"],
            groups=options["groups"] or options["num_groups"] or None,
            process_set=options["process_set"],
            staleness=options.get("staleness", 0),
        )

    @entry
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], samples: Any = None) -> _Gradients:
        """Return the averages, or sums, of gradients over the ranks. Collective.

        Args:
            gradients: of each variable; None where there is none. Outside of graphs, what a rank lacks counts as zeros,
                and what no rank has stays None. In a graph None stays None, and the ranks have to agree on that. Of
                `tf.IndexedSlices`, rows of equal index become one, on one rank as well.
            variables: to which they belong; variables, or whatever a gradient was asked for.
            samples: of how many samples this rank's gradients are means, a number or a tensor; on all ranks or none.
                None: ``self.samples`` at the time of the step.

        Raises:
            ConfigError: gradients are sparse, with staleness; or numbers of samples are wrong, or missing on some rank.
            UnsupportedBufferError: a gradient is ragged.
            MismatchError: the ranks have different gradients.
        """
        made = list(gradients)
        if self._sparse_as_dense:
            made = [tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in made]
        eager = tf.executing_eagerly()
        dense = []
        sparse = []
        for number, gradient in enumerate(made):
            require_dense(gradient, f"the gradient of {name_of(variables[number], number)}")
            if isinstance(gradient, tf.IndexedSlices):
                sparse.append(number)
            elif gradient is not None or (eager and self._op != Adasum):
                dense.append(number)
        if sparse and self.staleness:
            raise ConfigError("staleness is for dense gradients; use sparse_as_dense=True")
        plain = not self.staleness and samples is None and self.samples is None
        if (dense or sparse) and not (eager and self._alone and plain):
            given = [made[n] for n in [*dense, *sparse]]
            together = [variables[n] for n in [*dense, *sparse]]
            reduced = self._reduce_together(given, together, count=len(dense), samples=samples)
            for number, each in zip([*dense, *sparse], reduced, strict=True):
                made[number] = each
        elif eager:
            tell(steps=1)
            for number in sparse:
                made[number] = each_index_once(made[number])
        return made

    def pending(self) -> Iterator[tuple[_Gradients, Sequence[Any]]]:
        """See `ListReduction.pending`."""
        if not tf.executing_eagerly():
            raise ConfigError("the last averages are values: call synchronize() outside of graphs")
        return super().pending()

    def state_dict(self) -> dict[int, Any]:
        """Return what lossy compression keeps on this rank."""
        states = [list_of_gradients.training.state_dict() for list_of_gradients in self.known.kept.values()]
        return {number: state for number, state in enumerate(states) if state}

    def load_state_dict(self, state: dict[int, Any]) -> None:
        """Go on from what `state_dict` has returned, in the first step of a new reduction."""
        self._saved = dict(state)

    @property
    def _alone(self) -> bool:
        return not self._process_set.included() or self._process_set.size() == 1

    def _reduce_together(self, gradients: _Gradients, variables: Sequence[Any], count: int, samples: Any) -> _Gradients:
        """Reduce so many dense gradients, and `tf.IndexedSlices` behind them."""
        dense = gradients[:count]
        slices = gradients[count:]
        identity = self._identity(variables)
        if slices and self._op == Adasum:
            raise NotImplementedError("Adasum looks at whole tensors: use sparse_as_dense=True")
        compressor = NoneCompressor if has_reducers(self._compression) else self._compression
        pairs = [(None, None) if gradient is None else compressor.compress(gradient) for gradient in dense]
        sent = [tensor for tensor, _ in pairs if tensor is not None]
        traced = traced_name(self._kind)
        names = [name_of(variable, number) for number, variable in enumerate(variables)]
        read = reader_of(variables)
        if (in_session := is_of_session()) and not self._alone:
            self._process_set.engine.expect_any_order()  # A session's threads may submit in any order.
        parts = [*(rows.values for rows in slices), *(rows.indices for rows in slices)]
        counted = [] if samples is None else [tf.convert_to_tensor(samples)]

        def carry_out(arrays: list[Host]) -> list[Host]:
            found = iter(arrays)
            of = next(found) if counted else self.samples
            each_dense = [None if each is None else next(found) for each, _ in pairs]
            name = self._name(identity, traced)
            rest = list(found)
            sparse = rest[: len(parts)]
            values = rest[len(parts) :]
            weights_now = (lambda: values) if in_session else read
            more = list(zip(names[count:], sparse, strict=False))
            model = CheckedModel(
                names, weights_now, sparse=more, settings=lambda: {} if in_session else in_words(self.settings())
            )
            reduced, weights = self._reduce_dense(each_dense, variables[:count], name=name, samples=of, model=model)
            return [*reduced, *self._gather(sparse, name, weights)]

        def specs() -> list[Spec]:
            gathered = [(tensor.dtype, any_rows(tensor)) for tensor in parts]
            added = [(dtype, [None]) for dtype in (tf.int64, tf.float64) for _ in slices]
            return [*((part.dtype, part.shape) for part in sent), *gathered, *added, *[(tf.float64, [])][: len(slices)]]

        values = values_when(self._compares_weights, variables) if in_session else []
        made = run(carry_out, [*counted, *sent, *parts, *values], specs, in_order=False)
        reduced = made[:count]
        for number, (_, context) in enumerate(pairs):
            if reduced[number] is not None:
                reduced[number] = compressor.decompress(reduced[number], context)
        for number, each in enumerate(slices):
            values, indices, places, factors = made[count:-1][number :: len(slices)]
            total = added_up(values, places, count=tf.size(indices), divisor=made[-1], factors=factors)
            reduced.append(tf.IndexedSlices(total, indices, each.dense_shape))
        return reduced

    def _reduce_dense(
        self, gradients: list[Host | None], variables: Sequence[Any], name: str, samples: Any, model: CheckedModel
    ) -> tuple[list[Any], Weights | None]:
        """Return reduced dense gradients, possibly none, and the weights of their averages."""
        if self._op == Adasum:
            with RequestBuilder(self._kind, name, self._process_set) as prepare:
                if samples is not None:
                    raise refusal(ADASUM, SAMPLES)
                if is_by_speed(self._process_set.engine):
                    raise refusal(ADASUM, SHARES)
                request = prepare.allreduce(gradients, prepare.new_like(gradients), Adasum, 1.0, 1.0)
            return list(request.carry_out()), None
        lists = self._training(gradients, variables)
        reduced = lists.reduce(gradients, samples, model)
        training = lists.training
        return list(map(np.copy, reduced)) if training.alone else reduced, training.reducer.buckets.weights

    def _compares_weights(self) -> bool:
        """Return whether some of the next steps compare weights."""
        reducers = [known_list.training.reducer for known_list in self.known.kept.values()]
        return any(reducer.checks.compares_weights(reducer.steps) for reducer in reducers)

    def _gather(self, parts: list[Host], name: str, weights: Weights | None) -> list[Host]:
        """Gather slices, of which ``parts`` are the values and the indices.

        Returns:
            What `added_up` takes: all values; for each slices the indices, the places of rows, and their factors; and
            the divisor.
        """
        count = len(parts) // 2
        divisor = 1
        if not parts:
            return []
        factors = [np.ones(1)] * count
        if self._alone:
            parts = list(map(np.copy, parts))
        else:
            if weights is not None:  # Tells how many rows are of which rank.
                parts = [*parts, np.array([[len(each) for each in parts[:count]]])]
            with RequestBuilder(f"{self._kind}, slices", f"{name}, slices", self._process_set) as prepare:
                request = prepare.allgather(parts, list)
            parts = request.carry_out()
            if weights is not None:
                factors = [np.repeat(weights.of_ranks, rows) for rows in parts[-1].T]
            elif self._op is AVERAGE:
                divisor = self._process_set.size()
        found = [places_of(index) for index in parts[count : 2 * count]]
        indices, places = zip(*found, strict=True)
        return [*parts[:count], *indices, *places, *factors, np.array(float(divisor))]

    def _training(self, gradients: list[Host | None], variables: Sequence[Any]) -> ListTraining:
        """Return what reduces gradients of these shapes, and with state of these variables. Collective if it is new."""
        specs = tuple([_spec(*each) for each in zip(gradients, variables, strict=True)])
        named = has_reducers(self._compression) or isinstance(self._groups, (list, tuple)) or self.staleness
        of = _ids(variables)
        key = specs, of
        if key not in self.known.kept:
            alike = [key for key in self.known.kept if key[1] == of]
            if len(alike) == _MOST_TRAININGS and not self.staleness:
                self.known.forget(alike[0])
        make = partial(self._new_training, specs, variables)
        training: ListTraining = self.known.find(key, make, list(variables) if named else ())
        return training

    def _new_training(self, specs: Sequence[tuple[Any, Any]], variables: Sequence[Any]) -> ListTraining:
        parameters = [ArraySpec(*spec) for spec in specs]
        by_variable = {id(variable): parameter for variable, parameter in zip(variables, parameters, strict=True)}
        groups = self._groups
        if isinstance(groups, (list, tuple)):
            groups = [[by_variable[id(var)] for var in group if id(var) in by_variable] for group in groups]
        made = ListTraining(
            self._kind,
            [(name_of(variables[number], number), parameter) for number, parameter in enumerate(parameters)],
            self._process_set,
            bind=lambda _: HostMemory(self.advice),
            op=self._op,
            compression=self._compression if has_reducers(self._compression) else None,
            predivide_factor=self._factor,
            groups=groups,
            skip_unused=None if self.staleness else True,
            staleness=self.staleness,
            identity=self._identity(variables),
        )
        if (saved := self._saved.pop(len(self.known.kept), None)) is not None:
            made.training.load_state_dict(**saved)
        return made

    def _identity(self, variables: Sequence[Any]) -> Identity:
        """Return what tells the gradients of these variables from those of others, as long as they are there."""
        key = _ids(variables)
        if key not in self._identities:
            first = next(filter(is_variable, variables), None)
            made = self.number, *(() if first is None else made_as(first)), next(numbers)
            shapes = [str(variable.shape) if is_variable(variable) else "" for variable in variables]
            arrays = [(name_of(var, n), shape) for n, (var, shape) in enumerate(zip(variables, shapes, strict=True))]
            self._identities[key] = identity_of(self._kind, arrays, made)
            if first is not None:
                with suppress(TypeError):  # An object that cannot be watched stays known.
                    when_ended(first, _forget, weakref.ref(self), key)
        return self._identities[key]

    def _forget(self, key: Any) -> None:
        """Forget variables that are gone; their ids may be those of others from now on."""
        del self._identities[key]
        for each in [each for each in self.known.kept if each[1] == key]:
            self.known.forget(each)

    def _name(self, identity: Identity, traced: str | None) -> str:
        """Return the name of the operations of a step besides those of dense gradients."""
        name = self._kind if self._alone else name_in(self._process_set.engine, identity)
        return name if traced is None else f"{traced}, {name}"


def _forget(reduction: Callable[[], GradientReduction | None], key: Any) -> None:
    if (known := reduction()) is not None:
        known._forget(key)


def _ids(variables: Sequence[Any]) -> tuple[int, ...]:
    """Return what is equal for the same variables; tensors, new in each step, are told apart by their shapes alone."""
    return tuple([id(variable) if is_variable(variable) else 0 for variable in variables])


def _spec(gradient: Host | None, variable: Any) -> tuple[tuple[int, ...], Any]:
    if gradient is None:
        return tuple(variable.shape), np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
    return gradient.shape, gradient.dtype


# ---- tapes ----


#: What reduces the gradients of all tapes that are wrapped alike: programs wrap a new one in each step.
_reductions: dict[Any, GradientReduction] = {}


@GRADIENT_OPTIONS.taken(
    "device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups groups process_set "
    "scale_local_gradients",
    "",
    compression=Compression.none,
)
@entry
def DistributedGradientTape(  # noqa: N802  # used as a class, as in Horovod
    gradtape: tf.GradientTape, *places: Any, **options: Unpack[GradientArguments]
) -> Any:
    """Return a tape of what another one has recorded, whose gradients are averaged over the ranks.

    Its ``gradient`` is collective; see `GradientReduction.reduce` for None. ``tape.register_local_source(variable)``
    lets the gradient of a variable stay this rank's own. Gradients are averaged with those of the same variables, by
    their names, and of equal names by the order in which they were used first; see docs/errors.md for ranks that step
    two models in different orders. ``tape.gradient(loss, sources, samples=n)`` weights averages
    by n, the number of samples (a number or a tensor) of which this rank's gradients are means; on all ranks or none.

    Args:
        gradtape: a tape, before, in or after its ``with``.
        **options: as for `GradientArguments`.
    """
    lists = options["groups"]
    listed = tuple(tuple(map(id, group)) for group in lists) if isinstance(lists, (list, tuple)) else lists
    key = tuple({**options, "groups": listed, "process_set": id(options["process_set"])}.items())
    if key not in _reductions:  # An equal set may be of an earlier world.
        _reductions[key] = GradientReduction.of("DistributedGradientTape", options)
    kind = type(gradtape)
    scale = options["scale_local_gradients"]
    distribution = Distribution(_reductions[key], tf, options["process_set"], scale_local=scale)

    def gradient(
        tape: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
        *,
        samples: Any = None,
    ) -> Any:
        end_recording(gradtape)  # The tape cannot record how its gradients are computed.
        own = kind.gradient(tape, target, sources, output_gradients, unconnected_gradients)
        reduced = distribution.reduced(tf.nest.flatten(own), tf.nest.flatten(sources), samples=samples)
        return tf.nest.pack_sequence_as(own, reduced)

    def register_local_source(tape: Any, source: Any) -> None:
        distribution.local.append(source)

    def get_local_and_global_gradients(tape: Any, target: Any, sources: Any, *how: Any) -> tuple[list[Any], list[Any]]:
        pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(tape.gradient(target, sources, *how)), strict=True)
        both: tuple[list[Any], list[Any]] = [], []
        local = set(map(id, distribution.local))
        for source, each in pairs:
            both[id(source) not in local].append(each)
        return both

    return with_methods(
        copy_of_tape(gradtape),  # The other one ends the recording.
        gradient=entry(gradient),
        register_local_source=register_local_source,
        get_local_and_global_gradients=entry(get_local_and_global_gradients),
    )


def PartialDistributedGradientTape(  # noqa: N802
    gradtape: tf.GradientTape, *arguments: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Do what `DistributedGradientTape` does, but for the weights of ``local_layers``: a layer of Keras, or several."""
    local = variables_of(local_layers)
    tape = DistributedGradientTape(gradtape, *arguments, **options)
    for variable in local:
        tape.register_local_source(variable)
    return tape
