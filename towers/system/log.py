"""Log lines that a person sees without configuring anything, and that a configured log receives.

``MIRRORED_LOG_LEVEL`` in the environment sets how much: ``debug``, ``info`` (the default), ``warning``, ``error`` or
``critical``. On ``debug`` the packages also log changes of their state (towers that start or join, features that are
attached, models that are mirrored, epochs, checks), with the milliseconds since the process began. A level that a
program sets on the loggers ``"mirrored"`` and ``"towers"`` itself wins.
"""

from __future__ import annotations

import logging
import os
import sys

LEVEL = "MIRRORED_LOG_LEVEL"
"""Environment variable with the level of all log lines of this project."""

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class _ShownUnlessConfigured(logging.Handler):
    """Prints to standard error as long as the program has set up no logging of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(self.format(record) + "\n")  # one write: towers share the terminal


def get_logger(name: str) -> logging.Logger:
    """The logger of one of the packages (``"towers"`` or ``"mirrored"``).

    INFO lines show on standard error until the program configures Python's root logger; from then on they
    go where that says. Silence them with ``MIRRORED_LOG_LEVEL=warning`` in the environment, or with
    ``logging.getLogger("mirrored").setLevel("WARNING")``.
    """
    logger = logging.getLogger(name)
    if any(isinstance(handler, _ShownUnlessConfigured) for handler in logger.handlers):
        return logger
    wanted = os.environ.get(LEVEL, "").strip().lower() or "info"
    level = _LEVELS.get(wanted, logging.INFO)
    since_start = " %(relativeCreated).0f ms" if level == logging.DEBUG else ""
    handler = _ShownUnlessConfigured()
    handler.setFormatter(logging.Formatter(f"%(name)s{since_start}: %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    if wanted not in _LEVELS and name == "mirrored":
        logger.warning("%s is %r, but must be one of %s: taken as info", LEVEL, wanted, ", ".join(_LEVELS))
    return logger
