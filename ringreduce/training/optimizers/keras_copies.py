"""Copies of distributed optimizers of Keras, and of models that have one; and what a file says of such an optimizer.

Keras copies and pickles by what it writes to files, and makes optimizers of their config: plain ones, with which each
rank would train alone. Here copies are distributed as the original is. What Keras loads from a file stays plain, and
warns when it makes a step; the file says how the optimizer was distributed, in a part that Keras passes over.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.runtime import is_initialized, rank, size
from ringreduce.training.binding.keras_private import trained_variables
from ringreduce.training.compression.tensors import wire_format_of

_log = logging.getLogger(__name__)

_FILE = "ringreduce.json"
_MOST_CHARACTERS = 1 << 16
#: The options of a `DistributedOptimizer` that a file has as they are.
_PLAIN = (
    "sparse_as_dense",
    "backward_passes_per_step",
    "gradient_predivide_factor",
    "average_aggregated_gradients",
    "scale_local_gradients",
    "staleness",
)

#: Where the variables of this rank's own are among those that an optimizer trains; None: that is unknown.
Places = Sequence[int] | None


class _Name(str):
    """The name of an optimizer, in its config, that knows how to distribute what is made of this config."""

    again: Callable[[Any], Any]
    local: Places

    def __new__(cls, name: Any, again: Callable[[Any], Any], local: Places) -> _Name:
        self = super().__new__(cls, name)
        self.again = again
        self.local = local
        return self

    def __deepcopy__(self, memo: object) -> _Name:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


def methods_of_copies(base: Any, again: partial[Any], local: Sequence[Any]) -> dict[str, Any]:
    """Return the methods of a distributed optimizer by which it is copied and saved.

    Args:
        base: its class without these.
        again: distributes another one in the same way; has the options as keywords.
        local: the variables of this rank's own, now and later.
    """

    def places(optimizer: Any) -> Places:
        known = {id(each): place for place, each in enumerate(trained_variables(optimizer) if local else ())}
        found = [known.get(id(each)) for each in local]
        return None if None in found else [each for each in found if each is not None]

    def reduced(self: Any) -> tuple[Any, ...]:
        load, arguments = base.__reduce__(self)  # the class that ``load`` belongs to has no name
        return remade, (getattr(base, load.__name__), arguments, again, places(self))

    def get_config(self: Any) -> dict[str, Any]:
        config: dict[str, Any] = base.get_config(self)
        name = _Name(config.get("name"), again, None if local else ())
        return {**config, "name": name} if "name" in config else config

    def from_config(kind: Any, config: dict[str, Any], custom_objects: Any = None) -> Any:
        made = base.from_config(config, custom_objects)
        return _copied(made, again, None if local else ())

    def save_assets(self: Any, directory: str) -> None:
        with open(os.path.join(directory, _FILE), "w") as file:
            json.dump({**_options_of(again), "local": places(self)}, file, default=methodcaller("item"))

    methods: dict[str, Any] = {"__reduce__": reduced, "get_config": get_config, "save_assets": save_assets}
    return {**methods, "from_config": classmethod(from_config), "places_of_local": places}


def remade(load: Callable[..., Any], arguments: Sequence[Any], again: partial[Any], local: Places) -> Any:
    """Return what a function of Keras loads, a model or an optimizer, distributed as what it is a copy of."""
    made = load(*arguments)
    _copied(getattr(made, "optimizer", made), again, local)
    return made


def _copied(optimizer: Any, again: Callable[[Any], Any], local: Places) -> Any:
    """Distribute what this copies, unless it is distributed or this process is no rank; return it."""
    if is_initialized() and not hasattr(optimizer, "distribution"):
        distribute_again(optimizer, again, local)
    return optimizer


def distribute_again(optimizer: Any, again: Callable[[Any], Any], local: Places) -> None:
    """Distribute a loaded or copied optimizer.

    Raises:
        ConfigError: some variables are this rank's own, and it is unknown which.
    """
    if local is None or (local and not optimizer.built):
        raise ConfigError(
            "this is a copy of an optimizer that leaves some variables to each rank, and it is unknown which of the "
            "copy's these are: make another optimizer, and give it to PartialDistributedOptimizer with its local_layers"
        )
    again(optimizer)
    for place in local:
        optimizer.register_local_var(trained_variables(optimizer)[place])


def keep_copies_distributed(keras: Any) -> None:
    """Let copies of models, and optimizers that are made of a config, be distributed as the original is.

    Three public methods of classes of Keras see to that; they do nothing about what has no `DistributedOptimizer`.

    Args:
        keras: the library.
    """
    kinds = keras.optimizers
    if getattr(kinds.Optimizer, "load_assets", None) is _note:
        return
    kinds.Optimizer.load_assets = _note
    for kind in (kinds.Optimizer, kinds.LossScaleOptimizer):
        kind.from_config = classmethod(_before(kind.from_config.__func__, _from_config))
    keras.Model.__reduce__ = _before(keras.Model.__reduce__, _reduced)


def _before(replaced: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a function with the method that it replaces, and its own arguments."""

    def method(*arguments: Any, **options: Any) -> Any:
        return function(replaced, *arguments, **options)

    return method


