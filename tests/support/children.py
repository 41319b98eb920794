"""Forks of a test's process."""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable

from tests.support.waiting import HANG


def in_a_child(work: Callable[[], object]) -> str:
    """Run ``work`` in a fork of this process; returns what it returns, or the traceback of what it raises, as a text.

    Of a child that is killed it is the signal's number, below zero; a child that hangs is killed by SIGABRT.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(work())
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode(errors="backslashreplace")[-4000:])
        os._exit(0)
    os.close(writer)
    if not select.select([reader], [], [], HANG)[0]:
        os.kill(child, signal.SIGABRT)
    with open(reader, errors="replace") as stream:  # the first character may be cut
        text = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return str(code) if code else text
