"""The command that makes a key."""

from __future__ import annotations

from pathlib import Path

import click

from ringreduce.common.config import default_key_file
from ringreduce.common.keys import write_secret


@click.command("keygen", short_help="Make a key, to encrypt what travels and what is stored.")
@click.argument("file", type=click.Path(path_type=Path), required=False)
def command(file: Path | None) -> None:
    """Make a key in FILE, or in ringreduce/key in your configuration folder, that you alone may read.

    A file that is there stays as it is. Copy the key to the hosts of a job (scp -p), at the same path, and keep a copy
    of a key that has sealed what you need: nothing else opens it.
    """
    path = file or default_key_file()
    try:
        secret = write_secret(path)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from None
    click.echo(f"{path}: a new key, {secret.fingerprint}")
