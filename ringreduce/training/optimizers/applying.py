"""Optimizers that are given gradients in a call, as Keras's are: their `apply` reduces them over the ranks first.

The optimizer stays the object that it is, and gets a subclass of its class. A model that holds it is saved as without
ringreduce: ``optimizer.__class__`` is its class still.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any

import numpy as np

from ringreduce.common.errors import ConfigError
from ringreduce.runtime.blocking import world
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.identity import numbers
from ringreduce.training.binding.keras_private import (
    accumulated,
    learning_rate_of,
    passes_made,
    set_class,
    setting_object,
    trained_variables,
)
from ringreduce.training.calls.requests import dtype_name
from ringreduce.training.gradients.checks import OF_LOSS_SCALE
from ringreduce.training.optimizers.keras_copies import forget_note, methods_of_copies
from ringreduce.training.optimizers.known_lists import KnownLists
from ringreduce.training.optimizers.refusals import require_together
from ringreduce.training.options.features import ACCUMULATION, GLOBAL_NORM, LOCAL_VARIABLES, LOSS_SCALES
from ringreduce.training.strategies.late import STALENESS


class ListReduction(ABC):
    """Reduces the gradients of variables over the ranks.

    Args:
        staleness: by how many steps averages are applied late.

    Attributes:
        staleness: the argument.
        samples: of how many samples this rank's gradients are means from now on, on all ranks; None: all ranks have the
            same weight. Read when a step runs.
        number: greater than those that were made earlier.
        known: what reduces the gradients of some variables.
        values: of the variables of the next step, where these do not hold them; None: they do.
        state: pairs of variables of the optimizer and their values, likewise.
        settings: returns the hyper-parameters of the optimizer, numbers or arrays of the framework, by name.
    """

    values: Sequence[Any] | None = None
    state: Sequence[tuple[Any, Any]] | None = None
    settings: Callable[[], Mapping[str, Any]] = dict

    def __init__(self, staleness: int = 0) -> None:
        self.staleness = staleness
        self.samples: Any = None
        self.number = next(numbers)
        self.known: KnownLists[Any] = KnownLists()

    @abstractmethod
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
        """Return the averages, or sums, of gradients, some of them None. Collective."""

    @contextmanager
    def of_values(self, values: Sequence[Any], state: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        """Return a context for a step whose variables do not hold `values` and `state`."""
        self.values = values
        self.state = state
        try:
            yield
        finally:
            self.values = self.state = None

    def count(self, samples: Any) -> None:
        """Change `samples`. Local."""
        self.samples = samples

    def pending(self) -> Iterator[tuple[list[Any], Sequence[Any]]]:
        """See `KnownLists.pending`. Collective."""
        return self.known.pending()


@dataclass(eq=False)
class Distribution:
    """Prepares gradients for an optimizer, which then applies them.

    Args:
        reduction: reduces the gradients.
        ops: `keras.ops`.
        process_set: the ranks that train together. Other ranks train alone.
        scale_local: whether gradients of local variables are divided by the number of ranks.
        factor: multiplies all gradients after they are reduced.
        again: distributes another optimizer in the same way; None for what is no optimizer of Keras.

    Attributes:
        local: the variables of this rank's own.
    """

    reduction: ListReduction
    ops: Any
    process_set: ProcessSet
    scale_local: bool = True
    factor: float = 1.0
    again: partial[Any] | None = None
    local: list[Any] = field(default_factory=list, init=False)

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any], **how: Any) -> list[Any]:
        """Return the gradients: those of local variables unreduced, all others reduced.

        Args:
            gradients, variables: of the optimizer.
            **how: further arguments for ``reduce`` of the reduction.
        """
        result = list(gradients)
        factor = self.factor
        if self.process_set.included():
            local = set(map(id, self.local))
            shared = [number for number, each in enumerate(variables) if id(each) not in local]
            mine = [result[n] for n in shared], [variables[n] for n in shared]
            reduced = self.reduction.reduce(*mine, **how) if shared else ()
            own = factor / self.process_set.size() if self.scale_local else factor
            result = [self._scaled(each, own) for each in result] if local else result
            for number, each in zip(shared, reduced, strict=True):
                result[number] = self._scaled(each, factor)
            return result
        return [self._scaled(each, factor) for each in result]

    def pending(self) -> Iterator[tuple[list[Any], Sequence[Any]]]:
        """Yield averages and variables of `ListReduction.pending`, the averages as tensors. Collective."""
        for averages, variables in self.reduction.pending():
            pairs = zip(averages, variables, strict=True)
            yield [self.ops.convert_to_tensor(each, dtype=variable.dtype) for each, variable in pairs], variables

    def settings_of(self, optimizer: Any) -> dict[str, Any]:
        """Return the class of an optimizer and its hyper-parameters, by name: what its constructor takes.

        The learning rate is an array. For a schedule these are its class and what its constructor takes: TensorFlow
        counts a step while this runs, so that the schedule's value could be that of the next step on some ranks. So
        could a dynamic scale of losses: of that, it is only said that there is one.
        """
        scaled = {f"dynamic scale{OF_LOSS_SCALE}": True} if hasattr(optimizer, "inner_optimizer") else {}
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        kinds = [kind for kind in type(optimizer).__mro__ if isinstance(vars(kind).get("__init__"), FunctionType)]
        names = dict.fromkeys(name for kind in kinds for name in signature(vars(kind)["__init__"]).parameters)
        found = {name: vars(optimizer)[name] for name in names if name in vars(optimizer) and name != "name"}
        rate = learning_rate_of(optimizer)
        if hasattr(rate, "get_config"):
            found |= _made_of("learning_rate", rate)
        elif rate is not None and not callable(rate):  # else a function of the program, for its own calls
            found["learning_rate"] = self.ops.convert_to_tensor(optimizer.learning_rate)
        return {"the optimizer": type(optimizer).__name__, **found, **scaled}

    def _scaled(self, gradient: Any, factor: float) -> Any:
        """Return a gradient times a number. Those of 16 bits are multiplied in float32, and sparse ones stay sparse."""
        if gradient is None or factor == 1.0:
            return gradient
        if hasattr(gradient, "dense_shape"):
            return type(gradient)(self._scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
        name = dtype_name(gradient.dtype)
        ops = self.ops
        if name not in ("float16", "bfloat16"):
            return ops.multiply(gradient, factor)
        return ops.cast(ops.multiply(ops.cast(gradient, "float32"), factor), name)

    def reduced_with_earlier(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients as they are until a step is due; then reduce their sum with those before.

        The optimizer keeps the sum, and divides by the number of passes when it makes the step. It adds what it has
        kept to what it is given, so this sets what it has kept to zero.
        """
        ops = self.ops
        kept = accumulated(optimizer, variables)
        sums = [ops.convert_to_tensor(each) for each in kept]
        due = (passes_made(optimizer) + 1) % optimizer.gradient_accumulation_steps == 0
        # A gradient that this pass lacks on this rank may be there in an earlier one, or on another rank.
        dense = [ops.zeros_like(old) if each is None else each for each, old in zip(gradients, sums, strict=True)]
        dense = [
            ops.add(ops.zeros_like(old), each) if hasattr(each, "dense_shape") else each
            for each, old in zip(dense, sums, strict=True)
        ]

        def together() -> tuple[list[Any], list[Any]]:
            whole = [ops.add(each, old) for each, old in zip(dense, sums, strict=True)]
            return self.reduced(whole, variables), [ops.zeros_like(old) for old in sums]

        def apart() -> tuple[list[Any], list[Any]]:
            return [ops.convert_to_tensor(each) for each in dense], sums

        result, rest = ops.cond(due, together, apart)
        for old, new in zip(kept, rest, strict=True):
            old.assign(new)
        return list(result)


