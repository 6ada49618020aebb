"""`__all__` is the public face of a module: complete, sorted, and nothing but what is there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ringreduce
from ringreduce import runtime

PACKAGE = Path(__file__).parents[2] / "ringreduce"
PUBLIC = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not any(part.startswith("_") for part in path.relative_to(PACKAGE).parts if part != "__init__.py")
]


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


@pytest.mark.parametrize("path", PUBLIC, ids=name_of)
def test_all_is_sorted_complete_and_true(path: Path, monkeypatch: pytest.MonkeyPatch):
    """`__all__` has each public name that the module defines, in order, and only names that exist."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    if not tree.body or (len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr)):
        pytest.skip("an empty module")
    for library in ("jax", "mpi4py", "torch"):
        if f"import {library}" in source or f"ringreduce.{library}" in name_of(path):
            pytest.importorskip(library)
    # Importing Horovod's names chooses its conventions, which the worlds of later tests shall not have.
    monkeypatch.setattr(runtime._process, "conventions", runtime._process.conventions)
    module = importlib.import_module(name_of(path))
    assert sorted(set(module.__all__), key=rank_of) == list(module.__all__)
    assert set(defined_names(tree)) <= set(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_dir_shows_what_is_public():
    """`dir(ringreduce)` is `__all__`, so that completion offers no internals; all names of it are there."""
    assert dir(ringreduce) == sorted(ringreduce.__all__)
    assert all(hasattr(ringreduce, name) for name in dir(ringreduce))
