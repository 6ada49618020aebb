"""The house rules: who may import whom, and that importing ringreduce starts nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ringreduce

PACKAGE = Path(__file__).parents[2] / "ringreduce"
SOURCES = sorted(PACKAGE.rglob("*.py"))

#: The entry point of torch's backend, beside the package: `ringreduce.torch` imports it; it imports that when asked.
ENTRY = PACKAGE.parent / "ringreduce_torch_backend.py"

#: docs/architecture.md: each layer's folders, from the ground up, and the foreign libraries that it may import.
LAYERS = [
    (re.findall(r"`(\w+)(?:\.py|/)`", row.split("|")[1]), re.findall(r"\w+", row.split("|")[3]))
    for row in reversed((PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines())
    if row.startswith("| `")
]
LEVELS = {place: level for level, (places, _) in enumerate(LAYERS) for place in places}

#: The only places that may import a foreign library. A library that is in no row may not be imported at all.
HOMES = {
    "numpy": {place for place, level in LEVELS.items() if level > LEVELS["common"]},
    **{
        library: {place for places, libraries in LAYERS if library in libraries for place in places}
        for _, named in LAYERS
        for library in named
    },
}


@cache
def trees() -> dict[Path, ast.Module]:
    """Return what each source file says; not all processes of a test run need it, and it takes seconds."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def place_of(path: Path) -> str:
    """Return the folder, or the file at the root, that a source file belongs to."""
    place = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return "cli" if place == "__main__" else place


def dotted_imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything that a module imports, wherever in the module that is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            assert node.module is not None
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def breaches(path: Path, tree: ast.Module) -> list[str]:
    """Return what a source file does against the table, one line each."""
    here = place_of(path)
    found = []
    for line, name in dotted_imports(tree, path):
        root, *rest = name.split(".")
        if root != "ringreduce":
            if root not in sys.stdlib_module_names and here not in HOMES.get(root, set()):
                found.append(f"{path.name}:{line}: {here} imports {root}")
            continue
        there = rest[0] if rest and rest[0] in LEVELS else "__init__"
        if there != here and LEVELS[there] >= LEVELS[here]:
            found.append(f"{path.name}:{line}: {here} imports {there}")
    return found


def is_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "__all__"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_are_imported_and_exported_one_by_one(path: Path):
    """Whoever searches for a name finds where it comes from: no star imports, and `__all__` is one list of strings."""
    nodes = list(ast.walk(trees()[path]))
    assert [node.lineno for node in nodes if isinstance(node, ast.alias) and node.name == "*"] == []
    lists = [node for node in trees()[path].body if isinstance(node, ast.Assign) and is_all(node.targets[0])]
    assert sum(is_all(node) and isinstance(node.ctx, ast.Store) for node in nodes) == len(lists) <= 1
    assert [node.lineno for node in nodes if isinstance(node, ast.Attribute) and is_all(node.value)] == []
    assert all(isinstance(name, str) for node in lists for name in ast.literal_eval(node.value))


#: What only one framework needs: bindings give the same name to what has the same purpose.
BINDINGS = {"horovod", "jax", "keras", "tensorflow", "torch"}


def test_a_class_name_stands_for_one_thing():
    """Outside of bindings; an underscore makes no other name. Nor do two files have one name there."""
    files = defaultdict[str, list[str]](list)
    places = defaultdict[str, list[str]](list)
    for path, tree in trees().items():
        if place_of(path) not in BINDINGS:
            if path.name != "__init__.py":
                files[path.name].append(str(path.relative_to(PACKAGE)))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name.strip("_")].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: each for name, each in {**places, **files}.items() if len(each) > 1} == {}


def test_every_folder_has_a_level():
    """No module lies loose at the root, and a new folder gets its place in the table before it gets users."""
    assert {place_of(path) for path in SOURCES} == set(LEVELS)
    assert len(LAYERS) <= 13


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path):
    """A module imports only from rows below its own, and a foreign library only where that library lives."""
    assert breaches(path, trees()[path]) == []


@pytest.mark.parametrize(
    ("place", "source", "complaint"),
    [
        ("launcher/x.py", "from ringreduce.transport.mpi_messages import MpiMessages", "launcher imports transport"),
        ("common/x.py", "def f():\n    import numpy, os", "common imports numpy"),
        ("buffers/x.py", "from ringreduce.algorithms import find", "buffers imports algorithms"),
        ("collectives/x.py", "import ringreduce", "collectives imports __init__"),
        ("torch/x.py", "from mpi4py import MPI", "torch imports mpi4py"),
        ("training/x.py", "import torch", "training imports torch"),
        ("training/x.py", "from ringreduce.torch import ops", "training imports torch"),
        ("collectives/x.py", "from ringreduce import testing", "collectives imports testing"),
    ],
)
def test_a_breach_is_found(place: str, source: str, complaint: str):
    """The table bites: each kind of import that it forbids is reported."""
    assert [line.split(": ", 1)[1] for line in breaches(PACKAGE / place, ast.parse(source))] == [complaint]


