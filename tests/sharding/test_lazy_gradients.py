"""Gradients of sharded parameters are gathered when a script looks: all towers have to look."""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import signal
import time

import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.support.features import mlp
from tests.support.jobs import parameters_of
from tests.support.meeting import meet
from tests.support.sharded import equal_unsharded, launch, small_training
from towers.collectives.shared_memory import regions


def mirror_copies(strategy: mirrored.Strategy) -> list[Tensor]:
    """A script that mirrors a fresh copy of a model in every step (learning to learn), with few places for regions."""
    regions.KEYS = 40
    base = mlp()
    for number in range(20):
        model = copy.deepcopy(base)
        strategy.mirror(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.full((2, 5), float(number + strategy.topology.index))

        def step(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()

        strategy.run(step, (x,))
        base = model
    return parameters_of(base)


def test_copies_of_a_model_take_the_places_of_those_before(capfd: pytest.CaptureFixture[str]) -> None:
    equal_unsharded(mirror_copies)
    assert "cannot be allocated" not in capfd.readouterr().err


def ask_on_the_chief_after_three_models(strategy: mirrored.Strategy) -> int:
    for _ in range(3):
        model = mlp()
        strategy.mirror(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)  # which has no state

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()

        strategy.run(step)
    return len(optimizer.state_dict()["param_groups"]) if strategy.is_chief else 0


def test_the_chief_alone_can_ask_where_other_regions_have_lain() -> None:
    assert launch(ask_on_the_chief_after_three_models) == [1, 0]


def come_for_nothing_that_has_a_name(strategy: mirrored.Strategy) -> str:
    barrier = strategy.engine.averager._channel.regions.barrier
    barrier.wait_tagged("tries")
    try:
        if os.environ["RANK"] == "0":
            barrier.wait_tagged("steps Adam")
        else:
            barrier.wait()
            barrier.wait()
    except mirrored.TowersError as error:
        meet("the end")
        return str(error)
    return "nothing noticed"


def test_a_tower_that_comes_for_something_without_a_name_finds_out() -> None:
    first, second = launch(come_for_nothing_that_has_a_name)
    assert "tower 0 steps Adam, tower 1 makes another call" in first
    assert "tower 0 broke off a collective" in second


def read_on_the_chief_only(strategy: mirrored.Strategy) -> None:
    def read(model: nn.Module) -> None:
        if strategy.is_chief:
            float(model[0].weight.grad.norm())

    strategy.run(small_training(strategy, torch.optim.Adam, between=read)[2])


def test_a_gradient_that_one_tower_alone_reads_is_an_error_on_all() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        launch(read_on_the_chief_only)
    assert len(caught.value.failures) == 2
    for failure in caught.value.failures:
        assert isinstance(failure.exception, mirrored.DisagreementError)
        assert "tower 0 uses the averaged gradients" in str(failure.exception)
        assert "tower 1 steps Adam number 0" in str(failure.exception)


class Deadly(torch.optim.SGD):
    """On tower 1, its step ends the process: at once, or as on a busy host, seconds after the files are closed."""

    elementwise = True
    seconds = 0.0

    def step(self) -> None:
        if os.environ["RANK"] == "1":
            for file in pathlib.Path("/proc/self/fd").iterdir() if self.seconds else ():
                with contextlib.suppress(OSError):  # the listing itself
                    if "memfd:towers" in os.readlink(file):
                        os.close(int(file.name))
            meet("closed")
            time.sleep(self.seconds)  # the time until the process has ended
            os.kill(os.getpid(), signal.SIGKILL)
        meet("closed")
        super().step()


def die_in_the_step(strategy: mirrored.Strategy, seconds: float) -> None:
    Deadly.seconds = seconds
    strategy.run(small_training(strategy, lambda parameters: Deadly(parameters, 0.1))[2])


@pytest.mark.parametrize("seconds", [0.0, pytest.param(3.0, marks=pytest.mark.extended)])
def test_a_tower_that_dies_in_its_part_of_the_step_is_named(seconds: float) -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        launch(die_in_the_step, seconds, count=3)
    assert caught.value.tower == 1
    for failure in caught.value.failures:
        if failure.tower != 1:
            assert "tower 1 (process" in failure.traceback


def come_one_meeting_late(strategy: mirrored.Strategy) -> None:
    """On the chief alone a gradient goes by, so that the others' next meeting is its second."""
    model = strategy.mirror(mlp())
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.zero_grad()
        if number == 2 and strategy.is_chief:
            torch.autograd.grad(model(torch.ones(2, 5)).sum(), list(model.parameters()))
        optimizer.step()

    for number in range(6):
        strategy.run(step, (number,))


def test_towers_that_meet_one_meeting_apart_find_out() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        launch(come_one_meeting_late)
    assert isinstance(caught.value.__cause__, mirrored.DisagreementError)


def train_beside_a_sparse_table(strategy: mirrored.Strategy) -> list[Tensor]:
    """The table's gradients are clipped with the others and not stepped: no sharded optimizer takes them."""
    with strategy.scope():
        table, model = nn.Embedding(6, 5, sparse=True), mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    seen: list[Tensor] = []

    def step(number: int) -> None:
        optimizer.zero_grad()
        table.zero_grad()
        model(table(torch.tensor([number, strategy.topology.index]))).square().mean().backward()
        if number == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        seen.append(table.weight.grad.to_dense())
        optimizer.step()

    for number in range(4):
        strategy.run(step, (number,))
    return [*seen, *parameters_of(model)]


def test_dense_gradients_are_gathered_when_used_beside_sparse_ones() -> None:
    equal_unsharded(train_beside_a_sparse_table)
