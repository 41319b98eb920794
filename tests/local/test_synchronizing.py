"""When local towers are synchronised, what is sent, and what is left to each of them."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.support.jobs import (
    all_raise,
    launch,
    make_data,
    make_mlp,
    parameters_of,
    seeded,
    text_of,
    towers,
)
from tests.support.logs import Records
from tests.support.programs import run_program
from tests.support.steps import averaging_step, local_share
from towers.collectives.communicator import Communicator

EVERY_3: dict[str, Any] = {"synchronize": mirrored.LocalSGD(every=3)}


def _mlp(strategy: mirrored.Strategy, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    with strategy.scope():
        model = make_mlp()
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def _same(strategy: mirrored.Strategy, model: nn.Module) -> bool:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    first, *others = strategy.gather(flat.unsqueeze(0))
    return all(torch.equal(first, other) for other in others)


def _one_leaves_out_a_step(strategy: mirrored.Strategy) -> list[bool]:
    """A GradScaler finds an infinity in the gradients of tower 1, in its second step."""
    model, optimizer = _mlp(strategy)
    x, y = local_share(strategy, *make_data(12))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        losses = factor * nn.functional.cross_entropy(model(x), y, reduction="none")
        scaler.scale(mirrored.compute_average_loss(losses, None, 12)).backward()
        scaler.step(optimizer)
        scaler.update()

    same = []
    for at in range(6):
        before = parameters_of(model)
        strategy.run(step, args=(math.inf if (at, strategy.topology.index) == (1, 1) else 1.0,))
        same.append(_same(strategy, model))
        if at == 1:
            assert all(map(torch.equal, before, parameters_of(model))) == (strategy.topology.index == 1)
    assert scaler.get_scale() == (4.0, 2.0)[strategy.topology.index]
    return same


def test_a_step_that_one_tower_leaves_out_counts() -> None:
    assert towers(_one_leaves_out_a_step, settings=EVERY_3) == [[False, False, True] * 2] * 2


def _accumulates(strategy: mirrored.Strategy) -> list[bool]:
    model, optimizer = _mlp(strategy)
    step = averaging_step(model, optimizer)
    x, y = local_share(strategy, *make_data(12))

    def accumulate() -> None:
        model(x).square().mean().backward()

    @torch.no_grad()
    def evaluate() -> Tensor:
        return model(x)

    same = []
    for _ in range(3):
        with strategy.no_sync():
            strategy.run(accumulate)
        strategy.run(evaluate)
        strategy.run(step, args=(x, y))
        same.append(_same(strategy, model))
    return same


def test_accumulation_and_evaluations_do_not_count() -> None:
    assert towers(_accumulates, settings=EVERY_3) == [[False, False, True]] * 2


class TwoParts(nn.Module):
    """One part that is frozen, one that is trained from the first step on, and one that a single tower trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained, self.of_one = (nn.Parameter(torch.ones(size)) for size in (1000, 10, 7))
        self.frozen.requires_grad_(False)


def _sends(strategy: mirrored.Strategy) -> list[int]:
    sent = []
    with strategy.scope():
        model = TwoParts()
    first, second = (torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in (model.trained, model.of_one))

    def step(at: int) -> None:
        loss = model.trained.sum() * (strategy.topology.index + 1)
        if alone := at >= 2 and strategy.topology.index == 1:
            loss = loss + model.of_one.sum()
        loss.backward()
        first.step()
        if alone:
            second.step()

    submit = type(strategy.communicator).submit_average

    def counting(self: Communicator, tensor: Tensor) -> Any:
        sent.append(tensor.numel())
        return submit(self, tensor)

    type(strategy.communicator).submit_average = counting  # type: ignore[method-assign]
    for at in range(6):
        strategy.run(step, args=(at,))
        if at % 2:
            assert _same(strategy, model)
    return sent


@pytest.mark.parametrize("way", [mirrored.LocalSGD(2), mirrored.DiLoCo(2)])
def test_what_no_tower_has_stepped_is_not_sent(way: mirrored.LocalSGD) -> None:
    assert towers(_sends, settings={"synchronize": way}) == [[10, 17, 17]] * 2


