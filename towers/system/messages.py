"""Texts: log lines, names of towers, addresses and untrusted text in messages, digests of values.

Log lines are printed unless the program configures logging. The environment variable ``MIRRORED_LOG_LEVEL`` sets the
level: ``debug``, ``info`` (the default), ``warning``, ``error`` or ``critical``. At ``debug``, the packages also log
changes of their state (towers that start or join, features that are attached, models that are mirrored, epochs,
checks), with the milliseconds since the process started. A level that a program sets on the loggers ``"mirrored"`` and
``"towers"`` takes precedence. All lines have the prefix ``mirrored:``.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

LEVEL = "MIRRORED_LOG_LEVEL"
"""Environment variable with the level of all log lines of this project."""

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class _ShownUnlessConfigured(logging.Handler):
    """Prints to standard error until the program configures the root logger."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            sys.stderr.write(self.format(record) + "\n")  # one write: towers share the terminal


class _Line(logging.Formatter):
    """Formats records as ``mirrored: message``, and warnings as ``mirrored: warning: message``.

    Args:
        times: adds the milliseconds since the process started.
    """

    def __init__(self, times: bool) -> None:
        super().__init__()
        self._times = times

    def format(self, record: logging.LogRecord) -> str:
        time = f" {record.relativeCreated:.0f} ms" if self._times else ""
        severity = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"mirrored{time}: {severity}{super().format(record)}"


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a package (``"towers"`` or ``"mirrored"``).

    INFO lines are printed to standard error until the program configures Python's root logger. Then they go to the root
    logger's handlers. Silence them with ``MIRRORED_LOG_LEVEL=warning`` in the environment, or with
    ``logging.getLogger("mirrored").setLevel("WARNING")``.
    """
    logger = logging.getLogger(name)
    if any(isinstance(handler, _ShownUnlessConfigured) for handler in logger.handlers):
        return logger
    wanted = os.environ.get(LEVEL, "").strip().lower() or "info"
    level = _LEVELS.get(wanted, logging.INFO)
    handler = _ShownUnlessConfigured()
    handler.setFormatter(_Line(times=level == logging.DEBUG))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    if wanted not in _LEVELS and name == "mirrored":
        logger.warning("%s is %r, but must be one of %s: taken as info", LEVEL, wanted, ", ".join(_LEVELS))
    return logger


def name_towers(towers: Sequence[int]) -> str:
    """Returns ``tower 2``, or ``towers 0, 1 and 3``."""
    if len(towers) == 1:
        return f"tower {towers[0]}"
    return f"towers {', '.join(map(str, towers[:-1]))} and {towers[-1]}"


def class_name(module: object) -> str:
    """Returns the name of a module's class, without the prefix that torch adds to the class of a sharded module."""
    kind, *others = type(module).__mro__
    return others[1].__name__ if others[0].__name__ == "FSDPModule" else kind.__name__


def printable(text: object, longest: int = 4000) -> str:
    """Returns untrusted text as one line of at most ``longest`` characters, none of which moves a terminal's cursor."""
    if not isinstance(text, str):
        return "?"
    shown = text[:longest]
    return shown if shown.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in shown)


def split_address(address: str) -> tuple[str, int]:
    """Converts ``"host:port"`` or ``"[IPv6]:port"`` to (host, port)."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Converts (host, port) to ``"host:port"`` or ``"[IPv6]:port"``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def canonical_address(address: str) -> str:
    """Returns one spelling for all spellings of an address: upper case, a final dot, zeros of IPv6, ``localhost``."""
    host, port = split_address(address)
    host = host.lower().removesuffix(".")
    if host == "localhost":
        host = "127.0.0.1"
    with contextlib.suppress(ValueError):
        host = ipaddress.ip_address(host).compressed
    return join_address(host, port)


def digest_of(value: Any) -> str:
    """Returns a short text that is equal for equal JSON values."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