def _made_of(name: str, schedule: Any) -> dict[str, Any]:
    """Return the class of a schedule and the arguments in its config, by name, but its name; schedules in it, too."""
    found: dict[str, Any] = {name: type(schedule).__name__}
    with suppress(Exception):  # a program's own schedule needs a config only to be saved
        for argument, value in schedule.get_config().items():
            if argument != "name":
                part = f"{argument} of {name}"
                found |= _made_of(part, value) if hasattr(value, "get_config") else {part: value}
    return found


def with_methods(instance: Any, **methods: Any) -> Any:
    """Give an object other methods; return it.

    Its class becomes a subclass of the same name and module, so that what the framework saves of it loads without this
    package, and it keeps its state.

    Args:
        instance: of a class that is written in Python.
        **methods: attributes of the new class, by name.
    """
    kind = type(instance)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    instance.__class__ = type(kind.__name__, (kind,), {**named, **methods})
    return instance


def distribute_as(
    make: Callable[..., Any], optimizer: Any, reduction: ListReduction, ops: Any, given: Mapping[str, Any], passes: int
) -> Any:
    """Let an optimizer of Keras reduce gradients as the arguments of a `DistributedOptimizer` say; return it.

    Args:
        make: that function, which distributes a copy of the optimizer in the same way.
        optimizer, passes: as for `distribute`.
        reduction, ops: as for `Distribution`.
        given: the arguments, but for the optimizer.
    """
    # No groups: they are lists of variables that a copy does not have.
    again = partial(make, **{**given, "backward_passes_per_step": passes, "groups": None})
    factor = 1.0 if given["average_aggregated_gradients"] else float(passes)
    scale_local = given["scale_local_gradients"]
    how = Distribution(reduction, ops, given["process_set"], scale_local=scale_local, factor=factor, again=again)
    return distribute(optimizer, how, passes)


