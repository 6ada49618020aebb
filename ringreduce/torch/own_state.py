"""What the state of an optimizer may be: tensors, and whatever pickle copies, such as numbers, lists and dicts of them.

Optimizers change state in place, tensors and lists alike. So what a rank has is compared, and given to other ranks, by
value: as the tensors in it, and as a pickle of everything else, the value's form.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ringreduce.common.errors import ConfigError

#: The form of a tensor.
TENSOR = b""


class Apart(NamedTuple):
    """A value of an optimizer's state, taken apart.

    Attributes:
        form: all but the tensors. Values of the same form are equal but for these.
        tensors: in it, those that are the same object once.
    """

    form: bytes
    tensors: list[torch.Tensor]


def is_dense(value: object) -> bool:
    """Return whether this is a tensor that is no more than its elements in host memory."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not value.requires_grad
    )


def apart(name: Hashable, value: Any, takes: Callable[[Any], bool] = is_dense) -> Apart:
    """Take a value apart.

    Args:
        name: of the value, in the state of a parameter.
        value: any.
        takes: returns whether an object is a tensor that goes apart; others are a part of the form.

    Raises:
        ConfigError: pickle cannot copy the value.
    """
    if takes(value):
        return Apart(TENSOR, [value])
    file = io.BytesIO()
    pickler = _Pickler(file, takes)
    try:
        pickler.dump(value)
    except Exception as error:  # pickle raises whatever the value raises
        raise ConfigError(
            f"the optimizer's state {name!r} is of type {type(value).__name__}, and pickle cannot copy it ({error}): "
            "other ranks need it by value. Keep tensors, numbers, text, None, and lists, tuples and dicts of these in "
            "the state, and other things in attributes of the optimizer"
        ) from error
    return Apart(file.getvalue(), pickler.tensors)


def together(form: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a new value of a form, with these tensors."""
    if form == TENSOR:
        return tensors[0]
    return _Unpickler(io.BytesIO(form), tensors).load()


def load(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state dict, values of all kinds as they are; torch makes text to ``"<generator ...>"``.

    Args:
        optimizer: gets it.
        saved: of its ``state_dict()``.
    """
    optimizer.load_state_dict(dict(saved))
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):  # a hook may have changed what was saved
        loaded = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, (torch.Tensor, int, float)) or name not in loaded:
                continue
            try:
                form, tensors = apart(name, value, torch.is_tensor)
                now = apart(name, loaded[name], torch.is_tensor)
            except ConfigError:  # it stays on this rank
                continue
            if now.form != form and len(now.tensors) == len(tensors):
                loaded[name] = together(form, now.tensors)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, takes: Callable[[Any], bool]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._takes = takes

    def persistent_id(self, value: Any) -> int | None:
        if not self._takes(value):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]
