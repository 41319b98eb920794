"""Towers of a sharded model that end, hang, or make other calls than the others: the message names the tower."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from mirrored.checkpoint import save_weights
from mirrored.checkpoint.folder import Disk
from tests.fully_sharded.test_training import Block
from tests.support.jobs import launch, seeded, text_of

STEP = 4
"""The step in which something is wrong on tower 1."""


class Program:
    """Training in which tower 1 does something else at a place of one step."""

    def __init__(self, place: str, fault: Callable[[], Any], **options: Any) -> None:
        self.place, self.fault, self.step = place, fault, 0
        self.strategy = mirrored.MirroredStrategy(seed=0, communication=mirrored.CommunicationOptions(**options))
        with self.strategy.scope():
            model = seeded(lambda: nn.Sequential(Block(6), nn.Identity(), Block(6), nn.Linear(6, 1)))
        model[1].register_forward_hook(self._on_forward)
        self.model = self.strategy.shard(model, [Block])
        self.optimizer = torch.optim.AdamW(model.parameters())

    def at(self, place: str) -> None:
        if (self.place, self.step, self.strategy.topology.index) == (place, STEP, 1):
            self.fault()

    def _on_forward(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.at("forward")
        output.register_hook(lambda gradient: self.at("backward"))

    def train_step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = mirrored.compute_average_loss(F.mse_loss(self.model(x)[:, 0], x.sum(1), reduction="none"))
        self.at("before backward")
        loss.backward()
        self.at("before the optimizer")
        self.optimizer.step()
        return loss.detach()

    def train(self) -> None:
        x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
        data = self.strategy.distribute_dataset((x,), 8)
        for batch in data:
            self.step += 1
            try:
                loss = self.strategy.run(self.train_step, args=batch)
            except Skip:
                loss = torch.zeros(())
            self.strategy.reduce("sum", loss)


class Skip(Exception):
    """Ends a step early, without an error."""


def _skip() -> None:
    raise Skip


def _raise() -> None:
    raise ValueError("a fault of the script")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _train(place: str, fault: Callable[[], Any], options: dict[str, float]) -> None:
    Program(place, fault, **options).train()


@pytest.mark.parametrize("place", ["forward", "backward", "before the optimizer"])
@pytest.mark.parametrize(
    ("fault", "ending"),
    [(_die, "the process of tower 1 ended by SIGKILL"), (_raise, "ValueError: a fault")],
)
def test_a_tower_that_ends_is_named(place: str, fault: Callable[[], Any], ending: str) -> None:
    text = text_of(mirrored.TowerFailedError, launch, _train, place, fault, {}, count=3)
    assert text.startswith("tower 1 of 3 failed, in step 4")
    assert ending in text


@pytest.mark.extended
@pytest.mark.parametrize(
    ("place", "waits"),
    [
        ("forward", "gathering parameters"),
        ("before backward", "gathering parameters"),
        ("backward", "averaging gradients"),
    ],
)
def test_a_tower_that_leaves_a_step_is_in_a_deadlock_with_the_others(place: str, waits: str) -> None:
    text = text_of(mirrored.TowerFailedError, launch, _train, place, _skip, {}, count=3)
    stuck = "tower 1 is in step 4, in the step's function, at reduce('sum', axis=None)"
    assert any(f"tower {tower} is in step 4, {waits}, and waits for tower 1" in text for tower in (0, 2))
    assert any(f"{stuck}, and waits for tower {tower}" in text for tower in (0, 2))
    assert "DeadlockError" in text


def _hang() -> None:
    time.sleep(1000)


@pytest.mark.extended
@pytest.mark.parametrize(("place", "waits"), [("forward", "gathering parameters"), ("backward", "averaging gradients")])
def test_a_tower_that_hangs_is_named(place: str, waits: str) -> None:
    text = text_of(mirrored.TowerFailedError, launch, _train, place, _hang, {"step_timeout_seconds": 4.0}, count=3)
    assert "StepTimeoutError" in text
    tower_1 = "tower 1 has been in one run for 4 s, in step 4, in the step's function"
    assert tower_1 in text or "tower 1 is in step 4, in the step's function" in text
    assert tower_1 not in text or f"tower 0 is in step 4, {waits}" in text


def test_a_tower_that_does_not_step_is_found_by_the_next_check() -> None:
    text = text_of(mirrored.TowerFailedError, launch, _train, "before the optimizer", _skip, {}, count=3)
    assert "MirrorError: number of steps of AdamW is no longer the same on all towers" in text
    assert "(9 on towers 0 and 2, 8 on tower 1)" in text


# -- saving ----------------------------------------------------------------------------------------------


class WatchedDisk(Disk):
    """Does something when a file of shards is written."""

    def __init__(self, fault: Callable[[], Any]) -> None:
        self.fault: Callable[[], Any] | None = fault

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.fault is not None and "shards-" in os.readlink(f"/proc/self/fd/{descriptor}"):
            self.fault()
        return super().write(descriptor, data)


def _save(folder: str, fault: Callable[[], Any], options: dict[str, float], asynchronous: bool = True) -> None:
    program = Program("", fault, **options)
    disk = WatchedDisk(fault) if program.strategy.topology.index == 1 else None
    objects = {"model": program.model, "optimizer": program.optimizer}
    manager = mirrored.CheckpointManager(program.strategy, folder, objects, disk=disk, asynchronous=asynchronous)
    if disk is not None:
        disk.fault = None
    manager.save("good", wait=True)
    if disk is not None:
        disk.fault = fault
    manager.save("bad")
    program.train()
    manager.wait()


def _restore(folder: str) -> list[str]:
    program = Program("", _skip)
    manager = mirrored.CheckpointManager(program.strategy, folder, {"model": program.model})
    manager.restore("good")
    return sorted(entry.name for entry in pathlib.Path(folder).iterdir())


def test_a_tower_that_is_killed_while_it_saves(tmp_path: pathlib.Path) -> None:
    text = text_of(mirrored.TowerFailedError, launch, _save, str(tmp_path), _die, {}, count=3)
    assert "tower 1 of 3 failed" in text
    assert "SIGKILL" in text
    assert "bad" not in os.listdir(tmp_path)
    for names in launch(_restore, str(tmp_path), count=2):
        assert names == [".lock", "good"]


def _raise_on_disk() -> None:
    raise ValueError("a fault of the disk")


def test_an_unknown_error_while_a_tower_saves(tmp_path: pathlib.Path) -> None:
    text = text_of(mirrored.TowerFailedError, launch, _save, str(tmp_path), _raise_on_disk, {}, count=3)
    assert "CheckpointError: tower 1: checkpoint" in text
    assert "a fault of the disk" in text
    assert sorted(os.listdir(tmp_path)) == [".lock", "good"]


def _start_no_thread(folder: str) -> list[str]:
    program = Program("", _skip)
    manager = mirrored.CheckpointManager(program.strategy, folder, {"model": program.model})
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "mirrored-checkpoint" and program.strategy.topology.index == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse  # type: ignore[method-assign]
    manager.save("bad")
    text = text_of(mirrored.CheckpointError, manager.wait)
    threading.Thread.start = start  # type: ignore[method-assign]
    manager.save("good", wait=True)
    return [text, *sorted(os.listdir(folder))]


def test_a_tower_that_cannot_start_a_thread_to_save(tmp_path: pathlib.Path) -> None:
    for text, *names in launch(_start_no_thread, str(tmp_path), count=3):
        assert "tower 1: checkpoint" in text
        assert "can't start new thread" in text
        assert names == [".lock", "good"]


@pytest.mark.extended
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_tower_whose_disk_hangs_is_named(tmp_path: pathlib.Path, asynchronous: bool) -> None:
    options = {"timeout_seconds": 4.0}
    text = text_of(mirrored.TowerFailedError, launch, _save, str(tmp_path), _hang, options, asynchronous, count=3)
    assert re.search(r"CollectiveTimeoutError: tower [02] waited 4 s for tower 1", text)
    assert "writing its parts of checkpoint bad" in text


def _disagree(folder: str, call: str) -> None:
    program = Program("", _skip)
    manager = mirrored.CheckpointManager(program.strategy, folder, {"model": program.model})
    if program.strategy.topology.index == 0:
        program.strategy.reduce("sum", 1.0)
    elif call == "save":
        manager.save()
    else:
        save_weights(program.model, f"{folder}/weights.safetensors")


@pytest.mark.parametrize(
    ("call", "words"), [("save", "saves a checkpoint"), ("export", "saves the weights of a sharded")]
)
def test_towers_that_do_not_all_save(tmp_path: pathlib.Path, call: str, words: str) -> None:
    text = text_of(mirrored.TowerFailedError, launch, _disagree, str(tmp_path), call, count=3)
    assert "DisagreementError" in text
    assert words in text
    assert "tower 0" in text
