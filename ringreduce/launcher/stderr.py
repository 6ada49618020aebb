"""What this command itself writes to standard error."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Write a line of this command's own to standard error, unless nobody reads that any more."""
    with perhaps_unread():
        print(f"ringreduce: {text}", file=sys.stderr, flush=True)


@contextmanager
def perhaps_unread() -> Iterator[None]:
    """Go on where standard error cannot be written to; if its reader has ended, as after `disown -h`, write no more."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # or Python tried again at its end, and ended with status 120
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)