def distribute(optimizer: Any, distribution: Distribution, passes: int = 1) -> Any:
    """Let an optimizer reduce gradients over the ranks before it clips, accumulates and applies them; return it.

    An optimizer that scales losses reduces before it looks for overflows, so that all ranks find the same. If such a
    one is put around ``optimizer`` later, the reduction moves into that.

    Args:
        optimizer: one of Keras's, with or without variables already.
        distribution: how.
        passes: how many calls of `apply` make a step; its ``gradient_accumulation_steps`` from now on, unless 1.

    Raises:
        ConfigError: it reduces gradients already, ``passes`` comes too late, or two options do not go together.
    """
    base: Any = type(optimizer)
    if hasattr(base, "distribution"):
        raise ConfigError(
            "this is a DistributedOptimizer already, as a copy of one is; wrapped twice, it would reduce twice"
        )
    forget_note(optimizer)
    stepping = getattr(optimizer, "inner_optimizer", optimizer)
    if passes > 1 and stepping.gradient_accumulation_steps != passes:  # equal in what is copied, or was saved
        if stepping.built or stepping.gradient_accumulation_steps:
            raise ConfigError(
                "backward_passes_per_step is for an optimizer that has no variables yet and no "
                "gradient_accumulation_steps; that option of Keras does the same"
            )
        stepping.gradient_accumulation_steps = passes
    _require_equal_steps(optimizer, distribution)

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        variables = list(trained_variables(self) if trainable_variables is None else trainable_variables)
        if self.gradient_accumulation_steps:
            if not self.built:
                self.build(variables)
            grads = distribution.reduced_with_earlier(self, grads, variables)
        else:
            grads = distribution.reduced(grads, variables)
        base.apply(self, grads, None if trainable_variables is None else variables)

    def stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        if hasattr(self, "inner_optimizer"):  # then the base does not call `apply`
            state = list(zip(self.variables, optimizer_variables, strict=True))
            with distribution.reduction.of_values(list(trainable_variables), state):
                grads = distribution.reduced(grads, trained_variables(self))
        return base.stateless_apply(self, optimizer_variables, grads, trainable_variables)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        base.__setattr__(self, name, value)
        # An optimizer that scales losses sets this in its constructor, which `Model.compile` calls by itself. It looks
        # for overflows before it calls this one, and a rank that finds one does not call it.
        scaling = setting_object() if name == "loss_scale_factor" else None
        if getattr(scaling, "inner_optimizer", None) is self:
            distribute(scaling, distribution)
            set_class(self, base)
            with_methods(self, samples=samples, **{"__class__": plain})  # programs may still set samples here

    def register_local_var(self: Any, var: Any) -> None:
        distribution.local.append(var)
        _require_equal_steps(self, distribution)

    def synchronize(self: Any) -> None:
        for averages, variables in distribution.pending():
            base.apply(self, averages, variables)

    plain = property(lambda self: base)
    samples = property(lambda self: distribution.reduction.samples, lambda self, n: distribution.reduction.count(n))
    methods: dict[str, Any] = {"apply": apply, "stateless_apply": stateless_apply, "__setattr__": set_attribute}
    methods |= {"register_local_var": register_local_var, "synchronize": synchronize, "samples": samples}
    if distribution.again is not None:
        methods |= methods_of_copies(base, distribution.again, distribution.local)
    methods["__class__"] = plain
    made = with_methods(optimizer, distribution=distribution, **methods)
    known = weakref.ref(optimizer)
    distribution.reduction.settings = lambda: distribution.settings_of(known())
    return made


def built_optimizer(model: Any, optimizer: Any = None) -> Any:
    """Return the optimizer of a model, after it has made its variables.

    Args:
        model: of Keras.
        optimizer: of Keras; None: that with which the model was compiled.

    Raises:
        ConfigError: the model has no weights yet, or there is no optimizer.
    """
    optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if not model.built:
        raise ConfigError("the model has no weights yet: call model.build(input_shape) first")
    if optimizer is None:
        raise ConfigError("the model has no optimizer: compile it first, or give one")
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return optimizer


def sums_of_a_rank(optimizer: Any) -> Sequence[Any]:
    """Return the variables of sums that are each rank's own: of passes, where a step is not due yet. Collective.

    None are if the ranks have made different numbers of passes, as those have that begin beside one that resumes.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not optimizer.gradient_accumulation_steps:
        return ()
    passes = world().allgather(np.array([int(passes_made(optimizer))]))
    return accumulated(optimizer, trained_variables(optimizer)) if len(set(passes.tolist())) == 1 else ()


def variables_of(layers: Any) -> list[Any]:
    """Return the trainable variables of layers.

    Args:
        layers: of Keras, one or several, whose variables exist already; None: none.

    Raises:
        ConfigError: these are no layers.
    """
    listed = [layers] if callable(layers) else list(layers or ())
    if not all(hasattr(each, "trainable_weights") for each in listed):
        raise ConfigError(f"local_layers are layers of Keras, got {listed!r}")
    return [variable for layer in listed for variable in layer.trainable_weights]


def _require_equal_steps(optimizer: Any, distribution: Distribution) -> None:
    """Raise `ConfigError` if the optimizer scales losses or accumulates gradients where that would not be correct."""
    used = {
        STALENESS.feature: distribution.reduction.staleness,
        LOCAL_VARIABLES: distribution.local,
        LOSS_SCALES: hasattr(optimizer, "inner_optimizer"),
        ACCUMULATION: optimizer.gradient_accumulation_steps,
        GLOBAL_NORM: optimizer.global_clipnorm,
    }
    require_together([name for name, is_used in used.items() if is_used])
