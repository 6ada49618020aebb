"""What a program does between its collectives, for a trace: forward and backward passes, steps of optimizers.

Torch's global hooks for modules and optimizers report it; they are installed only while a trace is written. A training
step ends with the last step of an optimizer before the next forward pass, and the next one begins there.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ringreduce import runtime
from ringreduce.observe.seen.timeline import Program
from ringreduce.torch.private import at_end_of_pass, leaves
from ringreduce.training.binding.framework import remove_all


class _Phases:
    """Watches the thread on which it is made, and writes to a trace.

    Args:
        program: writes to the row of the trace.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._thread = threading.get_ident()
        self._depth = 0  # of modules that call each other
        self._forward_s = self._update_s = 0.0  # when they began
        self._steps = 0
        self._begun_s: float | None = None  # when the training step began
        self._updated_s: float | None = None  # when its last update ended, if there was one
        self._hooks = [
            register_module_forward_pre_hook(self._forward_begins),
            register_module_forward_hook(self._forward_ends, always_call=True),
            register_optimizer_step_pre_hook(self._update_begins),
            register_optimizer_step_post_hook(self._update_ends),
        ]

    def end(self) -> None:
        """Watch no more."""
        remove_all(self._hooks)
        self._end_step()

    def _forward_begins(self, module: torch.nn.Module, arguments: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._depth == 0:
            self._end_step()
            self._forward_s = perf_counter()
            self._begun_s = self._begun_s or self._forward_s
        self._depth += 1

    def _forward_ends(self, module: torch.nn.Module, arguments: object, output: Any) -> None:
        if threading.get_ident() != self._thread or self._depth == 0:
            return
        self._depth -= 1
        if self._depth:
            return
        self._program("forward", self._forward_s, perf_counter(), module=type(module).__name__)
        tensors = (each for each in leaves(output) if isinstance(each, torch.Tensor))
        first = next((each for each in tensors if each.requires_grad), None)
        if first is not None:
            first.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, gradient: object) -> None:
        """Take note that the pass has come to the output of the model; its loss comes before, and is not seen."""
        begin = perf_counter()

        def end() -> None:
            self._program("backward", begin, perf_counter())

        # What others want to have done at the end of the pass, DDP for one, is done before.
        at_end_of_pass(lambda: at_end_of_pass(end))

    def _update_begins(self, optimizer: object, arguments: object, options: object) -> None:
        self._update_s = perf_counter()

    def _update_ends(self, optimizer: object, arguments: object, options: object) -> None:
        self._updated_s = perf_counter()
        self._begun_s = self._begun_s or self._update_s
        self._program("optimizer", self._update_s, self._updated_s, optimizer=type(optimizer).__name__)

    def _end_step(self) -> None:
        """End the training step, if there was an update in it."""
        if self._updated_s is not None and self._begun_s is not None:
            self._program(f"step {self._steps}", self._begun_s, self._updated_s, step=self._steps)
            self._steps += 1
            self._begun_s = self._updated_s
            self._updated_s = None


def count_steps() -> None:
    """Let `ringreduce top` know of each step of an optimizer, from now on, and of what the first one trains."""
    measured = False

    def stepped(optimizer: torch.optim.Optimizer, arguments: object, options: object) -> None:
        nonlocal measured
        if not measured:
            measured = True
            trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
            runtime.trains(sum(each.numel() * each.element_size() for each in trained))
        runtime.count(steps=1)

    register_optimizer_step_post_hook(stepped)


_watching: _Phases | None = None


def follow(program: Program | None) -> None:
    """Write to a trace from now on; None: to no trace any more."""
    global _watching
    if _watching is not None:
        _watching.end()
    _watching = None if program is None else _Phases(program)
