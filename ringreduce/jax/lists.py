"""Gradients that are averaged late, or by numbers of samples: a `ListTraining` that programs call on the host.

The process keeps the averages that are under way; they are no part of a state of JAX. So JAX may neither drop a call
nor repeat it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.jax import ffi
from ringreduce.jax.calls import LISTED, LISTS, CompiledCall, Host, is_traced, name_here, ranks_of
from ringreduce.jax.leaves import is_sparse, usable, usable_leaves
from ringreduce.jax.steps import ADVICE, NOTHING, StepReduction
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.error_text import raise_unseen
from ringreduce.training.binding.framework import Advice
from ringreduce.training.binding.host import ArraySpec, HostMemory
from ringreduce.training.binding.identity import Identity
from ringreduce.training.calls.requests import RequestBuilder
from ringreduce.training.data.shares import Compiled, is_by_speed
from ringreduce.training.optimizers.known_lists import KnownLists
from ringreduce.training.optimizers.optimizer import ListTraining

_numbers = count()


def needs_host(process_set: ProcessSet, gradients: Any) -> bool:
    """Return whether a sampler by speed has begun, which gives the ranks different numbers of samples.

    If none has, and a program is being traced, none may begin in this world: the program makes averages without
    weights, now and later.
    """
    if not process_set.included():
        return False
    begun = is_by_speed(process_set.engine)
    if not begun and is_traced(jax.tree.leaves(gradients)):
        process_set.engine.attached[Compiled].unweighted = True
    return begun


def unmapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays that raises a `ConfigError` under `vmap`."""
    mapped = custom_vmap(function)
    mapped.def_vmap(_refuse_batch)
    return mapped  # type: ignore[no-any-return]


def _refuse_batch(*_: object) -> NoReturn:
    raise ConfigError(
        "vmap cannot map the reduction of gradients that are compressed, late or weighted: map the computation of the "
        "gradients alone"
    )


class HostReduction:
    """Reduces lists of arrays, at once or in the program that is being traced. All ranks make theirs in one order.

    Args:
        kind: what errors call it.
        leaves: the first list; all lists have its shapes and dtypes.
        process_set: the ranks that train together.
        samples: returns the number of samples of a step whose `reduce` gets none.
        identity: of the lists.
        advice: for warnings.
        **options: of `ListTraining`.
    """

    def __init__(
        self,
        kind: str,
        leaves: Sequence[Any],
        process_set: ProcessSet,
        samples: Callable[[], Any] = lambda: None,
        identity: Identity | None = None,
        advice: Advice = ADVICE,
        **options: Any,
    ) -> None:
        self._kind = kind
        self._process_set = process_set
        self._samples = samples
        self._options = options
        self._identity = identity
        self._specs = [ArraySpec(leaf.shape, leaf.dtype) for leaf in leaves]
        self._key = f"{kind} {next(_numbers)}"
        self._training: ListTraining | None = None
        self._advice = advice
        self._beside = NOTHING
        LISTS[self._key] = self

    def reduce(
        self, leaves: Sequence[Any], name: str | None = None, samples: Any = None, step: StepReduction | None = None
    ) -> list[Any]:
        """Return the averages, or sums, of arrays. Collective.

        Args:
            leaves: the arrays.
            name: of the operation; None: as `ringreduce.jax.allreduce` names one.
            samples: of how many samples this rank's arrays are means, a number or a scalar; on all ranks or none.
            step: whose gradients the arrays are.
        """
        raise_unseen()
        beside = [] if step is None else list(step.arrays)
        self._beside = NOTHING if step is None else step.beside
        arrays = [*leaves, *([] if samples is None else [_scalar(samples)])]
        # The name of an allreduce: a rank without numbers of samples makes one, so that both get an error.
        name = name or name_here("allreduce", arrays)
        call = CompiledCall(LISTED, name, ranks_of(self._process_set), function=self._key, identity=self._identity)
        if not is_traced(arrays):
            if is_traced(beside):
                beside = []
                self._beside = NOTHING
            values = lambda: list(map(np.asarray, beside))  # noqa: E731
            reduced = self._reduced(call.operation, list(map(np.asarray, arrays)), values)
            return [jnp.array(array) for array in reduced]  # These are copies.
        shapes = [array.shape for array in arrays]
        count = len(arrays)
        how: dict[str, Any] = {"batched": None, "always": True}
        run = unmapped(lambda *given: ffi.call(json.dumps(call), given[:count], shapes, after=given[count:], **how))
        return list(run(*arrays, *beside)[: len(leaves)])

    def pending(self) -> Iterator[list[Any]]:
        """Yield the averages that are still to be applied, oldest first. Collective."""
        for averages in () if self._training is None else self._training.pending():
            yield [jnp.array(average) for average in averages]

    def carry_out(
        self, name: str | None, sources: Sequence[Host], targets: Sequence[Host], others: Callable[[], ffi.XlaArrays]
    ) -> None:
        """Reduce arrays into others, as the compiled program's operation of a name; ``others`` come beside them."""
        for target, each in zip(targets, self._reduced(name, sources, lambda: others().views()), strict=False):
            np.copyto(target, each)

    def _reduced(self, name: str | None, arrays: Sequence[Host], beside: Callable[[], Sequence[Host]]) -> list[Host]:
        number = len(self._specs)
        if self._training is None:
            with RequestBuilder("allreduce", name, self._process_set) as prepare:
                request = prepare.call("late gradients, or numbers of samples", lambda ranks: None)
            request.carry_out()
            named = [(f"array {place}", spec) for place, spec in enumerate(self._specs)]
            how = {"identity": self._identity, "bind": lambda _: HostMemory(self._advice), **self._options}
            self._training = ListTraining(self._kind, named, self._process_set, **how)
        samples = arrays[number] if len(arrays) > number else self._samples()
        return self._training.reduce(arrays[:number], samples, self._beside.model(beside))


