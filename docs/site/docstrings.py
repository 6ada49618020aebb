"""What griffe, which reads sources and runs none, does not see: arguments that are declared once, and settings."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path[:0] = [str(Path(__file__).parents[2])]

from ringreduce.common.config import Config  # noqa: E402
from ringreduce.training.optimizers.user_options import GRADIENT_OPTIONS  # noqa: E402
from ringreduce.training.options.local_options import LOCAL_OPTIONS  # noqa: E402

_DECLARED = {"LOCAL_OPTIONS": LOCAL_OPTIONS, "GRADIENT_OPTIONS": GRADIENT_OPTIONS}


class DocstringsExtension(griffe.Extension):
    """Completes docstrings and signatures."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.path == "ringreduce.common.config.Config":
            assert cls.docstring is not None
            cls.docstring.value = Config.__doc__ or ""
        _complete(cls, cls.members.get("__init__"))

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        _complete(func, func)


def _complete(taker: Any, function: Any) -> None:
    """Give what takes declared arguments these in its signature and its docstring."""
    for decorator in taker.decorators:
        call = ast.parse(str(decorator.value), mode="eval").body
        name, _, method = ast.unparse(getattr(call, "func", call)).partition(".")
        if name in _DECLARED and method == "taken" and taker.docstring is not None:
            assert isinstance(call, ast.Call)

            def stub(*places: Any, **options: Any) -> None: ...

            stub.__doc__ = taker.docstring.value
            taken = _DECLARED[name].taken(*map(ast.literal_eval, call.args))(stub)
            own = {each.arg: ast.unparse(each.value) for each in call.keywords}
            taker.docstring.value = taken.__doc__ or ""
            _add(function.parameters, [*inspect.signature(taken).parameters.values()], own)


def _add(parameters: griffe.Parameters, declared: list[inspect.Parameter], defaults: dict[str, str]) -> None:
    by_name = [each for each in parameters if each.kind is griffe.ParameterKind.keyword_only]
    for each in [*by_name, *(each for each in parameters if "var" in each.kind.value)]:
        del parameters[each.name]
    for each in declared:
        kind = griffe.ParameterKind(each.kind.description)
        default = defaults.get(each.name, getattr(each.default, "name", repr(each.default)))
        parameters.add(griffe.Parameter(each.name, annotation=each.annotation, kind=kind, default=default))
    for each in by_name:
        parameters.add(each)
