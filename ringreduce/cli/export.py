"""``ringreduce export``: a model out of the commits of an elastic training, for programs without ringreduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringreduce.bench.cases import format_nbytes
from ringreduce.common.errors import ConfigError
from ringreduce.common.files import replace_file, require_own
from ringreduce.common.launch import launch
from ringreduce.elastic.commits import CommitStore

__all__ = ["command"]


@click.command("export", short_help="Write a committed model to a file of its own.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.argument("out", type=click.Path(dir_okay=False))
@click.option("--name", default="model", help="What the state of the training calls it.")
@click.option("--commit", "number", type=click.IntRange(0), show_default="the last whole one", help="Which commit.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
def command(folder: str, out: str, name: str, number: int | None, force: bool) -> int:
    """Write the model of a commit in FOLDER (see keep_on_disk) to OUT, as a plain state dict.

    torch.load(OUT, weights_only=True) reads it, without ringreduce. Commits that are truncated or were changed are
    named and not used, nor is a folder that other users may write to. OUT is there whole or not at all, readable by its
    owner alone.
    """
    if launch().rank:
        return 0  # rank 0 does it
    target = Path(out)
    if target.exists() and not force:
        raise ConfigError(f"{out} is there already; --force overwrites it")
    torch = _torch()
    try:
        require_own(Path(folder))
    except OSError as error:
        raise ConfigError(f"the commits in {folder} are not used: {error}") from None
    store = CommitStore(folder, 1, torch.save, lambda file: torch.load(file, map_location="cpu", weights_only=True))
    number = _chosen(store, number)
    state = _state(store, number, name)
    try:
        replace_file(target, lambda file: torch.save(state, file))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}") from None
    click.echo(f"{out}: {name} of commit {number}, {format_nbytes(target.stat().st_size)}")
    return 0


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise ConfigError("ringreduce export needs PyTorch, which is not installed: pip install torch") from None
    return torch


def _chosen(store: CommitStore, number: int | None) -> int:
    """Return which commit to take, and say which ones are none."""
    found = store.examine()
    whole = [each for each, why in found.items() if not why]
    if number in whole:
        return number
    for each, why in found.items():
        if why:
            click.echo(f"commit {each} cannot be used: {why}", err=True)
    there = f"whole are {', '.join(map(str, whole))}" if whole else "none is whole"
    if not found:
        raise ConfigError(f"there are no commits in {store.folder}; state.keep_on_disk(FOLDER) writes them")
    if number is not None:
        raise ConfigError(f"there is no commit {number} in {store.folder} that can be used; {there}")
    if not whole:
        raise ConfigError(f"of the commits in {store.folder}, {there}")
    return whole[-1]


def _state(store: CommitStore, number: int, name: str) -> Any:
    try:
        objects = store.load(number)["objects"]
    except Exception as error:  # whatever torch says of a file that is not its own
        why = str(error).partition("\n")[0]
        raise ConfigError(f"commit {number} in {store.folder} is not that of a TorchState: {why}") from None
    if name not in objects:
        there = ", ".join(sorted(objects)) or "nothing that has a state dict"
        raise ConfigError(f"commit {number} holds no {name!r}; it holds {there}")
    return objects[name]