def _from_config(make: Callable[..., Any], kind: Any, config: dict[str, Any], custom_objects: Any = None) -> Any:
    name = config.get("name")
    made = make(kind, config, custom_objects)
    return _copied(made, name.again, name.local) if isinstance(name, _Name) else made


def _reduced(reduce: Callable[[Any], tuple[Any, ...]], model: Any) -> tuple[Any, ...]:
    load, arguments = reduce(model)
    optimizer: Any = getattr(model, "optimizer", None)
    if not hasattr(optimizer, "distribution"):
        return load, arguments
    return remade, (load, arguments, optimizer.distribution.again, optimizer.places_of_local())


# ---- files ----


def _options_of(again: partial[Any]) -> dict[str, Any]:
    given = again.keywords
    together = given["process_set"]
    compression = given["compression"]
    wire = getattr(compression, "__name__", None)  # one of the program's own, which it has to give again
    with suppress(ConfigError):
        wire = getattr(wire_format_of(compression), "wire", None)
    return {
        **{name: given[name] for name in _PLAIN},
        "op": ReduceOp.parse(given["op"]).value,
        "compression": wire,
        "process_set": None if together.process_set_id == 0 else together.ranks,
    }


def _note(optimizer: Any, directory: str | None) -> None:
    """Keep what a file says of a distributed optimizer, which this plain one is loaded from, until it makes a step."""
    path = os.path.join(directory, _FILE) if directory else ""
    if not os.path.isfile(path):
        return
    with open(path) as file:
        said = file.read(_MOST_CHARACTERS)

    stepping = _stepping(optimizer)

    def apply(*arguments: Any, **options: Any) -> Any:
        forget_note(stepping)
        if is_initialized() and size() > 1 and rank() == 0:
            _log.warning(
                "this %s was saved as a DistributedOptimizer and is none since it was loaded: each rank trains alone. "
                "Load the model by hvd.load_model, or give its optimizer to hvd.DistributedOptimizer",
                type(stepping).__name__,
            )
        return stepping.apply(*arguments, **options)

    apply.saved = said  # type: ignore[attr-defined]
    stepping.apply = apply


def _stepping(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)


def _said_of(optimizer: Any) -> str | None:
    return getattr(vars(_stepping(optimizer)).get("apply"), "saved", None)


def forget_note(optimizer: Any) -> None:
    """Let an optimizer make steps without a warning, as it is distributed now or has warned."""
    if _said_of(optimizer) is not None:
        del _stepping(optimizer).apply


def saved_options(optimizer: Any) -> dict[str, Any]:
    """Return the options that a loaded optimizer was distributed with, and as ``local`` its `Places`; or nothing.

    Raises:
        ConfigError: the file says something else.
    """
    try:
        found = dict(json.loads(_said_of(optimizer) or "{}"))
    except ValueError as error:
        raise ConfigError(f"the file of this model has a damaged {_FILE}: {error}") from None
    return {name: found[name] for name in (*_PLAIN, "op", "compression", "process_set", "local") if name in found}
