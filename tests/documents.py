"""The pages of the documentation, and the examples in them."""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

#: A fenced block with its language, or what is to run before the blocks of its page and is not shown.
BLOCK = re.compile(
    r'^(?P<fence>```+)(?P<kind>[\w-]*)(?: title="(?P<title>[^"]*)")?[^\n]*\n(?P<text>.*?)^(?P=fence)',
    re.MULTILINE | re.DOTALL,
)
SETUP = re.compile(r"^<!-- example: setup\n(.*?)^-->", re.MULTILINE | re.DOTALL)

#: Bindings -> the library that they need.
BINDINGS = {f"ringreduce.{name}": name for name in ("jax", "keras", "tensorflow", "torch")}
#: What only the environment of `scripts/install frameworks` has.
FRAMEWORKS = {"flax", "jax", "keras", "optax", "tensorflow"}
#: What only the environment of `scripts/install engines` has; `tests/engines` runs these examples.
ENGINES = {"dask", "distributed", "pyarrow", "pyspark", "ray"}
#: What takes seconds to import, or a debugger; `tests/jobs/test_recipes.py` runs these examples.
JOBS = {"debugpy", "onnx", "peft", "webdataset"}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *kinds: str) -> list[tuple[int, str]]:
    """Return the fenced blocks of some languages, each with the number of the line before it."""
    text = page.read_text(encoding="utf-8")
    found = (each for each in BLOCK.finditer(text) if each["kind"] in kinds)
    return [(text.count("\n", 0, each.start("text")), each["text"]) for each in found]


def programs(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the programs in the Python of a page: the name of what to run, and its source.

    A block with a title is a whole program, which a reader saves as it stands. All others are one, from top to bottom,
    after the page's setup. Line numbers are those of the page.
    """
    text = page.read_text(encoding="utf-8")
    parts = ""
    for found in BLOCK.finditer(text):
        if found["kind"] != "python":
            continue
        line = text.count("\n", 0, found.start("text"))
        if found["title"]:
            yield f"{name_of(page)}:{line}", "\n" * line + found["text"]
        else:
            parts += "\n" * (line - parts.count("\n")) + found["text"]
    if parts:
        yield name_of(page), parts


def titled(page: Path) -> dict[str, str]:
    """Return the whole programs of a page, by the names of the files in which a reader saves them."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return {each["title"]: each["text"] for each in found if each["title"]}


def lacking(source: str) -> list[str]:
    """Return which libraries a program imports that this environment does not have."""
    return sorted(name for name in _imported(source) if importlib.util.find_spec(name) is None)


def _imported(source: str) -> set[str]:
    imports = [each for each in ast.walk(ast.parse(source)) if isinstance(each, (ast.Import, ast.ImportFrom))]
    names = [name.name for each in imports if isinstance(each, ast.Import) for name in each.names]
    names += [each.module for each in imports if isinstance(each, ast.ImportFrom) and each.module]
    return {name.partition(".")[0] for name in names} | {BINDINGS[name] for name in names if name in BINDINGS}


def run_example(page: Path, name: str, source: str) -> ModuleType:
    """Run a program of a page, as one that Python was started with; first the setup of the page, if it has one.

    The process group that a program of torch.distributed leaves is destroyed. Returns the program, with its variables.
    """
    program = ModuleType("__main__")
    if name == name_of(page):
        for setup in SETUP.findall(page.read_text(encoding="utf-8")):
            imports = "import torch\n" if "torch" in setup + source else ""
            exec(compile(imports + setup, f"{page} (setup)", "exec"), program.__dict__)
    try:
        exec(compile(source, str(page), "exec"), program.__dict__)
    finally:
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()
        _seed_anew()
    return program


def _seed_anew() -> None:
    """Let the next program draw what no other rank draws, as in a process of its own, whatever this one has seeded."""
    seed = int.from_bytes(os.urandom(4), "big")
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(seed)


def warnings_of(records: Iterable[logging.LogRecord]) -> list[str]:
    """Return what was warned of, but for which rank is late: that depends on the machine and what else runs on it."""
    texts = [each.getMessage() for each in records if each.levelno >= logging.WARNING]
    return [text for text in texts if not re.search(r"is last in \d+% of steps", text)]


def _example(page: Path, name: str, source: str) -> Any:
    marks = pytest.mark.smoke if _imported(source) & FRAMEWORKS else ()
    return pytest.param(page, name, source, id=name, marks=marks)


#: Each program in the pages, but for those of `JOBS`: the page, what the program is called, its source.
EXAMPLES = [
    _example(page, name, source)
    for page in PAGES
    for name, source in programs(page)
    if not _imported(source) & JOBS and "breakpoint()" not in source
]
