"""Names of what is reduced, equal on all ranks however much their processes have counted.

Frameworks number layers and variables by counters of the process: ``dense_1/kernel`` of one rank is ``dense/kernel`` of
another that has built a layer less. And operations that are matched by name need different names for the gradients of
two models, or ranks that step them in different orders would average those of one with those of the other.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ringreduce.engine import About, CollectiveOp, Engine
from ringreduce.runtime.process_sets import ProcessSet

_COUNTER = re.compile(r"_(\d+)(?=$|[/:_])")
_CONTAINERS = "sequential", "functional"  # as Keras names those that the program gives no name
_FLATTENED = 2  # underscores, at least, in the name that an optimizer makes of the path of a variable and its own word
_REMEMBERED = 4096  # identities of equal words

#: Numbers all that is made in this process.
numbers = count(1)


class ScopedName(str):
    """The name of a variable of TensorFlow or Keras, without the counters of the process and containers without names.

    A model that was loaded from a file may lack further containers in the paths of its variables: see `agree`.
    """

    __slots__ = ()

    def __new__(cls, path: str) -> ScopedName:
        *scopes, last = _COUNTER.sub("", path).split("/")
        kept = [each for each in scopes if each not in _CONTAINERS]
        for each in _CONTAINERS:
            last = last.removeprefix(f"{each}_") or last
        return super().__new__(cls, "/".join([*kept, last]))

    @property
    def inner(self) -> str:
        """The name in its innermost scope: ``dense/kernel``."""
        return "/".join(self.split("/")[-2:])


def counters(path: str) -> tuple[int, ...]:
    """Return how the process has counted, in each part of a path: of two models, that made first has the lower ones."""
    found = [_COUNTER.findall(each.partition(":")[0]) for each in path.split("/")]
    return tuple(int(each[-1]) if each else 0 for each in found)


def agreed_names(paths: Iterable[str]) -> dict[str, str]:
    """Return names that are equal on all ranks, by those of this process; those that become equal are numbered."""
    seen = Counter[str]()
    names = {}
    for path in sorted(paths, key=lambda each: (ScopedName(each), counters(each))):
        name = ScopedName(path)
        names[path] = f"{name} {seen[name] + 1}" if seen[name] else str(name)
        seen[name] += 1
    return names


def agree(names: Sequence[str], scoped: bool) -> bool:
    """Return whether names can be those of one array on different ranks.

    Args:
        names: of each rank.
        scoped: whether they are `ScopedName`s: then some may lack outer scopes.
    """
    longest = max(names, key=len)
    return all(each == longest or (scoped and _is_inner(each, longest)) for each in names)


def _is_inner(name: str, longer: str) -> bool:
    if longer.endswith(f"/{name}"):
        return True
    (scope, _, last), (longer_scope, _, longer_last) = name.rpartition("/"), longer.rpartition("/")
    flattened = scope == longer_scope != "" and last.count("_") >= _FLATTENED
    return flattened and longer_last.endswith(f"_{last}")


class Identity(NamedTuple):
    """What reductions are of: the gradients of one model.

    Attributes:
        words: its arrays, in words that are equal on all ranks; other models may have the same.
        made: numbers of this process that are greater for what was made later, and different for different models.
            Those of other ranks may be others, in the same order.
    """

    words: str
    made: tuple[int, ...]


def identity_of(kind: str, arrays: Sequence[tuple[str, Any]], made: tuple[int, ...]) -> Identity:
    """Return an identity.

    Args:
        kind: of the reduction.
        arrays: names, and shapes or what else tells arrays apart; printed alike on all ranks.
        made: see `Identity`.
    """
    if not arrays:
        return Identity(f"{kind} over no arrays", made)
    names = [getattr(name, "inner", name) for name, _ in arrays]
    told = zlib.crc32(repr([(name, each) for name, (_, each) in zip(names, arrays, strict=True)]).encode())
    some = names[0] if len(names) == 1 else f"{len(names)} arrays, {names[0]} to {names[-1]}"
    return Identity(f"{kind} over {some} ({told:08x})", made)


#: By engine and words, the names that were given, by what they were made as.
_names: WeakKeyDictionary[Engine, dict[str, dict[tuple[int, ...], str]]] = WeakKeyDictionary()


def name_in(engine: Engine, identity: Identity | str) -> str:
    """Return the name of an identity among the ranks of an engine: its words, and a number in the order of first use.

    Words alone are those of something new.

    If models of equal words were made in another order than they are used first, the name says so. Then ranks do not
    take different models for one: the order in which they were made is the same on all ranks.
    """
    if isinstance(identity, str):
        return engine.new_name(identity)
    known = _names.setdefault(engine, {}).setdefault(identity.words, {})
    name = known.get(identity.made)
    if name is None:
        later = sum(each > identity.made for each in known)
        name = engine.new_name(identity.words) + f", made before {later} of these" * (later > 0)
        if len(known) == _REMEMBERED:
            del known[next(iter(known))]
        known[identity.made] = name
    return name


def meet(kind: str, identity: Identity, process_set: ProcessSet) -> None:
    """Wait until all ranks begin with something new; some may be in a step of something else, which is an error."""
    if process_set.included() and process_set.size() > 1:
        name = f"the first step of a {kind}"
        about = About(f"the first step of {identity.words}")
        process_set.engine.run(CollectiveOp(name, "a first step", lambda ranks: None, about=about))
