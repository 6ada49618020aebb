"""Make a clean virtual environment, for the other scripts: `python3 scripts/_environment.py FOLDER`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def make(python: Path | str, place: Path | str) -> Path:
    """Make an environment of that Python in a folder, anew if there is one; return its Python.

    Some systems ship venv without its copy of pip; then the pip of the Python that runs this fills it.
    """
    inside = Path(place) / "bin" / "python"
    if subprocess.run([python, "-m", "venv", "--clear", place], capture_output=True, check=False).returncode:
        subprocess.run([python, "-m", "venv", "--clear", "--without-pip", place], check=True)
        subprocess.run([sys.executable, "-m", "pip", "--quiet", "--python", inside, "install", "pip"], check=True)
    return inside


if __name__ == "__main__":
    make(sys.executable, sys.argv[1])
