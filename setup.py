"""The build entry: all stands in pyproject.toml but the README, whose links are to work on a package index, too."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/ringreduce/ringreduce"
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?!https?:|#)(?P<path>[^)\s]+)\)")


def absolute(link: re.Match[str]) -> str:
    """Return a link, or a picture, that works outside of the repository."""
    kind = "raw" if link["text"].startswith("!") else "blob"
    return f"{link['text']}({REPOSITORY}/{kind}/main/{link['path']})"


readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=LINK.sub(absolute, readme), long_description_content_type="text/markdown")
