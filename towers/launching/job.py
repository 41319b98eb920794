"""A job of several towers, and how a program becomes one: it is replaced by an agent that runs it once per tower.

Only a user's own script can be run again in this way. Any other program gets an error that names the other ways.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pathlib
import sys
import sysconfig
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from towers.errors import CannotStartError
from towers.system import machine


@dataclasses.dataclass(frozen=True)
class Job:
    """The towers of this machine, as part of a job.

    Attributes:
        towers: the number of towers on this machine.
        worker, workers: this machine's index among the cluster's workers, and the number of workers.
        addresses: ``host:port`` of every worker, in order; empty for a job on one machine.
        origin: the source of the cluster's description, for messages.
        started_by: the command that the user typed, for the log.
        devices: this machine's devices, one per tower. Empty: the script chooses.
        kind: the kind of the devices.
        startup_seconds: the time for which workers wait for each other at the start.
        restarts: the largest number of restarts after failures.
        from_the_start: whether towers restart even if they lose steps because the script restores no checkpoint.
        min_towers: the least number of towers with which the job continues if workers are absent. None: all workers are
            needed.
        virtual_towers: a number that the number of towers must divide, or None.
        rejoin_seconds: the time for which workers wait for each other at a restart.
        collective_seconds: the deadline of a collective. A host that does not answer for that long is given up.
        log_dir: a directory for the output of all towers but the first. None: it is not kept.
    """

    towers: int
    worker: int = 0
    workers: int = 1
    addresses: tuple[str, ...] = ()
    origin: str = "the command line"
    started_by: str = "python"
    devices: tuple[str, ...] = ()
    kind: str = "cpu"
    startup_seconds: float = 300.0
    restarts: int = 0
    from_the_start: bool = False
    min_towers: int | None = None
    virtual_towers: int | None = None
    rejoin_seconds: float = 300.0
    collective_seconds: float = 600.0
    log_dir: str | None = None

    def to_json(self) -> str:
        """Returns one word for a command line, with the attributes that differ from the defaults."""
        return json.dumps({name: value for name, value in vars(self).items() if value != getattr(Job, name, None)})

    @classmethod
    def from_json(cls, word: str) -> Job:
        """Returns the job from which :meth:`to_json` has created ``word``.

        Raises:
            ValueError, TypeError: ``word`` is something else.
        """
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(word).items()
        }
        return cls(**values)


def agent_command(job: Job, program: Sequence[str]) -> list[str]:
    """Returns the command line of an agent that runs ``program`` in every tower.

    Args:
        program: a full command line.
    """
    return [sys.executable, str(pathlib.Path(__file__).resolve().parents[1]), job.to_json(), *program]


def become(job: Job) -> NoReturn:
    """Replaces this process by an agent that runs :func:`own_command` as several towers. It does not return.

    Raises:
        CannotStartError: see :func:`own_command`.
    """
    command = agent_command(job, own_command())
    sys.stdout.flush()
    sys.stderr.flush()
    if job.towers > 1:  # here, because libraries read it when the agent loads them
        machine.set_default_threads(os.environ, job.towers)
    os.execv(command[0], command)


def own_command() -> list[str]:
    """Returns the command that runs this program again, with the same interpreter, flags and arguments.

    Raises:
        CannotStartError: this process is not a user's own script (or ``-m`` module) that was started by ``python``.
    """
    if multiprocessing.parent_process() is not None:
        raise _cannot("this is a child process of multiprocessing")
    if sys.flags.interactive or hasattr(sys, "ps1"):
        raise _cannot("this is an interactive session")
    main = sys.modules.get("__main__")
    kind, at = _find_program(sys.orig_argv)
    if kind == "module":
        return _rerun_module(main, at)
    if kind == "script":
        return _rerun_script(main, at)
    raise _cannot(f"python was started with {kind}, not with a script")


def _find_program(argv: Sequence[str]) -> tuple[str, int]:
    """Returns the kind of program that ``python`` runs with this command line, and its position there.

    The result is ("script", position of its path), ("module", position of ``-m`` or of the word that contains it) or (a
    description of another program, -1). It follows the grammar of ``python --help``: ``-W`` and ``-X`` take an
    argument, ``-c`` and ``-m`` end the options, single letters may be joined.
    """
    words = iter(enumerate(argv[1:], start=1))
    for position, word in words:
        if word == "-":
            return "a program on standard input", -1
        if not word.startswith("-"):
            return "script", position
        letter = "" if word.startswith("--") else next((each for each in word if each in "cmWX"), "")
        if letter == "c":
            return "-c", -1
        if letter == "m":
            return "module", position
        if word == "--check-hash-based-pycs" or (letter and not word.partition(letter)[2]):
            next(words, None)  # the option's argument
    return "no program", -1


def _rerun_module(main: ModuleType | None, at: int) -> list[str]:
    word = sys.orig_argv[at]
    name = word[word.index("m") + 1 :] or sys.orig_argv[at + 1]
    spec = getattr(main, "__spec__", None)
    if spec is None or spec.name not in (name, f"{name}.__main__"):
        raise _cannot(f"python was started with -m {name}, which runs other programs")
    _check_is_users(getattr(main, "__file__", None))
    if sys.path[0] and pathlib.Path(sys.path[0]).is_dir() and not pathlib.Path(sys.path[0]).samefile("."):
        raise _cannot(
            f"-m {name} was found in {sys.path[0]}, but the current directory is another one by now; make the "
            "strategy before os.chdir"
        )
    return [sys.executable, *sys.orig_argv[1:]]


def _rerun_script(main: ModuleType | None, at: int) -> list[str]:
    typed = pathlib.Path(sys.orig_argv[at])
    file = getattr(main, "__file__", None)
    _check_is_users(file)
    script = pathlib.Path(str(file))
    program = script.parent if script.name == "__main__.py" and typed.name != script.name else script
    # A runner (a debugger, a profiler) replaces __main__ by another file: its command is not the script's.
    if typed.name != program.name:
        raise _cannot(f"{script.name} is run by {typed}")
    # A program that has changed its directory before this call is found by its full path.
    path = str(typed) if typed.exists() and typed.samefile(program) else str(program)
    return [sys.executable, *sys.orig_argv[1:at], path, *sys.orig_argv[at + 1 :]]


def _check_is_users(file: str | None) -> None:
    if file is None or not file.endswith(".py"):
        raise _cannot("the running program is not a .py file")
    path = pathlib.Path(file).resolve()
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = any(path.is_relative_to(pathlib.Path(place).resolve()) for place in places)
    if installed or {"site-packages", "dist-packages"} & set(path.parts):
        raise _cannot(f"{path} is an installed program")


def _cannot(why: str) -> CannotStartError:
    return CannotStartError(
        f"several towers are wanted, but this program cannot be started again as several: {why}. "
        "From a notebook or a test call mirrored.launch(fn, towers=N); from a shell use "
        "'mirrored run --towers N script.py'; or take one device with devices=['cpu:0'] or ['cuda:0']."
    )
