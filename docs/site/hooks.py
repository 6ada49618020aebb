"""What mkdocs calls while it builds the site: pages made of files that stand elsewhere, drawings made of the code."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from commands import commands  # noqa: E402
from drawings import drawing  # noqa: E402

#: Files of the repository that are pages, under the names that links to them get.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
ASSETS = ("iframe-worker.js", "site.css")

#: What readers search for, in other words than those of the page that is meant.
SOUGHT = {
    "security.md": ["encryption", "ports", "pickle", "key"],
    "audit.md": ["provenance", "tampering"],
    "algorithms.md": ["ring allreduce", "tree allreduce", "recursive doubling"],
    "failures.md": ["fault tolerance", "elastic", "preemption", "SIGTERM", "requeue"],
    "errors.md": ["hang", "hangs", "deadlock", "timeout"],
    "start.md": [
        *("oversubscribe", "more ranks than cores", "install", "run as root", "macOS or Windows", "WSL"),
        *("conda", "upgrading", "upgrade", "how large is the download"),
    ],
    "recipes/checkpoints.md": [
        "resume training",
        "resume training in the middle of an epoch",
        "ONNX export",
        "TorchScript",
    ],
    "recipes/trainings.md": ["LoRA on two CPUs", "PEFT", "fine-tuning", "mean per token", "mean per atom"],
    "recipes/debug.md": ["debug one rank", "debugger", "pdb", "breakpoint", "VS Code"],
    "recipes/data.md": ["validation"],
    "recipes/sharding.md": ["ZeRO", "optimizer state"],
    "recipes/methods.md": ["MuLoCo", "Muon", "Newton-Schulz", "Shampoo"],
    "recipes/local.md": ["DiLoCo", "LocalSGD"],
    "recipes/staleness.md": ["asynchronous SGD", "stale gradients", "late averages"],
    "slow.md": ["straggler", "slow rank", "verdict", "ranks of different speed", "load balancing"],
}
#: Pages behind others in search, by how their paths begin: what was, and what each function does.
BEHIND = {"changelog.md": 0.1, "contributing.md": 0.3, "benchmarks": 0.3, "reference/": 0.2}

LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
SETUP = re.compile(r"^<!-- example: setup\n.*?^-->\n", re.MULTILINE | re.DOTALL)  # for tests/unit/test_docs.py alone
DRAWING = re.compile(r"<!-- drawing: (\w+) (\w+) (\d+)x(\d+) -->")
ENTRY = re.compile(r"^(::: \S+\n)(?!    options:)", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand elsewhere."""
    for path, name in PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        if path == "examples/README.md":
            text += "".join(map(_source, sorted(ROOT.glob("examples/*.py"))))
        files.append(File.generated(config, name, content=_linked(text, posixpath.dirname(path), "docs")))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    for name in ASSETS:
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(HERE / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to where their targets are on the site, draw, and see that examples of YAML are well formed."""
    for example in YAML.findall(markdown):
        yaml.safe_load(example)
    if page.file.generated_by is None:
        markdown = _linked(markdown, posixpath.dirname(f"docs/{page.file.src_uri}"), f"docs/{page.file.src_uri}")
    markdown = SETUP.sub("", markdown)
    if page.file.src_uri.startswith("reference/"):  # entries of a section have headings below its own
        before, section, below = markdown.partition("\n## ")
        markdown = before + section + ENTRY.sub(r"\1    options:\n      heading_level: 3\n", below)
    page.meta["tags"] = SOUGHT.get(page.file.src_uri, [])
    page.meta["search"] = {
        "boost": next((less for path, less in BEHIND.items() if page.file.src_uri.startswith(path)), 1)
    }
    return DRAWING.sub(lambda found: drawing(found[1], found[2], int(found[3]), int(found[4])), markdown)


def _source(path: Path) -> str:
    return f"\n## {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"


def _linked(text: str, folder: str, page: str) -> str:
    """Rewrite links from a file in ``folder`` of the repository for a page of docs/.

    Args:
        text: Markdown.
        folder: what the links are relative to.
        page: path of the page, or of a folder beside which it will stand.
    """
    base = posixpath.dirname(page) if page.endswith(".md") else page

    def target(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        anchor = found[2] or ""
        if path in PAGES:
            path = f"docs/{PAGES[path]}"
        elif path.startswith("examples/") and path.endswith(".py"):
            path, anchor = "docs/examples.md", f"#{posixpath.basename(path).replace('.', '')}"
        return f"]({posixpath.relpath(path, base)}{anchor})"

    return LINK.sub(target, text)
