"""Python programs as forks of the process that starts them, which has torch loaded: the towers of tests' agents.

A new Python takes 1.3 s of CPU to load torch, and another one to load its compiler for a first optimizer. A fork does
what Python does with the words of a command line, from the first line of the program to the last exit handler; what it
does before and after is in tests that start programs by :mod:`tests.support.jobs`, and in those that promise seconds.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Sequence
from multiprocessing import process, resource_tracker, util
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.support.patience import PATIENT_AGENTS


def fork_towers() -> None:
    """In the process of an agent: its towers are forks, but where seconds are promised, and where GPUs forbid it."""
    if PATIENT_AGENTS in os.environ and not torch.cuda.is_available():
        subprocess_handler.Popen = _start  # type: ignore[assignment,misc]


def _start(args: Sequence[str], *, env: dict[str, str], **settings: Any) -> subprocess.Popen[Any]:
    """As Popen does, for this Python without flags, or with ``-u``, as torchrun has it."""
    assert args[0] == sys.executable, args
    sys.stdout.flush()
    return subprocess.Popen(args, env=env, preexec_fn=functools.partial(_be, args, env), **settings)


def _be(args: Sequence[str], variables: dict[str, str]) -> NoReturn:
    """In the fork, where its streams, its session and its directory are in place."""
    code = 1
    try:
        _forget_the_parent()
        os.environ.clear()
        os.environ.update(variables)
        sys.orig_argv[:] = args
        sys.stdout.reconfigure(write_through=args[1] == "-u")  # type: ignore[union-attr]
        code = _run(list(args[2:] if args[1] == "-u" else args[1:]))
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _forget_the_parent() -> None:
    """Its files, its handlers of signals and what it keeps for its end."""
    os.closerange(3, 4096)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which subprocess has restored, and Python ignores
        signal.signal(number, signal.SIG_IGN)
    logging.disable(logging.NOTSET)
    tempfile.tempdir = None
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    process._parent_process, process._children = None, set()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]
    gc.freeze()
    gc.enable()  # subprocess has switched it off


def _run(words: list[str]) -> int:
    """Run the program; returns the exit code."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv[:] = words[words[0] == "-m" :]
    sys.path[:] = [path for path in sys.path if path]
    try:
        if words[0] == "-m":
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif words[0] == "-c":
            del sys.argv[1]
            sys.path.insert(0, "")
            exec(words[1], vars(main))
        else:
            main.__file__ = words[0]
            sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
            exec(compile(pathlib.Path(words[0]).read_bytes(), words[0], "exec"), vars(main))
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException as error:
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    else:
        return 0
    return 1
