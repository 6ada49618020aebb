"""What a run is made of: its script, the repository that this is in, and the installed packages."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import Distribution, distributions
from typing import Any

from ringreduce.common.files import sha256_of

_LIMIT_S = 30.0  # of each command of git
_MOST_NAMES = 20


@cache
def origins() -> dict[str, Any]:
    """Return what the audit record says of the program of this process, as it is at the first call.

    Returns:
        - folder: the working directory.
        - script: path and sha256; None: the program is no file.
        - repository: of the script, or of the working directory: path, url, commit, clean, difference (the SHA-256 of
          what ``git diff --binary HEAD`` prints; None: nothing) and untracked (names of files that git neither has nor
          ignores, the first 20); or unknown: why.
        - packages: versions by name, their sha256 (of lines ``NAME==VERSION``), and elsewhere: names of those that were
          installed from a folder or a repository, so that the version does not say what they are.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script: dict[str, Any] | None = None
    folder = "."
    if main is not None and os.path.isfile(main):
        path = os.path.abspath(main)
        folder = os.path.dirname(path)
        with open(path, "rb") as file:
            script = {"path": path, "sha256": sha256_of(file)}
    here = None
    with suppress(FileNotFoundError):  # it was removed
        here = os.getcwd()
    return {"folder": here, "script": script, "repository": _repository(folder), "packages": _packages()}


def _repository(folder: str) -> dict[str, Any]:
    try:
        root = os.fsdecode(_git(folder, "rev-parse", "--show-toplevel")).rstrip("\n")
        commit = _git(root, "rev-parse", "--verify", "HEAD").decode().strip()
        # Settings of the user are not to change what is printed.
        difference = _git(root, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--binary", "HEAD")
        listed = os.fsdecode(_git(root, "ls-files", "--others", "--exclude-standard", "-z"))
        untracked = [each for each in listed.split("\0") if each]
        url = _git(root, "config", "--default", "", "--get", "remote.origin.url").decode(errors="replace").strip()
    except FileNotFoundError:
        return {"unknown": "git is not installed"}
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        return {"unknown": said.partition("\n")[0] or str(error)}
    return {
        "path": root,
        "url": _without_secrets(url) or None,
        "commit": commit,
        "clean": not difference and not untracked,
        "difference": hashlib.sha256(difference).hexdigest() if difference else None,
        "untracked": untracked[:_MOST_NAMES],
    }


def _without_secrets(url: str) -> str:
    """Return an address without user and password, which may have an ``@``, and what follows a ``?`` or ``#``."""
    if "://" not in url:  # a folder, or as in git@host:path, by ssh, which takes no password there
        return url
    return re.sub(r"//[^/]*@", "//", re.sub(r"[?#].*", "", url))


def _git(folder: str, *words: str) -> bytes:
    command = ["git", "--no-optional-locks", "-C", folder, *words]
    return subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_LIMIT_S).stdout


def _packages() -> dict[str, Any]:
    found: dict[str, Distribution] = {}
    for each in distributions():
        found.setdefault(each.metadata["Name"], each)  # the first one hides those of later folders
    versions = {name: found[name].version for name in sorted(filter(None, found))}  # without what is left of one
    lines = "".join(f"{name}=={version}\n" for name, version in versions.items())
    elsewhere = [name for name in versions if found[name].read_text("direct_url.json") is not None]
    return {"sha256": hashlib.sha256(lines.encode()).hexdigest(), "versions": versions, "elsewhere": elsewhere}
