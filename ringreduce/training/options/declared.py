"""Arguments that bindings have in common, declared once: in a `TypedDict`, whose docstring has an entry for each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack  # in typing from Python 3.11 on; bindings import it from here

_Taker = TypeVar("_Taker", bound=Callable[..., Any])

_ENTRY = re.compile(r"^ {4}([\w, ]+): .*\n(?: {5,}.*\n)*", re.MULTILINE)
_OPTIONS = re.compile(r"^ {4}\*\*options: .*\n(?: {5,}.*\n)*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Declared:
    """Arguments for several classes and functions.

    Attributes:
        table: a `TypedDict` of their types, with the section ``Attributes`` in its docstring.
        defaults: their values where callers leave them out.
        more: types and entries of arguments that the table has no entry for, by name; ``*`` stands for all of them.
    """

    table: type
    defaults: Mapping[str, Any]
    more: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def taken(self, places: str = "", named: str | None = None, **defaults: Any) -> Callable[[_Taker], _Taker]:
        """Return a decorator for a class or a function that takes such arguments by ``*places`` and ``**options``.

        Its signature and its docstring get them in place of these, each with its default. It is called with all of
        them, also those that the caller left out, by their names. Entries of its own docstring stay.

        Args:
            places: names of those that callers may give by their place, in this order.
            named: of those that they give by name alone; None: all others.
            defaults: of this taker, in place of the common ones.
        """
        by_place = places.split()
        others = [name for name in self.table.__annotations__ if name not in by_place]
        words = others if named is None else named.split()
        by_name = [name for word in words for name in (self.more if word == "*" else (word,))]

        def decorate(taker: _Taker) -> _Taker:
            decorated: Any = taker
            is_class = isinstance(taker, type)
            make = decorated.__init__ if is_class else taker
            signature = _completed(inspect.signature(make), self.parameters(by_place, by_name, defaults))
            called = f"{decorated.__name__}.__init__()" if is_class else f"{decorated.__name__}()"

            @wraps(make)
            def complete(*arguments: Any, **options: Any) -> Any:
                try:
                    bound = signature.bind(*arguments, **options)
                except TypeError as error:
                    raise TypeError(f"{called} {error}") from None
                bound.apply_defaults()
                common = {name: bound.arguments.pop(name) for name in (*by_place, *by_name)}
                return make(*bound.args, **bound.kwargs, **common)

            vars(complete)["__signature__"] = signature
            documentation = self.described(decorated.__doc__ or "", (*by_place, *by_name))
            if is_class:
                decorated.__init__ = complete
            else:
                decorated = complete
            decorated.__doc__ = documentation
            return cast(_Taker, decorated)

        return decorate

    def parameters(self, places: Sequence[str], named: Sequence[str], defaults: Mapping[str, Any]) -> list[Parameter]:
        """Return arguments with a place, and others that have none, as parameters; ``defaults`` as for `taken`."""
        kinds = {
            **dict.fromkeys(places, Parameter.POSITIONAL_OR_KEYWORD),
            **dict.fromkeys(named, Parameter.KEYWORD_ONLY),
        }
        values = {**self.defaults, **defaults}
        types = {name: each.__forward_arg__ for name, each in self.table.__annotations__.items()}
        types |= {name: annotation for name, (annotation, _) in self.more.items()}
        return [Parameter(name, kind, default=values[name], annotation=types[name]) for name, kind in kinds.items()]

    def described(self, docstring: str, names: Sequence[str]) -> str:
        """Return a docstring with entries of these arguments, those that it has or those of the table, in their order.

        They stand where it has ``**options``.
        """
        text = f"{inspect.cleandoc(docstring)}\n"
        more = "".join(f"    {name}: {meaning}\n" for name, (_, meaning) in self.more.items())
        common = f"{inspect.cleandoc(self.table.__doc__ or '')}\n{more}"
        entries: dict[str, str] = {}
        for found in [*_ENTRY.finditer(text), *_ENTRY.finditer(common)]:
            lacking = [name for name in found[1].split(", ") if name in names and name not in entries]
            if lacking:
                entries |= {**dict.fromkeys(lacking, ""), lacking[0]: found[0].replace(found[1], ", ".join(lacking), 1)}
                text = text.replace(found[0], "", 1)
        return _OPTIONS.sub(lambda _: "".join(map(entries.__getitem__, names)), text).rstrip()


def _completed(signature: Signature, common: Sequence[Parameter]) -> Signature:
    """Return a signature with arguments in place of ``*places`` and ``**options``."""
    everyone = [*signature.parameters.values()]
    first = [each for each in everyone if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
    last = [each for each in everyone if each.kind is Parameter.KEYWORD_ONLY]
    return signature.replace(parameters=[*first, *common, *last])
