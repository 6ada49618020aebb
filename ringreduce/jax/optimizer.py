"""Optax transformations that average gradients over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ringreduce.buffers.codecs import CODECS
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.jax.calls import FUNCTIONS, CompiledCall, is_traced, is_tracing, name_here, ranks_of, run_compiled
from ringreduce.jax.leaves import is_sparse, usable, usable_leaves
from ringreduce.jax.lists import HostTrees, needs_host, unmapped
from ringreduce.jax.ops import reduce_gradients
from ringreduce.jax.private import around_that_skips
from ringreduce.jax.steps import StepReduction, Steps
from ringreduce.runtime import config
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.identity import Identity, identity_of, numbers
from ringreduce.training.calls.requests import RequestBuilder
from ringreduce.training.compression import (
    BucketCompression,
    State,
    WireState,
    has_reducers,
    signature_of,
    wire_format,
)
from ringreduce.training.gradients.checks import OF_UPDATE
from ringreduce.training.optimizers.user_options import GRADIENT_OPTIONS, GradientArguments, checked, named_options
from ringreduce.training.options.options import averaging

if TYPE_CHECKING:
    from ringreduce.training.options.declared import Unpack


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=[])
@dataclass
class RankState:
    """Arrays that each rank has of its own, by name; `broadcast_parameters` leaves them as they are."""

    arrays: dict[str, Any]


class DistributedState(NamedTuple):
    """The state of a `DistributedGradientTransformation` that compresses gradients.

    Attributes:
        inner: that of the transformation it wraps.
        lost: what compression has not sent yet.
    """

    inner: Any
    lost: RankState


@GRADIENT_OPTIONS.taken("op compression process_set", "gradient_predivide_factor name staleness")
def DistributedGradientTransformation(  # noqa: N802  # used as a class, as in Horovod
    tx: optax.GradientTransformation, *places: Any, **options: Unpack[GradientArguments]
) -> DistributedTransformation:
    """Return a transformation that averages gradients over the ranks and passes them on to another one.

    It may be used inside and outside of `jit`. Its ``update`` is collective, and so is its ``init`` with a compression.
    ``update(grads, state, params, samples=n)`` weights averages by n, the number of samples (a number or a scalar) of
    which this rank's gradients are means; on all ranks or none.

    Gradients are averaged with those of the same transformation and of the same tree (paths and shapes), whatever the
    order in which ranks step several models. Models with equal trees need a transformation each.

    What ``tx`` takes besides, as ``update(..., value=loss)``, must agree on all ranks: so let it be an average. The
    ranks compare it with their hyper-parameters, in steps 1, 2, 4, 8 and so on; `MismatchError` on all if it differs.

    Late or weighted gradients are reduced on the host, and `vmap` refuses them. The process keeps the averages that are
    under way; the state does not have them. So use a transformation with ``staleness`` for one model, and save its
    state after ``synchronize``.

    Args:
        tx: what the averages go to. Clipping belongs in here, so that it sees the averages.
        **options: as for `GradientArguments`. All must agree on all ranks.
        compression: of float32 gradients: the name of a wire format (``"fp16"``, ``"int8"``), `PowerSGD` or `TopK`.
            What it loses is added to the next gradients; the state holds it, each rank its own.
        name: of the operation; None: by transformation and tree. Must agree.
        staleness: by how many steps averages are applied late; must agree. The first steps apply zeros, and the process
            keeps the rounding errors of wire formats, too. See docs/recipes/staleness.md.

    Returns:
        A transformation whose state is that of ``tx``, or with a compression and without ``staleness`` a
        `DistributedState`. With ``staleness``, ``params, state = tx.synchronize(params, state)`` applies the last
        averages; collective, and outside of `jit`.

    Raises:
        ConfigError: an argument is wrong, or two do not go together. ``update`` raises it within
            `optax.apply_if_finite` and within `optax.MultiSteps` with ``should_skip_update_fn``, by which ranks would
            leave out steps, each on its own.
    """
    op = options["op"]
    compression = options["compression"]
    name = options["name"]
    process_set = options["process_set"]
    staleness = options["staleness"]
    with RequestBuilder("DistributedGradientTransformation", name, process_set):
        kind, factor = averaging(op, options["gradient_predivide_factor"])
        wanted = None if compression is None else _checked(compression)
        if wanted is not None and kind not in (AVERAGE, SUM):
            raise ConfigError(f"compressed gradients are averaged or summed (op Average or Sum), got {op}")
        how: dict[str, Any] = {"op": op, "predivide_factor": options["gradient_predivide_factor"]}
        if staleness:
            how |= {"compression": wanted, "staleness": staleness}
            checked(named_options(**how), config(), [])
    trees = HostTrees("DistributedGradientTransformation", process_set, **how)
    # One that is made in each trace is the same each time: a rank may trace more often than others.
    number = 0 if is_tracing() else next(numbers)
    shared = name is not None or number == 0
    steps = Steps("DistributedGradientTransformation", process_set, shared=shared)
    inner = optax.with_extra_args_support(tx)

    def identified(updates: Any) -> Identity | None:
        return None if name is not None else _identity(number, updates)

    def reduce(updates: Any, step: StepReduction | None = None) -> Any:
        how: dict[str, Any] = {"name": name, "identity": identified(updates), "process_set": process_set}
        return reduce_gradients(step, updates, kind, predivide_factor=factor, **how)

    if wanted is not None and not staleness:
        assert isinstance(kind, ReduceOp)
        compressing = _Compressing(
            inner,
            reduce,
            identified=identified,
            steps=steps,
            compression=wanted,
            op=kind,
            name=name,
            process_set=process_set,
        )
        return DistributedTransformation(compressing.init, compressing.update)

    def update(updates: Any, state: Any, params: Any = None, *, samples: Any = None, **extra: Any) -> Any:
        _require_every_step()
        step = steps.of_trees(updates, params, _hyperparameters(state) | _arguments(extra))
        if staleness or samples is not None or needs_host(process_set, updates):
            updates = trees.reduce(updates, name, samples, identified(updates), step)
        else:
            updates = reduce(updates, step)
        return inner.update(updates, state, params, **extra)

    transformation = DistributedTransformation(inner.init, update)
    if staleness:
        transformation.late = trees, inner.update
    return transformation


def _require_every_step() -> None:
    """Raise unless this step is made on all ranks, as far as that can be told."""
    around = around_that_skips() if is_tracing() else None
    if around is not None:
        function = around.partition(" ")[0]
        raise ConfigError(
            f"{around} is around DistributedGradientTransformation: by its own gradients a rank would leave out a step "
            "that the others make. Put it inside, where it sees the averages: "
            f"DistributedGradientTransformation({function}(...))"
        )


@lru_cache(256)
def _known_identity(number: int, structure: Any, shapes: tuple[tuple[int, ...], ...]) -> Identity:
    paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure, range(len(shapes))))
    arrays = [(jax.tree_util.keystr(path), shapes[place]) for path, place in paths]
    return identity_of("DistributedGradientTransformation", arrays, (number,))


def _identity(number: int, tree: Any) -> Identity:
    """Return what tells the gradients that a transformation, by its number, gets of a tree from all others."""
    leaves, structure = jax.tree.flatten(tree)
    return _known_identity(number, structure, tuple([jnp.shape(leaf) for leaf in leaves]))


def _hyperparameters(state: Any) -> dict[str, Any]:
    """Return what `optax.inject_hyperparams` keeps in a state, by name; of equal names the later ones are numbered."""
    hyperparameters: dict[str, Any] = {}
    parts = [state]
    while parts:
        for node in jax.tree.leaves(parts.pop(), is_leaf=_is_injected):
            if _is_injected(node):
                for name, value in node.hyperparams.items():
                    same = sum(other.partition(" ")[0] == name for other in hyperparameters)
                    hyperparameters[f"{name} {same + 1}" if same else name] = value
                parts.append(node.inner_state)
    return hyperparameters


def _arguments(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among the further arguments of `update`, by name: with other ones, ranks step otherwise."""
    return {
        f"{name}{jax.tree_util.keystr(path)}{OF_UPDATE}": leaf
        for name, tree in extra.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_injected(part: Any) -> bool:
    """Return whether a part of a state is of `optax.inject_hyperparams`; programs may have such names in their own."""
    return hasattr(part, "inner_state") and isinstance(getattr(part, "hyperparams", None), Mapping)


class DistributedTransformation(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """The result of `DistributedGradientTransformation`.

    Attributes:
        late: with staleness, the reducer of gradients, and the update to apply its averages with; else None.
    """

    late: tuple[HostTrees, Callable[..., Any]] | None = None

    def synchronize(self, params: Any, state: Any, **extra: Any) -> tuple[Any, Any]:
        """Apply the averages that are still to be applied, one step for each, outside of `jit`. Collective.

        Args:
            params: the parameters, a tree of the structure of the gradients.
            state: of this transformation.
            **extra: for the update of the wrapped transformation.

        Returns:
            Parameters and state after the last step.
        """
        if self.late is not None:
            trees, update = self.late
            for averages in trees.pending(params):
                updates, state = update(averages, state, params, **extra)
                params = optax.apply_updates(params, updates)
        return params, state


class _Compressing(NamedTuple):
    """A transformation whose gradients are compressed; see `DistributedGradientTransformation`.

    Attributes:
        inner: what the reduced gradients go to.
        reduce: reduces those that are not float32, as they are.
        identified: returns the identity of a tree.
        steps: those of the transformation.
        compression, op, name, process_set: as given.
    """

    inner: Any
    reduce: Callable[[Any], Any]
    identified: Callable[[Any], Identity | None]
    steps: Steps
    compression: BucketCompression
    op: ReduceOp
    name: str | None
    process_set: ProcessSet

    def init(self, params: Any) -> DistributedState:
        shapes = [leaf.shape for leaf in jax.tree.leaves(params) if _is_compressed(leaf)]
        compressed = _Compressed(self.compression, shapes)
        with RequestBuilder("DistributedGradientTransformation", self.name, self.process_set) as prepare:
            request = prepare.call(compressed.key, compressed.begin)
        residual = {name: jnp.asarray(array) for name, array in request.carry_out().items()}
        return DistributedState(self.inner.init(params), RankState(residual))

    def update(
        self, updates: Any, state: DistributedState, params: Any = None, *, samples: Any = None, **extra: Any
    ) -> tuple[Any, DistributedState]:
        _require_every_step()
        if samples is not None or needs_host(self.process_set, updates):
            raise ConfigError("compressed gradients cannot be weighted: use no compression with numbers of samples")
        given, structure = jax.tree.flatten(updates, is_sparse)
        leaves = usable_leaves(updates, given, usable)
        chosen = [leaf for leaf in leaves if _is_compressed(leaf)]
        settings = _hyperparameters(state.inner) | _arguments(extra)
        step = self.steps.of_trees(updates, params, settings, _is_compressed)
        made, residual = self._compress(chosen, state.lost.arrays, tree=updates, step=step)
        compressed = iter(made)
        others = iter(self.reduce([leaf for leaf in leaves if not _is_compressed(leaf)]))
        reduced = [next(compressed if _is_compressed(leaf) else others) for leaf in leaves]
        updates, inner = self.inner.update(jax.tree.unflatten(structure, reduced), state.inner, params, **extra)
        return updates, DistributedState(inner, RankState(residual))

    def _compress(
        self, leaves: Sequence[Any], residual: dict[str, Any], tree: Any, step: StepReduction
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return reduced gradients, those of a tree that are compressed, and what compression leaves of them."""
        names = sorted(residual)
        arrays = [*leaves, *(residual[name] for name in names)]
        compressed = _Compressed(self.compression, [leaf.shape for leaf in leaves], names)
        kind = "compressed allreduce"
        name = name_here(kind, arrays) if self.name is None else f"{self.name}, compressed"
        identity = self.identified(tree)
        call = CompiledCall(
            kind, name, ranks=ranks_of(self.process_set), op=self.op.value, function=compressed.key, identity=identity
        )
        traced = is_traced(arrays)
        if not traced:
            step.look(leaves, call.operation)
        of = step if traced else None
        made = run_compiled(
            call, [array.shape for array in arrays], adjoint=_refuse_gradients, leaves=arrays, wrap=unmapped, step=of
        )
        return made[: len(leaves)], dict(zip(names, made[len(leaves) :], strict=True))


def _refuse_gradients(_: object) -> NoReturn:
    raise ConfigError("no gradient flows through compressed gradients: use no compression here")


def _is_compressed(leaf: Any) -> bool:
    return bool(leaf.dtype == jnp.float32)


# ---- lossy compression, whose residual is the program's: arrays that go in and come out ----


def _checked(compression: Any) -> BucketCompression:
    """Return a compression as a user gives it: an object, a class, or the name of a wire format."""
    chosen = wire_format(compression) if isinstance(compression, str) else compression
    if not has_reducers(chosen):
        raise ConfigError(f"compression is one of {', '.join(CODECS)}, or one of buckets as PowerSGD; got {chosen!r}")
    return chosen() if isinstance(chosen, type) else chosen


class _Compressed:
    """Reduces lists of float32 arrays by a compression, as one bucket.

    Args:
        compression: of buckets.
        shapes: of the arrays; the same on all ranks.
        names: of the parts of the residual.

    Attributes:
        key: of it in a `CompiledCall`: text that is the same on all ranks, and in all processes.
    """

    def __init__(
        self, compression: BucketCompression, shapes: Sequence[tuple[int, ...]], names: Sequence[str] = ()
    ) -> None:
        self._names = names
        words = [*("x".join(map(str, shape)) or "scalar" for shape in shapes), *names]
        self.key = f"{signature_of(compression)} of {', '.join(words)}"
        self._bounds = list(accumulate(map(prod, shapes), initial=0))
        self._reducer = compression.reducer(list(shapes), [slice(*ends) for ends in pairwise(self._bounds)])
        FUNCTIONS.setdefault(self.key, self.reduce)

    def begin(self, ranks: Communicator) -> State:
        """Return the residual before the first call, by name: on each rank its own. Collective."""
        if isinstance(self._reducer, WireState):  # Its parts depend on how arrays travel between nodes.
            self._reducer.reduce(ranks, np.zeros(self._bounds[-1], np.float32), average=False)
        return self._reducer.state_dict()

    def reduce(
        self, sources: Sequence[Any], targets: Sequence[Any], average: bool, ranks: Communicator
    ) -> Sequence[Any]:
        """Return ``targets``: reduced arrays, and the residual. Collective.

        Args:
            sources: the arrays, and the residual so far, in the order of its names.
            targets: of the same shapes.
            average: whether sums are divided by the number of ranks.
            ranks: that reduce.
        """
        count = len(self._bounds) - 1
        flat = ranks.empty(self._bounds[-1])
        pieces = np.split(flat, self._bounds[1:-1])
        for piece, source in zip(pieces, sources, strict=False):
            piece[:] = source.ravel()
        self._reducer.load_state_dict(dict(zip(self._names, sources[count:], strict=True)))
        self._reducer.reduce(ranks, flat, average)
        for piece, target in zip(pieces, targets, strict=False):
            target[...] = piece.reshape(target.shape)
        residual = self._reducer.state_dict()
        for name, target in zip(self._names, targets[count:], strict=True):
            # After a change of ranks it may have another length: then nothing is kept.
            target[...] = residual[name] if residual[name].shape == target.shape else 0
        return targets
