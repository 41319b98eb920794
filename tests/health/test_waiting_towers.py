"""Towers that wait for one that is stopped, slow or stuck: the error shows what that one does."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mirrored
from tests.support.jobs import GLOO, SETTINGS, towers
from tests.support.meeting import say, shorten_deadlines, wait_for
from tests.support.unwell import TORCHRUN, unwell
from tests.support.waiting import HANG, forever, wait_until
from towers.collectives import nccl, process_group
from towers.health import heartbeat
from towers.health.flight_recorder import entered
from towers.health.heartbeat import Heartbeat
from towers.health.status import StatusRecord

pytestmark = pytest.mark.extended


def test_a_stopped_tower_is_found_at_the_deadline() -> None:
    result, _ = unwell(3, "stop", "1", "3", "forward", "timeout_seconds=3")
    last = result.stderr.splitlines()[-1]
    assert re.match(r"mirrored: tower [02] failed in step 3, averaging gradients: CollectiveTimeoutError: ", last)
    assert re.search(r"tower 1 has sent no heartbeat for \d+ s \(stopped, or its host is gone\)", last)
    assert last.endswith("it was last seen in step 3, in the step's function")


def wait_for_a_stopped_tower(strategy: mirrored.Strategy) -> None:
    """While tower 0 asks tower 2, which waits, too, tower 1 is woken: tower 2 does so at its deadline."""
    processes = strategy.gather(torch.tensor([os.getpid()])).tolist()
    if strategy.topology.index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        forever()
    if strategy.topology.index == 0:
        ask, record = Heartbeat._ask, strategy.health.record.of_peer(1)
        assert record is not None

        def woken(self: Heartbeat, asked: list[int]) -> dict[int, str]:
            assert asked == [2]
            before = record.last_beat
            os.kill(processes[1], signal.SIGCONT)
            wait_until(lambda: record.last_beat > before)
            return ask(self, asked)

        Heartbeat._ask = woken  # type: ignore[assignment, method-assign]
        shorten_deadlines(1.2 * heartbeat._SILENT_AND_STOPPED)
    strategy.reduce("sum", 1)


def test_a_stopped_tower_that_another_one_wakes_is_said_to_have_been_silent() -> None:
    with pytest.raises(mirrored.TowerFailedError, match=r"; tower 1 has sent no heartbeat for \d+ s"):
        towers(wait_for_a_stopped_tower, count=3)


def wait_for_a_slow_tower(strategy: mirrored.Strategy, all_asked: int, impatient: tuple[int, ...] = (0, 2)) -> None:
    """More towers than ``all_asked`` are not all asked for their stacks."""
    heartbeat._FEW = all_asked
    with strategy.scope():
        weight = torch.nn.Linear(2, 1)
    slow = torch.ones(3, 2, requires_grad=True)

    def stay(_: torch.Tensor) -> None:
        say("tower 1 is slow")
        forever()

    def step() -> None:
        if strategy.health.step == 2 and strategy.topology.index == 1:
            slow.register_hook(stay)
        elif strategy.health.step == 2 and strategy.topology.index in impatient:
            wait_for("tower 1 is slow")
            shorten_deadlines(1)
        weight(slow).mean().backward()

    strategy.run(step)
    strategy.run(step)


@pytest.mark.parametrize("all_asked", [16, 1])
@pytest.mark.parametrize("way", ["shared memory", "gloo"])
def test_the_error_of_who_waits_shows_what_the_slow_tower_does(way: str, all_asked: int) -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        towers(wait_for_a_slow_tower, all_asked, count=3, settings=SETTINGS[way])
    text = str(caught.value)
    assert re.match(r"tower [02] of 3 failed, in step 2, averaging gradients:", text)
    assert re.search(r"; tower 1 is in step 2, backward, for \d+ s\. Every tower", text)
    assert "forever()" in text[text.index("tower 1, most recent call last:") :]


def call_more_often_than_the_others(strategy: mirrored.Strategy, seconds: float) -> None:
    """The chief calls a collective of the script's own group that the other tower leaves out, and waits in it."""
    group = dist.new_group([0, 1], group_desc="of the script")
    dist.all_reduce(torch.ones(3), group=group)
    if strategy.is_chief:
        work = dist.all_reduce(torch.ones(2, 5), group=group, async_op=True)
        say("the chief waits")
        work.wait()
    wait_for("the chief waits")
    wait_until(lambda: all(place.ended for name, place in entered().items() if name.endswith("(of the script)")))
    shorten_deadlines(seconds)
    strategy.reduce("sum", 1)


def test_the_error_shows_a_collective_of_the_script_that_one_tower_has_left_out() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        towers(call_more_often_than_the_others, 0.5, settings=SETTINGS["gloo"])
    text = str(caught.value)
    assert re.search(
        r"\ngroup \d+ \(of the script\): tower 0 is in number 2, all_reduce of Float \[2, 5\]; "
        r"tower 1 last called number 1, all_reduce of Float \[3\](\n|$)",
        text,
    )


QUESTIONS = ("where?", "why?")


