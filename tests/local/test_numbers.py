"""Local steps compute what a process alone computes that plays all towers, and what one device does where it can."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from tests.support.jobs import GLOO, assert_close, make_data, make_mlp, parameters_of, towers
from tests.support.steps import averaging_step

Make = Callable[[Any], torch.optim.Optimizer]


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def outer_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02)


def outer_mean(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


INNER: dict[str, Make] = {"sgd": plain, "adam": adam}
OUTER: dict[str, Make | None] = {"mean": None, "adam": outer_adam}


def _train(strategy: mirrored.Strategy, inner: str, batch: int, every: int, epochs: int = 3) -> list[list[Tensor]]:
    """Parameters after each step; the loop checks that towers are equal exactly when they have to be."""
    with strategy.scope():
        model = make_mlp()
        optimizer = INNER[inner](model.parameters())
    data = strategy.distribute_dataset(make_data(22), batch, shuffle=True)
    step = averaging_step(model, optimizer)
    after = []
    for _ in range(epochs):
        for x, y in data:
            strategy.run(step, args=(x, y))
            after.append(parameters_of(model))
            same = len({str(digest) for digest in strategy.gather(_bits(model)).tolist()}) == 1
            assert same == (len(after) % every == 0 or strategy.num_replicas_in_sync == 1)
            strategy.check_mirrored()  # no error in between
    strategy.synchronize()
    return [*after, parameters_of(model)]


def _bits(model: nn.Module) -> Tensor:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return (flat.view(torch.int64) * torch.arange(1, flat.numel() + 1)).sum().reshape(1)


def _reference(count: int, inner: str, outer: Make, batch: int, every: int, epochs: int = 3) -> list[list[Tensor]]:
    """The anchors after each synchronisation of ``count`` towers that one process plays; the end is one, too."""
    anchors = make_mlp()
    models = [copy.deepcopy(anchors) for _ in range(count)]
    optimizers, outside = [INNER[inner](model.parameters()) for model in models], outer(anchors.parameters())
    after, steps = [], 0

    def synchronize() -> None:
        for anchor, *own in zip(anchors.parameters(), *(model.parameters() for model in models), strict=True):
            anchor.grad = torch.stack([anchor.detach() - p.detach() for p in own]).mean(0)
        outside.step()
        for model in models:
            with torch.no_grad():
                for p, anchor in zip(model.parameters(), anchors.parameters(), strict=True):
                    p.copy_(anchor)
        after.append(parameters_of(anchors))

    data = mirrored.OneDeviceStrategy().distribute_dataset(make_data(22), batch, shuffle=True)
    for _ in range(epochs):
        for x, y in data:
            for model, optimizer, local_x, local_y in zip(
                models, optimizers, x.tensor_split(count), y.tensor_split(count), strict=True
            ):
                optimizer.zero_grad()
                losses = F.cross_entropy(model(local_x), local_y, reduction="none")
                (count * losses.sum() / len(x)).backward()  # a share of the global mean, as it would be averaged
                optimizer.step()
            steps += 1
            if steps % every == 0:
                synchronize()
    if steps % every:  # else nothing has moved since
        synchronize()
    else:
        after.append(parameters_of(anchors))
    return after


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("batch", [8, 2])  # ragged shares; empty ones for three towers
def test_every_step_is_every_step_averaging(count: int, batch: int) -> None:
    expected = _train(mirrored.OneDeviceStrategy(seed=0), "sgd", batch, 1)
    for result in towers(_train, "sgd", batch, 1, count=count, settings={"synchronize": mirrored.LocalSGD(every=1)}):
        for step, reference in zip(result, expected, strict=True):
            assert_close(step, reference, 1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("outer", "inner", "batch"), [("mean", "adam", 8), ("adam", "adam", 7), ("adam", "sgd", 2)])
def test_local_steps_are_those_of_one_process_that_plays_all_towers(
    count: int, outer: str, inner: str, batch: int
) -> None:
    make, every = OUTER[outer], 4
    way = mirrored.LocalSGD(every) if make is None else mirrored.DiLoCo(every, make)
    reference = _reference(count, inner, make or outer_mean, batch, every)
    results = towers(_train, inner, batch, every, count=count, settings={"synchronize": way})
    for result in results:
        synchronised = [*result[every - 1 : -1 : every], result[-1]]
        for parameters, expected in zip(synchronised, reference, strict=True):
            assert_close(parameters, expected, 1e-12)
        for after, first in zip(synchronised, results[0][every - 1 : -1 : every], strict=False):
            assert all(map(torch.equal, after, first))


def test_the_default_outer_optimizer_is_the_papers_and_gloo_sends_it() -> None:
    reference = _reference(2, "adam", mirrored.DiLoCo(3).outer, 8, 3)
    for result in towers(_train, "adam", 8, 3, settings={"synchronize": mirrored.DiLoCo(3), **GLOO}):
        assert_close(result[-1], reference[-1], 1e-12)


def _adds_tower(strategy: mirrored.Strategy) -> tuple[Tensor, Tensor]:
    with strategy.scope():
        model = nn.Linear(4, 1, bias=False)
        nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        optimizer.zero_grad()
        (model.weight.sum() * (strategy.topology.index + 1) / 3).backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(step)
    strategy.check_mirrored()
    return model.weight.detach(), strategy.gather(model.weight.detach())


def test_what_towers_have_moved_may_be_rounded_between_hosts() -> None:
    narrow = mirrored.CommunicationOptions(wire_dtype="bfloat16")
    settings = {"synchronize": mirrored.DiLoCo(2, outer_mean), "communication": narrow}
    exact = 1 - 2 * (1 + 2 + 3) / 3 / 3
    for weight, everybodys in towers(_adds_tower, count=3, settings=settings, hosts="aab"):
        assert (everybodys == weight).all()
        assert 0 < abs(float(weight[0, 0]) - exact) < 0.02
