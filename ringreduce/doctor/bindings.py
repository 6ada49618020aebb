"""What each binding says of the private parts of its library that it touches; a process for each is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

#: By the library, the module that touches its private parts.
PRIVATE = {
    "numpy": "ringreduce.buffers.numpy_private",
    "torch": "ringreduce.torch.private",
    "tensorflow": "ringreduce.tensorflow.private",
    "keras": "ringreduce.keras.private",
    "jax": "ringreduce.jax.private",
}

_SOURCE = (
    "import json; from {} import PARTS; from ringreduce.common.private_parts import missing; "
    "print(json.dumps([len(PARTS), missing(PARTS)]))"
)
_LIMIT_S = 120.0  # for the imports of all frameworks, beside each other
#: Or they would take memory of GPUs, and write much.
_ON_THE_CPU = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclass(frozen=True, slots=True)
class Binding:
    """The private parts of a library.

    Attributes:
        count: how many there are.
        missing: those that are not as expected in this version, by the function that touches them, and what is lost.
        problem: why the binding could not be asked; empty if it was.
    """

    count: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    def in_words(self, library: str, ours: str) -> tuple[str, str]:
        """Return what was found, and what to do about it; the second is empty where nothing needs to be done.

        Args:
            library: its name and version.
            ours: the binding's name.
        """
        if self.problem:
            return f"{library}: {self.problem}", f"{ours} cannot be imported as it is."
        works = self.count - len(self.missing)
        text = f"{library}: {works} of {self.count} private part{'s' * (self.count != 1)} as expected"
        if not self.missing:
            return text, ""
        costs = "; ".join(f"without {part} {cost}" for part, cost in self.missing.items())
        remedy = f"W{costs[1:]}. An earlier version of the library may have what is missing."
        return f"{text}, not {', '.join(self.missing)}", remedy


def ask(packages: Mapping[str, str]) -> dict[str, Binding]:
    """Return what the bindings of installed libraries say, by library. Local; takes as long as to import all of them.

    Args:
        packages: those that are installed, by name.
    """
    asked = [name for name in PRIVATE if name in packages]
    with ThreadPoolExecutor(len(PRIVATE)) as pool:
        return dict(zip(asked, pool.map(_answer, asked), strict=True))


def _answer(library: str) -> Binding:
    command = [sys.executable, "-c", _SOURCE.format(PRIVATE[library])]
    environment = {**os.environ, **_ON_THE_CPU}
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, text=True, env=environment, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return Binding(problem=f"its import takes longer than {_LIMIT_S:g} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"its import ended with exit status {done.returncode}"]
        return Binding(problem=lines[-1])
    try:
        return Binding(*json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        return Binding(problem=f"its import ends with {done.stdout[-80:]!r}")
