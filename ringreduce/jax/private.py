"""JAX's private parts; no other module of this binding touches any.

Each function says what it touches, why nothing public does the same, and what is done without it. All were tried with
the versions in `TRIED`. `jax.ffi` is public; what `ringreduce.jax.ffi` reads of XLA's structures is that of a major
version of XLA's interface, which `foreign_interface` tells.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import optax
from jax._src import effects as _effects
from jax._src import ffi as _ffi
from jax._src.interpreters import mlir as _mlir
from jax._src.lax.control_flow import loops as _loops
from jax.extend import core

from ringreduce.common.private_parts import Part, lacking, mentions

#: The versions of JAX with which all of this was tried; the tests run with the last one.
TRIED = ("0.5.0", "0.10.2")

#: The major version of XLA's foreign function interface that `ringreduce.jax.ffi` speaks.
_MAJOR = 0


def _no_trace_state(*, convention: str) -> Any:
    raise lacking(
        library="JAX",
        version=jax.__version__,
        part="jax.extend.core.get_opaque_trace_state",
        instead="give each collective of a compiled program a name",
    )


#: Return a value that is equal for two places of one trace of a program, given ``convention="ringreduce"``. Nothing
#: public tells whether a program is being traced, whatever it does with arrays. Where it is depends on the version of
#: JAX. Without it, it raises ConfigError.
trace_state: Callable[..., Any] = (
    getattr(core, "get_opaque_trace_state", None)
    or getattr(jax.core, "get_opaque_trace_state", None)
    or _no_trace_state
)


def foreign_interface() -> int:
    """Return the major version of the interface by which XLA calls functions, as jaxlib's header has it.

    The layout of its structures is stable within one. With another one, compiled programs cannot call collectives.
    """
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    match = re.search(r"#define XLA_FFI_API_MAJOR (\d+)", header.read_text(encoding="utf-8"))
    return int(match[1]) if match else -1


#: The effect of foreign calls, and what functions with a gradient of their own may have.
_FFI_EFFECT = getattr(_ffi, "FfiEffect", None)
_allowed: Any = getattr(_effects, "custom_derivatives_allowed_effects", None)

#: What changes programs before they are compiled; see `before_compiling`.
_changes: list[Callable[[Any], None]] = []


def before_compiling(change: Callable[[Any], None]) -> None:
    """Let a function change each program, a module of StableHLO, that JAX has lowered and is about to compile.

    Nothing public sees the whole of a program: rules by which primitives are lowered see their own operation, and that
    once for all calls of a function that is traced once. Without it, nothing is changed.
    """
    _intercept()
    _changes.append(change)


@cache
def _intercept() -> None:
    lower = getattr(_mlir, "lower_jaxpr_to_module", None)
    if lower is None:
        return

    @wraps(lower)
    def lower_and_change(*given: Any, **named: Any) -> Any:
        lowered = lower(*given, **named)
        for change in _changes:
            change(lowered.module)
        return lowered

    _mlir.lower_jaxpr_to_module = lower_and_change


def keep_in_loops(target: str) -> None:
    """Keep foreign calls of a target in each step of the loops (`jax.lax.scan`) that JAX differentiates.

    JAX moves computations that are the same in each step before the loop: it would send a message once that the other
    rank receives in each step. No public option prevents this. Without it, the arrays of these calls must depend on the
    step.
    """
    hoist = getattr(_loops, "_scan_known_hoisting", None)
    if hoist is None:
        return

    @wraps(hoist)
    def hoist_others(jaxpr: Any, constants: Any, residuals: int) -> Any:
        if _calls(jaxpr, target):
            return jaxpr, constants, [False] * residuals, []
        return hoist(jaxpr, constants, residuals)

    _loops._scan_known_hoisting = hoist_others


def _calls(jaxpr: Any, target: str) -> bool:
    """Return whether a program of JAX, or one within it, makes foreign calls of a target."""
    for equation in jaxpr.eqns:
        if equation.params.get("target_name") == target:
            return True
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                if hasattr(inner, "eqns") and _calls(inner, target):
                    return True
    return False


def let_messages_into_gradients() -> None:
    """Let functions with a gradient of their own (`jax.custom_vjp`) make foreign calls that must not be left out.

    JAX allows such calls in loops and conditions, and refuses them in these functions; no public function changes that.
    Without it, `reduce`, `gather` and messages cannot be compiled with gradients.
    """
    if _FFI_EFFECT is not None and _allowed is not None:
        _allowed.add_type(_FFI_EFFECT)


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of those that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)


@cache
def _codes_in(function: str) -> frozenset[CodeType]:
    """Return the code of a function of optax, given by its dotted name, and of those that it defines; none without."""
    part: Any = optax
    for name in function.split("."):
        part = getattr(part, name, None)
    code = getattr(part, "__code__", None)
    return frozenset() if code is None else frozenset(_codes_of(code))


def around_that_skips() -> str | None:
    """Return the transformation of optax that calls the code that asks, and may leave out its step; None: none does.

    `optax.apply_if_finite` leaves out steps with NaN, and `optax.MultiSteps` those that its ``should_skip_update_fn``
    rejects. By the stack: a transformation does not know which one is around it, and the branches of a condition do not
    know on what it depends. Without it, ranks that leave out a step on their own are a collective behind from then on.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _codes_in("apply_if_finite"):
            return "optax.apply_if_finite"
        if frame.f_code is optax.MultiSteps.update.__code__:
            skips = getattr(frame.f_locals["self"], "_should_skip_update_fn", None)
            # Its own function skips nothing.
            if getattr(skips, "__code__", None) not in _codes_in("MultiSteps.__init__"):
                return "optax.MultiSteps with should_skip_update_fn"
        frame = frame.f_back
    return None


def _knows_what_skips() -> bool:
    is_set = mentions(optax.MultiSteps.__init__, "_should_skip_update_fn")
    return is_set and all(_codes_in(name) for name in ("apply_if_finite", "MultiSteps.__init__"))


PARTS = (
    Part("trace_state", lambda: trace_state is not _no_trace_state, "collectives of compiled programs need a name"),
    Part(
        "before_compiling",
        lambda: hasattr(_mlir, "lower_jaxpr_to_module"),
        "ranks whose programs compute different things may mix the collectives of a function that is traced once",
    ),
    Part(
        "keep_in_loops",
        lambda: hasattr(_loops, "_scan_known_hoisting"),
        "a collective whose arrays are the same in each step of a lax.scan may be made once, where that has a gradient",
    ),
    Part(
        "let_messages_into_gradients",
        lambda: None not in (_FFI_EFFECT, _allowed),
        "reduce, gather and messages cannot be compiled with gradients",
    ),
    Part(
        "around_that_skips", _knows_what_skips, "apply_if_finite or MultiSteps around a transformation is not refused"
    ),
    Part("foreign_interface", lambda: foreign_interface() == _MAJOR, "compiled programs cannot call collectives"),
)
