"""`__all__`, where a module hands out names of others, is complete, sorted, and nothing but what is there.

A module that hands out only what it defines needs none: its names without an underscore are public.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringreduce
from ringreduce import runtime

PACKAGE = Path(__file__).parents[2] / "ringreduce"
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
LISTING = [path for path, source in SOURCES.items() if "\n__all__ = " in source]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the public names that a module defines at its top level, not those that it imports."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # Constants; type variables and short names for types are nobody else's business.
            names = [
                target.id
                for target in targets
                if isinstance(target, ast.Name) and target.id.isupper() and len(target.id) > 1
            ]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def rank_of(name: str) -> tuple[int, str]:
    """Order names as ruff does: CONSTANTS, Classes, functions; alphabetical within each."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("path", LISTING, ids=name_of)
def test_all_is_sorted_complete_and_true(path: Path, monkeypatch: pytest.MonkeyPatch):
    """`__all__` has each public name that the module defines, in order, and only names that exist."""
    source = SOURCES[path]
    for library in ("jax", "keras", "mpi4py", "tensorflow", "torch"):
        if f"import {library}" in source or f"ringreduce.{library}" in name_of(path):
            pytest.importorskip(library)
    # Importing Horovod's names chooses its conventions, which the worlds of later tests shall not have.
    monkeypatch.setattr(runtime._process, "conventions", runtime._process.conventions)
    module = importlib.import_module(name_of(path))
    assert sorted(set(module.__all__), key=rank_of) == list(module.__all__)
    assert set(defined_names(ast.parse(source))) <= set(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_all_lists_names_of_others():
    """A list of what a module defines itself says nothing that its names do not say."""
    needless = []
    for path in LISTING:
        imported = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(SOURCES[path]))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        listed = next(
            ast.literal_eval(node.value)
            for node in ast.parse(SOURCES[path]).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        needless += [] if imported & {*listed} else [name_of(path)]
    assert needless == []


def test_dir_shows_what_is_public():
    """`dir(ringreduce)` is `__all__`, so that completion offers no internals; all names of it are there."""
    assert dir(ringreduce) == sorted(ringreduce.__all__)
    assert all(hasattr(ringreduce, name) for name in dir(ringreduce))
