"""A program that is a fork of the tests' server finds what a new Python finds."""

import os
import pathlib
import signal
import subprocess

import pytest

from tests.support.programs import start_program

LOOK = """
import json, os, resource, signal, sys, threading
import torch
seen = {
    "words": [sys.argv, sys.orig_argv[1:], sys.path, __name__],
    "variables": dict(os.environ),
    "folder": os.getcwd(),
    "input": sys.stdin.read(),
    "is a terminal": [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "encodings": [[stream.encoding, stream.errors] for stream in (sys.stdout, sys.stderr)],
    "descriptors": [number for number in range(3, 400) if os.path.exists(f"/proc/self/fd/{number}")],
    "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "parent": os.getppid(),
    "threads": [torch.get_num_threads(), threading.active_count()],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "umask": os.umask(0),
}
print(json.dumps(seen, indent=1, sort_keys=True))
print("an error", file=sys.stderr)
if sys.argv[1] == "raises":
    raise ValueError("boom")
if sys.argv[1] == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("end", ["0", "3", "raises", "signal"])
@pytest.mark.parametrize("session", [False, True])
def test_a_fork_is_like_a_new_python(end: str, session: bool, tmp_path: pathlib.Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    found = []
    for fork in (False, True):
        variables = {"A_VARIABLE": "of this program"}
        words = ["-m", "look", end]
        program = start_program(words, fork=fork, env=variables, cwd=tmp_path, stdin=subprocess.PIPE, session=session)
        output, errors = program.communicate("a line\n")
        assert isinstance(program._process, subprocess.Popen) != fork
        found.append((output, errors, program.returncode))
    new, forked = found
    assert forked == new
    assert new[2] == {"raises": 1, "signal": -signal.SIGTERM}.get(end, int(end) if end.isdigit() else None)
    assert f'"parent": {os.getpid()}' in new[0]


def test_variables_that_are_read_while_torch_is_loaded_make_a_new_python() -> None:
    program = start_program(["-m", "this"], fork=True, env={"TORCH_LOGS": "dynamo"})
    program.communicate()
    assert isinstance(program._process, subprocess.Popen)