class HostTrees:
    """Reduces pytrees, with one `HostReduction` for each structure, shapes and dtypes.

    Args:
        kind, process_set, **options: as for `HostReduction`.
    """

    def __init__(self, kind: str, process_set: ProcessSet, **options: Any) -> None:
        self._kind = kind
        self._process_set = process_set
        self._options = options
        self._known: KnownLists[HostReduction] = KnownLists()

    def reduce(
        self,
        tree: Any,
        name: str | None,
        samples: Any,
        identity: Identity | None = None,
        step: StepReduction | None = None,
    ) -> Any:
        """Return the averages, or sums, of a tree of arrays. Collective; see `HostReduction.reduce`.

        The identity of the tree tells it from others of its shapes; those of a structure have the same each time.
        """
        given, structure = jax.tree.flatten(tree, is_sparse)
        leaves = usable_leaves(tree, given, usable)
        if not leaves:
            return tree
        key = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        how = {"identity": identity, **self._options}
        reduction = self._known.find(key, lambda: HostReduction(self._kind, leaves, self._process_set, **how))
        return jax.tree.unflatten(structure, reduction.reduce(leaves, name, samples=samples, step=step))

    def pending(self, like: Any) -> Iterator[Any]:
        """Yield the averages that are still to be applied, oldest first, of trees of a structure. Collective."""
        leaves, structure = jax.tree.flatten(like)
        if is_traced(leaves):
            raise ConfigError("the last averages are values: call synchronize() outside of jit")
        known = [own for (other, *_), own in self._known.kept.items() if other == structure]
        if self._known.kept and not known:
            raise ConfigError("synchronize() takes parameters of the structure of the gradients, and got another one")
        for reduction in known:
            for averages in reduction.pending():
                yield jax.tree.unflatten(structure, averages)


def _scalar(samples: Any) -> Any:
    try:
        counted = jnp.asarray(samples)
    except (TypeError, OverflowError) as error:
        raise UnsupportedBufferError(f"samples is a number below 2^31, got {samples!r}") from error
    if not is_traced([counted]) and np.any(np.asarray(counted) != np.asarray(samples)):  # JAX has cut it to 32 bits
        raise UnsupportedBufferError(f"samples is a number below 2^31, got {samples!r}")
    return counted
