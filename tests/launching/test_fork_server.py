"""Towers that are forks: they find what they would find in a new Python, and end as there."""

from __future__ import annotations

import json
import pathlib
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.programs import run_program

pytestmark = pytest.mark.extended

LOOK = """
import atexit, gc, json, logging, multiprocessing, os, random, signal, sys, tempfile, threading

torch_was_loaded = "torch" in sys.modules
import numpy, torch

main = sys.modules["__main__"]
mine = {
    "__main__": [__name__, __file__, repr(__spec__)[:60], __cached__, type(__loader__).__name__, main.__file__],
    "words": [sys.argv, sys.orig_argv[1:], sys.path, sys.flags.optimize],
    "streams": [sys.stdout.write_through, sys.stdout.encoding, sorted(os.listdir("/proc/self/fd"))],
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals()) if number < 32],
    "directory": [os.getcwd(), tempfile.gettempdir()],
    "variables": {name: value for name, value in os.environ.items() if name in ("HOME", "PATH", "ADDED")},
    "threads": [threading.active_count(), threading.current_thread() is threading.main_thread()],
    "torch": torch.get_num_threads(),
    "garbage": [gc.isenabled(), gc.get_threshold()],
    "logging": logging.root.manager.disable,
    "parent": multiprocessing.parent_process(),
}
random_numbers = [numpy.random.rand(), random.random(), torch.rand(()).item()]
with open(f"{sys.argv[1]}.{os.environ.get('RANK', 'alone')}", "w") as file:
    json.dump([mine, random_numbers, torch_was_loaded, os.getsid(0) == os.getpid()], file)
"""


def look(command: Sequence[str], words: Sequence[str], folder: pathlib.Path) -> list[Any]:
    """What the program finds as two towers, and alone in a new Python.

    Returns:
        For each: what there is; random numbers; whether torch was loaded; whether it has a session of its own.
    """
    file = str(folder / "found")
    variables = {"OMP_NUM_THREADS": "1", "ADDED": "1"}
    run_program([*command, *words, file], env=variables, code=0, cwd=str(folder))
    run_program([*words, file], env=variables, code=0, cwd=str(folder))
    return [json.loads(pathlib.Path(f"{file}.{who}").read_text()) for who in (0, 1, "alone")]


MIRRORED_RUN = ["-m", "mirrored", "run", "--devices", "cpu:0,cpu:1"]


@pytest.mark.parametrize("as_module", [False, True])
def test_a_fork_finds_what_a_new_python_finds(as_module: bool, tmp_path: pathlib.Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    words = ["-m", "look"] if as_module else ["look.py"]
    (first, numbers, *forked), (second, others, *_), (alone, _, fresh, _) = look(MIRRORED_RUN, words, tmp_path)
    assert forked == [True, True]
    assert fresh is False
    assert first == alone
    assert second == alone
    assert not set(numbers) & set(others)


END = """
import atexit, sys, threading, time

atexit.register(print, "handler", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
how = sys.argv[1]


def fail():
    raise KeyError(how)


if how == "exception":
    fail()
if how == "text":
    sys.exit("a text")
if how == "number":
    sys.exit(3)
if how == "interrupt":
    raise KeyboardInterrupt
if how == "syntax":
    exec("a b")
"""


def run_fork(words: Sequence[str], cwd: pathlib.Path) -> tuple[str, str, int]:
    """What a program prints as a fork, and its exit code."""
    program = """
import os, sys

del sys.path[0]  # the current directory
from tests.support.programs import run_program
from towers.launching.starting.fork_server import ForkServer

words = [sys.executable, *sys.argv[1:]]
process = ForkServer(sys.path).start(words, env=os.environ, stdout=None, stderr=None, start_new_session=True)
sys.exit(f"code {process.wait(600)}")
"""
    result = run_program(["-c", program, *words], cwd=str(cwd), code=1)
    errors, _, code = result.stderr.rpartition("code ")
    return result.stdout, errors, int(code)


@pytest.mark.parametrize("how", ["end", "exception", "text", "number", "interrupt", "syntax"])
def test_a_fork_ends_as_a_new_python_does(how: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "end.py").write_text(END)
    alone = run_program(["end.py", how], cwd=str(tmp_path))
    assert alone.returncode == {"end": 0, "number": 3, "interrupt": -signal.SIGINT}.get(how, 1)
    assert run_fork(["end.py", how], tmp_path) == (alone.stdout, alone.stderr, alone.returncode)


UNCLOSED = """
import atexit, sitecustomize

atexit.unregister(sitecustomize._end)  # it freezes all objects, which only the tests do
log, raw = open("log", "w"), open("raw", "wb")
log.write("a line")
raw.write(b"bytes")
raise ValueError("boom")
"""


def test_a_failing_program_keeps_the_data_of_files_that_it_has_not_closed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "fail.py").write_text(UNCLOSED)
    _, errors, code = run_fork(["fail.py"], tmp_path)
    assert (errors.splitlines()[-1], code) == ("ValueError: boom", 1)
    assert (tmp_path / "log").read_text() == "a line"
    assert (tmp_path / "raw").read_bytes() == b"bytes"


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["-X", "dev", "look.py"], {}),
        (["folder"], {"folder/__main__.py": "exec(open('look.py').read())"}),
        (["look.py"], {"sympy.py": ""}),
    ],
    ids=["options", "a folder", "a hidden module"],
)
def test_where_a_fork_would_not_do_there_is_a_new_python(
    words: list[str], files: dict[str, str], tmp_path: pathlib.Path
) -> None:
    for name, text in {"look.py": "import sys; print('torch' in sys.modules, sys.argv[1:])", **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert run_fork([*words, "word"], tmp_path) == ("False ['word']\n", "", 0)


def test_without_its_server_an_agent_starts_a_new_python_and_a_fork_ends_with_its_agent() -> None:
    """The fork has the standard output, so it is waited for as well."""
    program = """
import os, sys, time
from towers.launching.starting.fork_server import ForkServer

settings = {"env": os.environ, "stdout": None, "stderr": None, "start_new_session": True}
server = ForkServer(sys.path)
before = set(open(f"/proc/self/task/{os.getpid()}/children").read().split())
server.start([sys.executable, "-c", "import time; time.sleep(10_000)"], **settings)
(child,) = map(int, before)
os.kill(child, 9)
os.waitid(os.P_PID, child, os.WEXITED)
process = server.start([sys.executable, "-c", "import sys; sys.exit('torch' in sys.modules)"], **settings)
assert process.wait(600) == 0
os.kill(os.getpid(), 9)
"""
    run_program(["-c", program], code=-signal.SIGKILL)