def test_two_modules_read_the_environment():
    """Settings enter at one place, what the launcher says at another. The command line may set up the environment of
    other libraries, and so may users.
    """
    readers = {
        str(path.relative_to(PACKAGE))
        for path in SOURCES
        for node in ast.walk(trees()[path])
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {"environ", "getenv"} & {a.name for a in node.names}
        )
    }
    setters = ("bench/", "cli/", "doctor/", "engines/slot", "horovod/common/util.py", "launcher/")
    assert {reader for reader in readers if not reader.startswith(setters)} <= {"common/config.py", "common/launch.py"}


def test_only_commands_and_the_launcher_print():
    """A library does not write to its user's terminal."""
    printers = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in SOURCES
        if place_of(path) not in ("cli", "launcher")
        for node in ast.walk(trees()[path])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printers == []


# ---- the picture that the imports draw ----


@cache
def modules_imported() -> dict[str, set[str]]:
    """Return by module, as dotted names, which others of ours it imports; a folder's name is its ``__init__.py``."""
    found = {path.relative_to(PACKAGE.parent).with_suffix(""): tree for path, tree in trees().items()}
    found[Path(ENTRY.stem)] = ast.parse(ENTRY.read_text(encoding="utf-8"))
    found = {path.parent if path.name == "__init__" else path: tree for path, tree in found.items()}
    modules = {".".join(path.parts): tree for path, tree in found.items()}
    imported: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for _, dotted in dotted_imports(tree, Path(name)):
            while dotted and dotted not in modules:  # what a module defines counts as the module
                dotted = dotted.rpartition(".")[0]
            imported[name] |= {dotted} - {name, ""}
    return imported


def room(module: str) -> str:
    """Return the folder of a module, as the table of layers has it."""
    root, *rest = module.split(".")
    if root == ENTRY.stem:
        return root
    return place_of(PACKAGE / rest[0]) if rest else "__init__"


def floors(below: Mapping[str, set[str]]) -> int:
    """Return how many floors a picture has in which everything is above all that it imports; a circle is an error."""
    floor: dict[str, int] = {}
    for place in TopologicalSorter(below).static_order():
        floor[place] = 1 + max((floor[each] for each in below.get(place, ())), default=0)
    return max(floor.values(), default=0)


def test_the_picture_of_folders_is_small():
    """At most 13 floors, at most 128 arrows; the one that goes up is that of the entry point of torch's backend."""
    below: dict[str, set[str]] = defaultdict(set)
    for module, others in modules_imported().items():
        below[room(module)] |= {room(other) for other in others} - {room(module)}
    assert sum(map(len, below.values())) <= 128
    assert below.pop(ENTRY.stem) == {"common", "torch"}
    assert floors(below) <= 13


@pytest.mark.parametrize(
    ("folder", "beside", "limits"),
    [
        ("training", set(), (9, 25, 5)),
        ("observe", {"observer", "watchers"}, (5, 9, 5)),
    ],
)
def test_a_large_folder_is_a_few_rooms(folder: str, beside: set[str], limits: tuple[int, int, int]):
    """Each with at most so many rooms, arrows between them, and floors; no circle, and no other module beside them."""
    inside = f"ringreduce.{folder}."
    below: dict[str, set[str]] = defaultdict(set)
    for module, others in modules_imported().items():
        if module.startswith(inside):
            here = module.split(".")[2]
            assert (PACKAGE / folder / here).is_dir() or here in beside, f"{module} is in no room"
            below[here] |= {other.split(".")[2] for other in others if other.startswith(inside)} - {here}
    counts = len(below), sum(map(len, below.values())), floors(below)
    assert all(count <= limit for count, limit in zip(counts, limits, strict=True)), counts


# ---- private parts of libraries ----

#: The only modules that touch them.
PRIVATE = {"private.py", "keras_private.py", "numpy_private.py"}

#: Where this holds: what needs a framework.
TOUCHING = {"torch", "tensorflow", "keras", "jax", "training"}

#: Methods of named tuples, which have an underscore and are public.
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}

#: Packages of which the modules are private, whatever their names are.
PRIVATE_PACKAGES = ("tensorflow.python", "keras.src", "jax._src")


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.match(r"_[^_]", name) is not None and name not in NAMED_TUPLES


