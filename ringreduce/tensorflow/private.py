"""TensorFlow's private parts; no other module of this binding touches any.

Each function says what it touches, why nothing public does the same, and what is done without it. All were tried with
the versions in `TRIED`. Those of Keras's optimizers are in `ringreduce.training.binding.keras_private`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import tensorflow as tf

from ringreduce.common.private_parts import Part, lacking, mentions

#: The versions of TensorFlow with which all of this was tried; the tests run with the last one.
TRIED = ("2.18.0", "2.21.0")


def _found(module: str, name: str) -> Any:
    """Return what a module of TensorFlow's Python sources has under a name; None: it is not there."""
    try:
        return getattr(import_module(f"tensorflow.python.{module}"), name, None)
    except ImportError:
        return None


# ---- errors ----


def make_unknown_errors_by(make: Callable[..., BaseException]) -> None:
    """Let a function make all errors of which TensorFlow knows only the text, for the whole process.

    Of what Python raises in a graph TensorFlow makes a `tf.errors.UnknownError`; nothing public chooses another one. It
    becomes ``UnknownError.__new__``. Without effect, programs get an `UnknownError` with the text of ours.
    """
    unknown: Any = tf.errors.UnknownError
    unknown.__new__ = make


def error_fields(text: str, code: int) -> dict[str, Any]:
    """Return the attributes of TensorFlow's errors, which its constructor would overwrite ours with.

    Args:
        text: of the error.
        code: of its class.
    """
    return {"_node_def": None, "_op": None, "_message": text, "_error_code": code, "_experimental_payloads": {}}


# ---- graphs ----


def creation_number(variable: Any) -> int:
    """Return a number that is greater for a variable that was made later, of two of the same name.

    By ``_unique_id``; nothing public tells. Without it, it is 0: such variables are taken in the order of the program.
    """
    own = str(getattr(variable, "_unique_id", "")).rpartition("_")[2]
    return int(own) if own.isdigit() else 0


_possible: Callable[[Sequence[Any]], int] | None = _found("pywrap_tfe", "TFE_Py_TapeSetPossibleGradientTypes")

#: Return how many derivatives may be asked for of what becomes of tensors. Nothing public tells whether a tape records
#: them. Without it, it is always 1: collectives at once prepare for a derivative, which takes longer.
possible_gradients: Callable[[Sequence[Any]], int] = _possible or (lambda tensors: 1)

_in_xla: Callable[[Any], bool] | None = _found("ops.control_flow_util", "GraphOrParentsInXlaContext")


def is_for_xla(graph: Any) -> bool:
    """Return whether XLA is to compile a graph.

    Nothing public tells. Without ``GraphOrParentsInXlaContext`` it is False: the error is XLA's, which says less.
    """
    return _in_xla is not None and _in_xla(graph)


def control_flow_of(graph: Any) -> Any:
    """Return the branch or loop of a graph of TensorFlow 1 that is being made; None: it is in none.

    Operations of a branch may not wait for those of another, and nothing public tells which one it is.

    Raises:
        ConfigError: this version has no ``_get_control_flow_context``.
    """
    if not hasattr(graph, "_get_control_flow_context"):
        raise lacking(
            library="TensorFlow",
            version=tf.__version__,
            part="Graph._get_control_flow_context",
            instead="use tf.function in place of sessions",
        )
    return graph._get_control_flow_context()


# ---- tapes ----


def end_recording(tape: Any) -> None:
    """Let a tape that is asked for gradients once record nothing any more, of what is done until it is asked.

    The public ``stop_recording`` goes on recording afterwards. Without ``_pop_tape``, the tape records until its block
    ends: how the gradients are computed, too.
    """
    is_recording = getattr(tape, "_recording", False) and not getattr(tape, "_persistent", True)
    if is_recording and hasattr(tape, "_pop_tape"):
        tape._pop_tape()


def copy_of_tape(tape: Any) -> Any:
    """Return a copy of a tape whose end does not end the recording.

    Sets ``_recording``; nothing public copies tapes. Without it, the copy's block may not be left.
    """
    copied = copy.copy(tape)
    copied._recording = False
    return copied


# ---- what is there ----


def _sets_fields() -> bool:
    return all(mentions(tf.errors.OpError.__init__, name) for name in error_fields("", 0))


#: All parts but what `make_unknown_errors_by` sets, which any class has.
PARTS = (
    Part("error_fields", _sets_fields, "errors that are TensorFlow's as well lack what those have"),
    Part(
        "creation_number",
        lambda: hasattr(tf.Variable(0.0), "_unique_id"),
        "variables of one name may be paired wrongly between ranks",
    ),
    Part("possible_gradients", lambda: _possible is not None, "collectives outside of graphs take longer"),
    Part("is_for_xla", lambda: _in_xla is not None, "the error with jit_compile=True says less"),
    Part(
        "control_flow_of",
        lambda: hasattr(tf.Graph, "_get_control_flow_context"),
        "sessions of TensorFlow 1 cannot be used",
    ),
    Part(
        "end_recording",
        lambda: all(hasattr(tf.GradientTape(), name) for name in ("_recording", "_persistent", "_pop_tape")),
        "DistributedGradientTape needs more memory",
    ),
    Part("copy_of_tape", lambda: hasattr(tf.GradientTape(), "_recording"), "DistributedGradientTape fails"),
)