def first_result(strategy: mirrored.Strategy, few: int) -> list[list[str]]:
    heartbeat._FEW = few
    peers, index = strategy.health.heartbeat, strategy.topology.index
    assert peers is not None
    return [peers.first_result(question, functools.partial(list, [question, str(index)])) for question in QUESTIONS]


def test_of_many_towers_one_answers_a_question_for_all() -> None:
    assert towers(first_result, 3, count=3) == [[[question, str(i)] for question in QUESTIONS] for i in range(3)]
    first, *others = towers(first_result, 2, count=3)
    assert others == [first, first]
    assert [found[0] for found in first] == [*QUESTIONS]


@pytest.mark.parametrize("all_asked", [16, 1])
def test_a_slow_tower_is_named_by_towers_that_wait_for_others_which_wait_for_it(all_asked: int) -> None:
    """On hosts of two and three towers, tower 4 waits for tower 2, which waits for the other host's tower 0."""
    with pytest.raises(mirrored.TowerFailedError) as caught:
        towers(wait_for_a_slow_tower, all_asked, (4,), count=5, hosts="aabbb")
    text = str(caught.value)
    assert re.search(r"tower 4 waited 1 s for tower 2 .*; tower 1 is in step 2, backward, for \d+ s\. Every", text)
    assert "forever()" in text[text.index("tower 1, most recent call last:") :]


def wait_for_a_late_answer(strategy: mirrored.Strategy, held: str) -> None:
    """Tower 1's answer comes after the limit of a process that cannot run: its thread, or all of it, is held up."""
    strategy.reduce("sum", 1)
    seconds = 2 * heartbeat._SILENT_AND_STOPPED
    if strategy.topology.index == 1:
        stack = heartbeat.main_stack

        def slowly() -> str:
            time.sleep(seconds)
            return stack()

        if held == "the thread that answers":
            heartbeat.main_stack = slowly
        say("tower 1 is slow")
        if held == "the interpreter's lock":
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        forever()
    wait_for("tower 1 is slow")
    shorten_deadlines(0.1)
    strategy.reduce("sum", 1)


@pytest.mark.parametrize("held", ["the thread that answers", "the interpreter's lock"])
def test_a_tower_that_lives_is_waited_for_until_it_answers(held: str) -> None:
    with pytest.raises(mirrored.TowerFailedError, match="tower 1, most recent call last:"):
        towers(wait_for_a_late_answer, held)


def hang_with_a_deadline() -> None:
    """Tower 1 alone is watched, and as soon as it hangs: it is the only one that can be late."""
    watch_steps = heartbeat._watch_steps

    def watch(health: Any, record: StatusRecord, tower: int, seconds: float) -> None:
        if tower == 1:
            wait_for("tower 1 hangs")
        watch_steps(health, record, tower, seconds if tower == 1 else math.inf)

    heartbeat._watch_steps = watch
    strategy = mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(step_timeout_seconds=2))

    def step() -> None:
        if strategy.topology.index == 1:
            say("tower 1 hangs")
            forever()
        strategy.reduce("sum", 1)

    strategy.run(step)


def test_a_step_has_a_deadline() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(hang_with_a_deadline, towers=2, timeout=HANG)
    assert caught.value.tower == 1
    assert str(caught.value).startswith("tower 1 of 2 failed, in step 1, in the step's function:")
    assert "forever()" in str(caught.value)


def wait_for_a_gpu(strategy: mirrored.Strategy, found: str) -> None:
    """NCCL finds something while the host waits for a GPU. A mock plays NCCL, which shows nothing of GPUs."""

    class Nccl:
        def _get_backend(self, device: torch.device) -> Nccl:
            return self

        def get_error(self) -> Nccl:
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            self.name = found if frame.f_code is forever.__code__ else "SUCCESS"
            return self

    nccl.watch(process_group.failures)

    def step() -> None:
        if strategy.topology.index == 1 and found == "TIMEOUT":
            with strategy.health.during("saving"):
                say("tower 1 saves")
                forever()
        elif found == "TIMEOUT":
            wait_for("tower 1 saves")
        strategy.communicator.backend, strategy.communicator._group = "nccl", Nccl()
        forever()

    strategy.run(step)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ("TIMEOUT", r"CollectiveTimeoutError: tower 0 waited 600 s .*; tower 1 is in step 1, saving, for \d+ s"),
        ("COMM_ERROR", r"PeerLostError: tower [01] lost its connection to another tower in a collective \(NCCL: COMM"),
    ],
)
def test_what_nccl_finds_while_the_host_waits_for_a_gpu_is_said(found: str, text: str) -> None:
    with pytest.raises(mirrored.TowerFailedError, match=text) as caught:
        towers(wait_for_a_gpu, found, settings=GLOO)
    assert "forever()" in str(caught.value)
    assert all(failure.consequence == (found == "COMM_ERROR") for failure in caught.value.failures)


def test_under_the_users_torchrun_the_others_say_where_it_hangs() -> None:
    result, _ = unwell(2, "sleep", "1", "3", "forward", "timeout_seconds=2", starter=TORCHRUN)
    assert re.search(r"; tower 1 is in step 3, in the step's function, for \d+ s\. ", result.stderr)
    assert "forever()" in result.stderr
