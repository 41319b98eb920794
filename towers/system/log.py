"""Log lines that a person sees without configuring anything, and that a configured log receives."""

from __future__ import annotations

import logging
import sys


class _ShownUnlessConfigured(logging.Handler):
    """Prints to standard error as long as the program has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(self.format(record) + "\n")  # one write: towers share the terminal


def get_logger(name: str) -> logging.Logger:
    """The logger of one of the packages (``"towers"`` or ``"mirrored"``).

    INFO lines show on standard error until the program configures Python's root logger; from then on they
    go where that says. Silence them with ``logging.getLogger("mirrored").setLevel("WARNING")``.
    """
    logger = logging.getLogger(name)
    if not any(isinstance(handler, _ShownUnlessConfigured) for handler in logger.handlers):
        handler = _ShownUnlessConfigured()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
    return logger