def stored(node: ast.AST) -> str:
    """Return the name to which a node assigns, of the class around it or of ``self``; empty if it does neither."""
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else ""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr if ast.unparse(node.value) in ("self", "cls") else ""
    return node.name if isinstance(node, FUNCTIONS) else ""


@cache
def members(place: str) -> set[str]:
    """Return the names of all that the classes in a folder define, or assign to ``self``; slots count as well."""
    classes = [
        node
        for path, tree in trees().items()
        if place_of(path) == place
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    inside = [node for each in classes for node in ast.walk(each)]
    slots = {
        text
        for node in inside
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
        for text in ast.literal_eval(node.value)
    }
    return {stored(node) for node in inside} | slots


def names_touched(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the attributes that a module reads, writes or asks for by a text, and of its imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            yield node.lineno, getattr(node.args[1], "value", "")
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
            yield node.lineno, getattr(node.slice, "value", "")
    for line, dotted in dotted_imports(tree, Path()):
        if not dotted.startswith("ringreduce"):
            yield from ((line, part) for part in dotted.split("."))
            yield line, "_" + dotted if dotted.startswith(PRIVATE_PACKAGES) else dotted


def private_touches(path: Path, source: str) -> list[str]:
    """Return the private names that a module touches and that no class of its folder defines, one line each.

    Nor one of `training/`, of which bindings have subclasses. Variables of other functions are private parts, too.
    """
    ours = members(place_of(path)) | members("training")
    return [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for line, name in names_touched(ast.parse(source))
        if (is_private(name) and name not in ours) or name == "f_locals"
    ]


def test_private_parts_of_libraries_are_touched_in_one_module_of_a_binding():
    """Each by a function with a fallback that a self-test looks at: a new version of a library is soon adapted to."""
    touches = [
        touch
        for path in SOURCES
        if place_of(path) in TOUCHING and path.name not in PRIVATE
        for touch in private_touches(path, path.read_text(encoding="utf-8"))
    ]
    assert touches == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f(tensor):\n    return tensor._version", "_version"),
        ("class Ours:\n    def f(self):\n        return self._opt_called", "_opt_called"),
        ("import sys\nframe = sys._getframe(1)", "_getframe"),
        ("def f(frame):\n    return frame.f_locals", "f_locals"),
        ("def f(model):\n    return getattr(model, '_flatten_layers', None)", "_flatten_layers"),
        ("def f(function):\n    vars(function)['_torchdynamo_disable'] = True", "_torchdynamo_disable"),
        ("from torch.nn.modules.batchnorm import _BatchNorm", "_BatchNorm"),
        ("from torch._C import Graph", "_C"),
        ("from tensorflow.python import pywrap_tfe", "_tensorflow.python.pywrap_tfe"),
    ],
)
def test_a_private_touch_is_found(source: str, name: str):
    """Each kind of touch is."""
    assert [line.split(": ")[1] for line in private_touches(PACKAGE / "torch/x.py", source)] == [name]


@pytest.mark.parametrize("source", ["value._replace(a=1)", "optimizer._training", "self.__dict__", "import torch"])
def test_what_is_ours_or_public_is_no_private_touch(source: str):
    """Named tuples, attributes of our own classes, and what Python has between two underscores on each side."""
    assert private_touches(PACKAGE / "torch/x.py", source) == []


# ---- sizes ----

#: The most of each kind, in ringreduce/. Docstrings are no statements, and self is no parameter.
LIMITS = {
    "floors of the modules in a folder": 6,
    "statements of a file": 310,
    "statements of a function": 56,
    "methods of a class that is no public name": 20,
    "parameters of what is no public name": 8,
}

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef

FACES = [
    *("elastic/__init__.py", "tensorflow/__init__.py"),
    *("dask/__init__.py", "ray/__init__.py", "spark/__init__.py", "torch/__init__.py", "torch/elastic/__init__.py"),
]


