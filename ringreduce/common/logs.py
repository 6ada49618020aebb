"""What ringreduce logs, for programs that have not set up logging themselves: on standard error, with the rank."""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("ringreduce")


class _RankHandler(logging.Handler):
    """Writes ``ringreduce: rank 1: warning: ...``, unless the program's own handlers see the record as well.

    Attributes:
        who: names this process, and ends in a colon and a space; empty before it is known.
    """

    who = ""

    def emit(self, record: logging.LogRecord) -> None:
        others = [*_logger.handlers, *(logging.getLogger().handlers if _logger.propagate else ())]
        if any(handler is not self for handler in others):
            return
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        try:
            sys.stderr.write(f"ringreduce: {self.who}{level}{self.format(record)}\n")
        except Exception:  # As in handlers of the standard library: no program shall fail for a line of a log.
            self.handleError(record)


_handler = _RankHandler()


def set_up(level: str | None, who: str) -> None:
    """Let records of the logger ``ringreduce`` be seen; each call takes the place of the one before.

    Args:
        level: of the logger; None: as it is.
        who: this process, as in ``rank 1``.
    """
    _logger.addHandler(_handler)  # Loggers keep it once.
    _handler.who = f"{who}: " if who else ""
    if level is not None:
        _logger.setLevel(level)
