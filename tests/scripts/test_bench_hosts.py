"""``scripts/bench hosts``: towers on hosts that are network namespaces, which are gone afterwards."""

from __future__ import annotations

import pathlib
import re
import shutil
import signal
import subprocess

import pytest

from tests.support.hosts import ip
from tests.support.jobs import ROOT
from tests.support.programs import end_of, run_program, start_program
from tests.support.waiting import wait_until

pytestmark = pytest.mark.extended

PROGRAM = [str(ROOT / "scripts" / "benchmarks"), "hosts"]


@pytest.fixture(autouse=True)
def namespaces_and_shaping() -> None:
    """Skip where hosts cannot be played."""
    name = "towers-bench-1-try"  # process 1 is always there, so no benchmark takes it for a dead one's
    if shutil.which("ip") is None or shutil.which("tc") is None or ip("netns", "add", name).returncode:
        pytest.skip("network namespaces need iproute2 and the right to make them")
    try:
        words = f"tc -n {name} qdisc add dev lo root tbf rate 1gbit burst 100k latency 1ms"
        if subprocess.run(words.split(), capture_output=True).returncode:
            pytest.skip("this kernel has no tbf")
    finally:
        ip("netns", "del", name)


def namespaces_of(process: int) -> list[str]:
    listed = ip("netns", "list").stdout.decode().splitlines()
    return [line for line in listed if line.startswith(f"towers-bench-{process}-")]


def test_a_short_run() -> None:
    options = "--shapes 2x1,2x2 --rates none,1 --turns 1 --seconds 0 --variants ours,bf16,powersgd"
    process = start_program([*PROGRAM, *options.split()])
    output, _ = end_of(process, 0)
    for shape, limit in (("2x1", "no limit"), ("2x1", "1 Gbit/s"), ("2x2", "no limit"), ("2x2", "1 Gbit/s")):
        assert f"even-64, {shape}, {limit}, 0 ms: the cable does " in output
    for label in ("ours ÷ DDP", "bf16 on the wire ÷ ours", "PowerSGD ÷ ours", "the model of scripts/plan ÷ ours"):
        assert output.count(label) == 4
    assert namespaces_of(process.pid) == []


def test_packets_are_delayed_and_their_rate_limited() -> None:
    options = "--shapes 3x1 --rates 0.5 --delays 20 --turns 1 --seconds 0"
    output = run_program([*PROGRAM, *options.split()], code=0).stdout
    found = re.search(r"3x1, 0.5 Gbit/s, 20 ms: the cable does (\S+) Gbit/s, there and back in (\S+) ms", output)
    assert found is not None, output
    assert 0 < float(found[1]) < 0.55  # the bucket of tokens is full at first
    assert float(found[2]) >= 40


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_interrupted(number: signal.Signals) -> None:
    process = start_program([*PROGRAM, "--shapes", "2x1", "--rates", "0.1", "--seconds", "100"])
    wait_until(lambda: len(namespaces_of(process.pid)) == 3)
    process.send_signal(number)
    process.communicate()
    assert process.returncode != 0
    assert namespaces_of(process.pid) == []


def test_without_iproute2_it_says_so(tmp_path: pathlib.Path) -> None:
    result = run_program(PROGRAM, env={"PATH": str(tmp_path)}, code=1)
    sentence = (
        "scripts/bench hosts: hosts are played by network namespaces, which need root, and iproute2's ip and tc\n"
    )
    assert result.stderr == sentence