def public_names() -> set[str]:
    """Return the names of `ringreduce`, and those that the faces of bindings and elastic training list themselves."""
    faces = [trees()[PACKAGE / face] for face in FACES]
    lists = [
        ast.literal_eval(node.value)
        for face in faces
        for node in face.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {*ringreduce.__all__, *(name for names in lists for name in names)}


def definitions(node: ast.AST, within: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield (name with the names around it, node) of all classes and functions in a node."""
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, (ast.ClassDef, *FUNCTIONS)):
            name = f"{within}.{child.name}".lstrip(".")
            yield name, child
        yield from definitions(child, name)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(body: Iterable[ast.stmt]) -> int:
    """Return how many statements there are, those within others included."""
    inside = (node for each in body for node in ast.walk(each))
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in inside)


@cache
def figures() -> list[tuple[str, str, int]]:
    """Return (kind, what, how many) of all that `LIMITS` limits."""
    return list(counted())


def counted() -> Iterator[tuple[str, str, int]]:
    imported, public = modules_imported(), public_names()
    folders = {path.relative_to(PACKAGE).parts[0] for path in SOURCES if path.parent != PACKAGE}
    parted = {"training", "observe"}
    parents = [path.parent.relative_to(PACKAGE) for path in SOURCES]
    rooms = {".".join(each.parts) for each in parents if len(each.parts) == 2 and each.parts[0] in parted}
    for folder in folders - parted | rooms:
        inside = {name for name in imported if name.startswith(f"ringreduce.{folder}.")}  # all but its __init__.py
        yield "floors of the modules in a folder", folder, floors({name: imported[name] & inside for name in inside})
    for path, tree in trees().items():
        file = str(path.relative_to(PACKAGE))
        yield "statements of a file", file, statements(tree.body)
        for name, node in definitions(tree):
            what, is_public = f"{file} {name}", name.partition(".")[0] in public
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, FUNCTIONS)]
                if not is_public:
                    yield "methods of a class that is no public name", what, len(methods)
            elif isinstance(node, FUNCTIONS):
                yield "statements of a function", what, statements(node.body)
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if not is_public:
                    count = len(names) - (names[:1] in (["self"], ["cls"]))
                    yield "parameters of what is no public name", what, count


def assigned_together(tree: ast.Module) -> int:
    """Return how many statements assign values to as many names at once, as ``a, b = x, y`` does."""
    return sum(
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        for node in ast.walk(tree)
    )


def test_a_statement_assigns_one_value():
    """But where values are exchanged, or one is read before another one changes."""
    assert sum(map(assigned_together, trees().values())) <= 25


@pytest.mark.parametrize("kind", LIMITS)
def test_nothing_is_larger_than_its_limit(kind: str):
    """There are no exceptions."""
    assert {what: count for each, what, count in figures() if each == kind and count > LIMITS[kind]} == {}


def in_a_new_process(source: str) -> str:
    """Run ``source`` in a new interpreter and return what it printed."""
    return subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True, timeout=30).stdout


def test_importing_ringreduce_imports_no_heavy_library():
    """`import ringreduce` works, and is quick, where neither MPI nor torch nor a GPU is."""
    loaded = in_a_new_process("import sys, ringreduce; print(*sys.modules)").split()
    assert {"mpi4py", "torch", "cupy", "click", "rich", "matplotlib"} & set(loaded) == set()


def test_a_world_imports_nothing_that_no_setting_asks_for():
    """Neither what encrypts, audits and exports, nor what shows records."""
    source = "import sys, ringreduce as rr; rr.init(); rr.barrier(); rr.audit('data', rows=3); print(*sys.modules)"
    needless = {"cryptography", "importlib.metadata", "opentelemetry", "rich", "ringreduce.audit.origins"}
    assert needless & set(in_a_new_process(source).split()) == set()


def test_importing_ringreduce_starts_nothing():
    """`import ringreduce` starts no thread, no world, and prints nothing."""
    printed = in_a_new_process(
        "import ringreduce, threading; assert not ringreduce.is_initialized(); print(threading.active_count())"
    )
    assert printed == "1\n"


def test_importing_the_torch_layer_does_not_import_torchs_compiler():
    """That takes a second, and most programs compile nothing."""
    pytest.importorskip("torch")
    printed = in_a_new_process("import sys, ringreduce.torch; print('torch._dynamo' in sys.modules)")
    assert printed == "False\n"


@pytest.mark.parametrize("module", ["ringreduce.torch", "ringreduce.torch.elastic", "horovod.torch"])
def test_without_torch_the_torch_layer_says_what_to_install(module: str):
    """In one line, and not by a traceback out of the middle of our modules; `ringreduce` itself goes on."""
    printed = in_a_new_process(
        "import importlib, sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import ringreduce, ringreduce.horovod\n"
        "try:\n"
        f"    importlib.import_module({module!r})\n"
        "except ImportError as error:\n"
        "    print(error, error.__cause__, error.__suppress_context__)\n"
        "ringreduce.init()\n"
        "print(ringreduce.allreduce(1), ringreduce.broadcast_object([1]), ringreduce.allgather_object('a'))\n"
    )
    error, total = printed.splitlines()
    assert error.startswith("ringreduce.torch needs PyTorch, which is not installed: pip install torch")
    assert error.endswith("None True")
    assert total == "1 [1] ['a']"
