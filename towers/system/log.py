"""Log lines that a person sees without configuring anything, and that a configured log receives."""

from __future__ import annotations

import logging
import os
import sys

LOG_LEVEL = "MIRRORED_LOG_LEVEL"
"""Environment variable with the level from which lines show: ``debug``, ``info`` (the default), ``warning``, ``error``.

At ``debug`` every tower says when it has started, joined the others and begun its heartbeats, when it reports a
failure, and when it leaves; agents say what they start, which reports they have read and how the job has ended.
"""


class _ShownUnlessConfigured(logging.Handler):
    """Prints to standard error as long as the program has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(self.format(record) + "\n")  # one write: towers share the terminal


def get_logger(name: str) -> logging.Logger:
    """The logger of one of the packages (``"towers"`` or ``"mirrored"``).

    Lines of :data:`LOG_LEVEL` and above show on standard error until the program configures Python's root logger; from
    then on they go where that says. ``logging.getLogger("mirrored").setLevel("WARNING")`` silences the others.
    """
    logger = logging.getLogger(name)
    if not any(isinstance(handler, _ShownUnlessConfigured) for handler in logger.handlers):
        handler = _ShownUnlessConfigured()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            level = logging.getLevelName(os.environ.get(LOG_LEVEL, "").upper())
            logger.setLevel(level if isinstance(level, int) else logging.INFO)
    return logger
