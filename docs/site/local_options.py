"""What griffe, which reads sources and runs none, does not see of classes that `local_options` decorates."""

from __future__ import annotations

import sys
from inspect import Signature
from pathlib import Path
from typing import Any

import griffe

sys.path[:0] = [str(Path(__file__).parents[2])]

from ringreduce.training.options.local_options import completed, described  # noqa: E402


class LocalOptionsExtension(griffe.Extension):
    """Completes their docstrings and signatures."""

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if not any(str(each.value) == "local_options" for each in cls.decorators) or cls.docstring is None:
            return
        cls.docstring.value = described(cls.docstring.value)
        parameters = cls.members["__init__"].parameters
        options = next(each for each in parameters if each.kind is griffe.ParameterKind.var_keyword)
        del parameters[options.name]
        for name, each in completed(Signature()).parameters.items():
            kind = griffe.ParameterKind.keyword_only
            parameters[name] = griffe.Parameter(name, annotation=each.annotation, kind=kind, default=repr(each.default))
