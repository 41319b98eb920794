"""Python programs as forks of the process that starts them, which has torch loaded: the towers of tests' agents.

A new Python takes 1.3 s of CPU to load torch, and another one to load its compiler for a first optimizer. A fork does
what Python does with the words of a command line, from the first line of the program to the last exit handler; what it
does before and after is in tests that start programs by :mod:`tests.support.jobs`, and in those that promise seconds.
"""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Sequence
from multiprocessing import forkserver, process, resource_tracker, util
from typing import Any, NoReturn
from unittest import mock

import torch

from tests.support.patience import PATIENT_AGENTS
from towers.launching import agent, fork_server, play_cluster
from towers.system.torch_private import start_agents_processes_by

_kept: list[object] = []  # what has files of the parent: to close them by number would close this process's


def fork_towers() -> None:
    """Let the agent, or ``mirrored cluster``, in this process start forks, but where seconds are promised or GPUs are.

    The product's own fork server would have the modules of the tests.
    """
    agent.fork_towers = lambda _path: None
    if PATIENT_AGENTS in os.environ and not torch.cuda.is_available():
        start_agents_processes_by(_start)
        play_cluster.subprocess = types.SimpleNamespace(Popen=_start)


def _start(args: Sequence[str], *, env: dict[str, str], **settings: Any) -> subprocess.Popen[Any]:
    """As Popen does, for this Python without flags, or with ``-u``, as torchrun has it."""
    assert args[0] == sys.executable, args
    sys.stdout.flush()
    return subprocess.Popen(args, env=env, preexec_fn=functools.partial(exec_python, args, env), **settings)


def fork_the_fork_server() -> None:
    """Start the server that this process's towers are forked from, as a fork of it instead of a new Python.

    So they have all that this process has loaded by now. It must have no threads.
    """
    spawn = util.spawnv_passfds

    def fork(_path: bytes, args: Sequence[str], kept: Sequence[int]) -> int:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                util.spawnv_passfds = spawn
                for low, high in itertools.pairwise([2, *sorted(kept), 4096]):
                    os.closerange(low + 1, high)
                forkserver._forkserver.__init__()  # type: ignore[attr-defined,misc]  # the parent holds its lock
                at = args.index("-c")
                sys.argv[:] = args[at : at + 1] + args[at + 2 :]
                exec(args[at + 1], {})
            except SystemExit:
                code = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        return pid

    resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()


def exec_python(args: Sequence[str], variables: dict[str, str]) -> NoReturn:
    """In a fork, whose streams, session and directory are in place: become the program of a command line of Python."""
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
        if callable(handler := signal.getsignal(number)):
            _kept.append(handler)
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
    sys.path[:] = [path for path in sys.path if path]
    try:
        fork_server.execute(words)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # which has been printed
        pass
    return 1
