"""The guard of the tests ends a test that hangs, with its processes, and reports what they did."""

from __future__ import annotations

import pathlib
import re
import textwrap

import pytest

from tests.support.processes import has_ended
from tests.support.programs import run_program

pytestmark = pytest.mark.extended

CONFTEST = """
import pytest
from tests.support import guard

guard.SECONDS = 6.0

def pytest_configure(config):
    config.pluginmanager.register(guard.Guard())
"""

TESTS = """
import os, pathlib, subprocess, sys, threading, time
import pytest
from tests.support.programs import run_program, start_program

HERE = pathlib.Path(__file__).parent

def test_a_program_that_waits():
    program = "import time; print('says this', flush=True); time.sleep(10_000)"
    run_program(["-c", program], code=0)

def test_a_process_that_outlives_its_parent():
    child = "import os; open('orphan', 'w').write(str(os.getpid())); import time; time.sleep(10_000)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    subprocess.run([sys.executable, "-c", parent], cwd=HERE)

@pytest.fixture(scope="module", autouse=True)
def of_all_tests():
    process = subprocess.Popen(["sleep", "10000"])
    yield
    process.kill()

def test_a_lock_in_this_process():
    threading.Event().wait()

def test_that_works_for_long():
    program = start_program(["-c", "import time\\nend = time.monotonic() + 8\\nwhile time.monotonic() < end: pass"])
    program.communicate()
"""


def test_what_hangs_is_ended_and_explained(tmp_path: pathlib.Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(textwrap.dedent(TESTS))
    words = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", "."]
    output = run_program(words, cwd=tmp_path, env={"COLUMNS": "200"}, code=1).stdout
    assert re.search(r"2 failed, 2 passed, 1 error in", output), output
    assert "FAILED test_it.py::test_a_program_that_waits - AssertionError" in output
    assert "FAILED test_it.py::test_a_lock_in_this_process - tests.support.guard.HangError" in output
    assert "ERROR test_it.py::test_a_process_that_outlives_its_parent - AssertionError: processes of the" in output
    assert "says this" in output
    stack = r'process \d+ \(S\): .*-c import time; print.*\n.*most recent call first.*\n  File "<string>"'
    assert re.search(stack, output), output
    assert has_ended(int((tmp_path / "orphan").read_text()))
