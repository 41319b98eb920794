"""What is logged, collected for tests."""

from __future__ import annotations

import logging


class Records(logging.Handler):
    """Keeps the messages of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
