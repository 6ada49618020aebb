"""The command that opens a sealed file."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.files import open_file, replace_file
from ringreduce.common.sealed_files import DISK_VARIABLE, disk_keys


@click.command("unseal", short_help="Open a sealed file.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite OUT.")
def command(file: Path, out: Path, force: bool) -> None:
    """Write what is in FILE, which was sealed by the key of RINGREDUCE_DISK_KEY_FILE, to OUT.

    FILE is a model, a checkpoint, a trace, a dump or a part of a commit. OUT is there whole or not at all, readable by
    its owner alone; a file that was changed is not opened.
    """
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already; --force overwrites it")
    path = Config.from_environ().disk_key_file
    if path is None:
        raise ConfigError(f"{DISK_VARIABLE} is not set: it names the file with the key")
    keys = disk_keys(path)
    try:
        with open_file(file) as sealed, keys.opened(sealed) as content:
            replace_file(out, lambda written: shutil.copyfileobj(content, written))
    except ForeignFileError as error:
        raise ForeignFileError(f"{file}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: {error.strerror}") from None