def _drifts(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model = TwoParts()
    optimizer = torch.optim.SGD([model.trained], lr=0.1)

    def step() -> None:
        model.trained.sum().backward()
        optimizer.step()
        if strategy.topology.index == 1:
            model.of_one.data.add_(1.0)

    for _ in range(2):
        strategy.run(step)


def test_what_differs_after_a_synchronisation_is_an_error() -> None:
    words = r"parameter TwoParts\.of_one is no longer the same on all towers"
    all_raise(mirrored.MirrorError, words, _drifts, settings={"synchronize": mirrored.LocalSGD(2)})


def _misses_a_run(strategy: mirrored.Strategy) -> None:
    model, optimizer = _mlp(strategy)

    def step() -> None:
        model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()

    for _ in range(3 - strategy.topology.index):
        strategy.run(step)
    strategy.reduce("sum", 1.0)


def test_towers_that_make_different_numbers_of_steps_are_told() -> None:
    words = "a synchronisation after 3 local steps"
    settings = {"synchronize": mirrored.LocalSGD(3)}
    all_raise(mirrored.DisagreementError, words, _misses_a_run, settings=settings)


def _own_gradients(strategy: mirrored.Strategy) -> list[list[Tensor]]:
    model, optimizer = _mlp(strategy)
    x, _ = local_share(strategy, *make_data(12))

    def step() -> None:
        gradients = strategy.grad(model(x).square().mean(), list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        strategy.average_gradients(model.parameters())
        optimizer.step()

    found = []
    for _ in range(2):
        strategy.run(step)
        found.append(parameters_of(model))
    return found


def test_gradients_that_a_script_takes_itself_stay_each_towers_own() -> None:
    first, second = towers(_own_gradients, settings={"synchronize": mirrored.LocalSGD(2)})
    assert not any(map(torch.equal, first[0], second[0]))
    assert all(map(torch.equal, first[1], second[1]))


def _half(strategy: mirrored.Strategy) -> Tensor:
    with strategy.scope():
        model = seeded(lambda: nn.Linear(3, 1)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step() -> None:
        (model.weight.sum() * (strategy.topology.index + 1)).backward()
        optimizer.step()

    strategy.run(step)
    return model.weight.detach()


def test_half_precision_is_averaged_in_float32() -> None:
    start = seeded(lambda: nn.Linear(3, 1)).to(torch.bfloat16).weight.detach()
    own = [(start - 0.5 * (tower + 1)).float() for tower in range(2)]
    for weight in towers(_half, settings={"synchronize": mirrored.LocalSGD(1)}):
        assert torch.equal(weight, ((own[0] + own[1]) / 2).bfloat16())


def _evaluates(strategy: mirrored.Strategy) -> list[str]:
    model, optimizer = _mlp(strategy)
    step = averaging_step(model, optimizer)
    x, y = local_share(strategy, *make_data(12))
    records = Records()
    logging.getLogger("mirrored").addHandler(records)
    for _ in range(2):
        strategy.run(step, args=(x, y))
        strategy.run(lambda: None)
    strategy.synchronize()
    strategy.run(lambda: None)
    try:
        strategy.run(strategy.synchronize)
    except RuntimeError as error:
        assert "inside strategy.run" in str(error)
    return [text for text in records.messages if "strategy.synchronize()" in text]


def test_an_evaluation_between_two_synchronisations_is_remarked_once() -> None:
    first, second = towers(_evaluates, settings=EVERY_3)
    assert len(first) == 1
    assert second == []


SCRIPT = """
import torch, mirrored
strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"], seed=0, synchronize=mirrored.{way})
with strategy.scope():
    model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    (model.weight.sum() * (strategy.topology.index + 1)).backward()
    optimizer.step()
for _ in range(5):
    strategy.run(step)
"""


@pytest.mark.extended
def test_a_script_may_end_between_two_synchronisations(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(way="LocalSGD(every=2)"))
    run_program([str(script)], code=0)


@pytest.mark.row(68)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shard_optimizer": True}, "shard_optimizer=True shares out one step"),
        ({"virtual_towers": 2}, "virtual_towers promise the same bits"),
        ({"nonfinite_gradients": "warn"}, "nonfinite_gradients='warn' needs communication"),
        ({"communication": mirrored.CommunicationOptions(wire_dtype="bfloat16")}, "or use DiLoCo"),
        ({"synchronize": 16}, r"synchronize is 16, but has to be mirrored.LocalSGD\(every=16\)"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    kind = TypeError if "synchronize" in settings else ValueError
    with pytest.raises(kind, match=words):
        mirrored.MirroredStrategy(**{"synchronize": mirrored.LocalSGD(4), **settings})


@pytest.mark.row(68)
def test_central_storage_wrong_numbers_and_outer_optimizers_are_refused() -> None:
    way = mirrored.LocalSGD(4)
    assert "one copy of the parameters" in text_of(ValueError, mirrored.CentralStorageStrategy, synchronize=way)
    for every in (0, -1, 2.0, True):
        assert f"every is {every!r}" in text_of(ValueError, mirrored.LocalSGD, every)
    assert "give a function" in text_of(TypeError, mirrored.DiLoCo, 4, outer=0.7)


def _another_way(strategy: mirrored.Strategy) -> None:
    model, optimizer = _mlp(strategy)
    strategy.run(averaging_step(model, optimizer), args=local_share(strategy, *make_data(12)))


@pytest.mark.row(68)
def test_an_outer_that_makes_no_optimizer_is_an_error_on_all_towers() -> None:
    settings = {"synchronize": mirrored.DiLoCo(1, outer=list)}
    all_raise(TypeError, "has to return an optimizer", _another_way, settings=settings)


def _fits() -> str:
    from tests.keras import behaviours

    return behaviours.error_of(lambda _: behaviours.fit(mirrored.MirroredStrategy(seed=0, **EVERY_3)))


@pytest.mark.row(68)
def test_fit_of_keras_is_refused() -> None:
    for text in launch(_fits):
        assert text.startswith("RuntimeError: model.fit with synchronize=: Keras evaluates between two"), text
