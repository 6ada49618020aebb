"""The pages of the documentation, and the examples in them."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

#: A fenced block with its language, or what is to run before the blocks of its page and is not shown.
BLOCK = re.compile(r"^(?P<fence>```+)(?P<kind>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=fence)", re.MULTILINE | re.DOTALL)
SETUP = re.compile(r"^<!-- example: setup\n(.*?)^-->", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *kinds: str) -> list[tuple[int, str]]:
    """Return the fenced blocks of some languages, each with the number of the line before it."""
    text = page.read_text(encoding="utf-8")
    found = (each for each in BLOCK.finditer(text) if each["kind"] in kinds)
    return [(text.count("\n", 0, each.start("text")), each["text"]) for each in found]


def run_examples(page: Path) -> None:
    """Run the Python of a page from top to bottom, as one program."""
    program = ModuleType("__main__")
    for setup in SETUP.findall(page.read_text(encoding="utf-8")):
        exec(compile(f"import torch\n{setup}", f"{page} (setup)", "exec"), program.__dict__)
    for line, text in blocks(page, "python"):
        exec(compile("\n" * line + text, str(page), "exec"), program.__dict__)


EXAMPLES = [page for page in PAGES if blocks(page, "python")]
