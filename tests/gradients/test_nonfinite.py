"""Gradients that are NaN or infinite. All towers decide alike, and say whose they are."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.support.jobs import make_mlp, text_of, towers
from tests.support.logs import Records
from towers.system.tensors import extremes

NAN, INF = float("nan"), float("inf")


RAISE = {"nonfinite_gradients": "raise"}


def test_extremes() -> None:
    tensors = [
        torch.tensor([1.0, -3.0]),
        torch.tensor([1.0, -INF, NAN]),
        torch.tensor([INF, -3.0], dtype=torch.bfloat16),
        torch.tensor([complex(0, -INF), 1], dtype=torch.complex64),
        torch.tensor([complex(3e38, 3e38)], dtype=torch.complex64),
        torch.zeros(0),
        torch.tensor([[0.0, NAN], [0, 0]]).to_sparse(),
        torch.tensor([-5, 2]),
        torch.tensor(1.0).to(torch.float8_e4m3fn),
    ]
    expected = torch.tensor([3.0, NAN, INF, INF, float(torch.tensor(3e38)), 0.0, NAN, 5.0, 1.0], dtype=torch.float64)
    assert torch.equal(extremes(tensors).nan_to_num(-1, -2), expected.nan_to_num(-1, -2))
    assert extremes([]).shape == (0,)


# -- a GradScaler ----------------------------------------------------------------------------------------


def scale_gradients(strategy: mirrored.Strategy) -> tuple[list[float], list[list[float]], list[Any]]:
    """Steps with a GradScaler, of which the third has a NaN and the fifth an infinity, each on one tower."""
    model = strategy.mirror(make_mlp(torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    factors = {2: [1.0, NAN], 4: [INF, 1.0]}

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().mean() * factors.get(number, [1.0, 1.0])[strategy.topology.index]
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    scales, weights = [], []
    for number in range(7):
        strategy.run(step, args=(number,))
        scales.append(scaler.get_scale())
        weights.append(model[0].weight.flatten().tolist())
    strategy.check_mirrored()
    return scales, weights, [p.detach().tolist() for p in model.parameters()]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.row(39)
def test_a_scaler_skips_on_all_towers_alike(sharded: bool) -> None:
    first, second = towers(scale_gradients, settings={"shard_optimizer": sharded, "mirror_check_interval": 1})
    assert first == second
    scales, weights, parameters = first
    assert scales == [1024, 2048, 1024, 1024, 512, 512, 1024]
    changed = [a != b for a, b in itertools.pairwise(weights)]
    assert changed == [True, False, True, False, True, True]
    assert all(torch.tensor(values).isfinite().all() for values in parameters)


# -- naming ----------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of all kinds: large and small, sparse, complex, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.ones(300, 200))
        self.small = nn.Parameter(torch.ones(3))
        self.rows = nn.Embedding(4, 2, sparse=True)
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, factors: dict[str, float]) -> Tensor:
        """The sum of all parameters, each times its factor, which is the gradient."""
        parts = {
            "large": self.large,
            "small": self.small,
            "rows": self.rows(torch.tensor([1])),
            "phase": torch.view_as_real(self.phase),
            "frozen": self.frozen,
        }
        return torch.stack([part.sum() * factors.get(name, 1.0) for name, part in parts.items()]).sum()


Factors = list[dict[str, float]]
"""Of one backward, for each tower."""


def texts_of(strategy: mirrored.Strategy, backwards: list[Factors], sparse: bool = True) -> list[str]:
    """What is raised in these backwards, each of which comes after one that is right; the last must be right, too."""
    with strategy.scope():
        model = Odd()
        if not sparse:
            model.rows.sparse = False
    parameters = [p for name, p in model.named_parameters() if "rows" not in name or not sparse]
    optimizer = torch.optim.SGD(parameters, lr=0.125)
    texts = []
    steps = 0

    def step(factors: dict[str, float]) -> None:
        model.zero_grad()
        model(factors).backward()
        optimizer.step()

    def step_well() -> None:
        nonlocal steps
        strategy.run(step, args=({"small": 1.0 + strategy.topology.index},))
        steps += 1
        mean = (strategy.num_replicas_in_sync + 1) / 2
        torch.testing.assert_close(model.small.grad, torch.full((3,), mean))
        torch.testing.assert_close(model.small.detach(), torch.full((3,), 1 - 0.125 * steps * mean))

    step_well()
    for per_tower in backwards:
        own = per_tower[strategy.topology.index]
        texts.append(text_of(mirrored.NonFiniteGradientError, strategy.run, step, args=(own,)))
        step_well()
    strategy.check_mirrored()
    return texts


@pytest.mark.row(39)
def test_parameter_kind_and_tower_are_named() -> None:
    cases: dict[str, Factors] = {
        "Odd.large (nan on tower 1)": [{}, {"large": NAN}],
        "Odd.small (inf on tower 0)": [{"small": -INF}, {}],
        "Odd.small (inf on tower 0, nan on tower 1)": [{"small": INF}, {"small": NAN}],
        "Odd.rows.weight (nan on tower 0)": [{"rows": NAN}, {}],
        "Odd.phase (inf on tower 1)": [{}, {"phase": INF}],
        "Odd.large (nan on towers 0 and 1)": [{"large": NAN}, {"large": NAN}],
    }
    first, second = towers(texts_of, list(cases.values()), settings=RAISE)
    assert first == second
    assert len(first) == len(cases)
    for number, (text, words) in enumerate(zip(first, cases, strict=True), start=1):
        assert text.startswith(f"gradients are not finite in backward() number {2 * number}: {words}. Look at that")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("implementation", ["auto", "gloo"])
def test_three_parameters_by_name_and_how_many_more(implementation: str, sharded: bool) -> None:
    communication = mirrored.CommunicationOptions(implementation=implementation)
    settings = {**RAISE, "communication": communication, "shard_optimizer": sharded}
    everything = dict.fromkeys(("large", "small", "phase", "rows"), NAN)
    results = towers(texts_of, [[{}, {}, everything], [{}, everything, {}]], False, count=3, settings=settings)
    assert results[0] == results[1] == results[2]
    for text, tower in zip(results[0], (2, 1), strict=True):
        assert text.count(f"(nan on tower {tower})") == 3
        assert f"(nan on tower {tower}) and 1 more. Look" in text


def train_with_a_frozen_nan(strategy: mirrored.Strategy) -> list[float]:
    model = strategy.mirror(Odd())
    strategy.run(lambda: model({"frozen": NAN, "small": 2.0}).backward())
    return model.small.grad.tolist()


def test_finite_gradients_of_a_loss_that_is_nan_say_nothing() -> None:
    assert towers(train_with_a_frozen_nan, settings=RAISE) == [[2.0] * 3] * 2


def accumulate(strategy: mirrored.Strategy, freeze: bool) -> tuple[str | None, list[float]]:
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)))
    nn.init.ones_(model[0].weight)
    x = torch.ones(1, 2)

    def step() -> None:
        with strategy.no_sync():
            (model[1](x) * (NAN if strategy.is_chief else 1.0)).sum().backward()
        model[1].weight.requires_grad_(not freeze)
        model(x).sum().backward()

    text = None
    try:
        strategy.run(step)
    except mirrored.NonFiniteGradientError as error:
        text = str(error)
    model.requires_grad_(True).zero_grad()
    strategy.run(lambda: model(x).sum().backward())
    return text, model[1].weight.grad.flatten().tolist()


@pytest.mark.parametrize("freeze", [False, True], ids=["", "and then frozen"])
def test_gradients_accumulated_under_no_sync(freeze: bool) -> None:
    first, second = towers(accumulate, freeze, settings=RAISE)
    assert first == second
    text, gradient = first
    assert "backward() number 1: Sequential.1.weight (nan on tower 0)." in text
    assert gradient == [2.0, 2.0]


def thrown_away(strategy: mirrored.Strategy) -> list[float]:
    model = strategy.mirror(nn.Linear(2, 1, bias=False))

    def step() -> None:
        with strategy.no_sync():
            (model(torch.ones(1, 2)) * NAN).sum().backward()
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()

    strategy.run(step)
    return model.weight.grad.flatten().tolist()


def test_what_was_thrown_away_is_no_error() -> None:
    assert towers(thrown_away, settings=RAISE) == [[1.0, 1.0]] * 2


def warn(strategy: mirrored.Strategy, runs: int) -> list[str]:
    records = Records()
    logging.getLogger("towers").addHandler(records)
    model = strategy.mirror(nn.Linear(2, 1))
    own = 1.0 if strategy.is_chief and strategy.num_replicas_in_sync > 1 else INF

    def step() -> None:
        model.zero_grad()
        (model(torch.ones(1, 2)) * own).sum().backward()

    for _ in range(runs):
        strategy.run(step)
    return [message for message in records.messages if "finite" in message]


@pytest.mark.parametrize("count", [1, 2])
def test_warnings_get_rarer(count: int) -> None:
    results = towers(warn, 25, count=count, settings={"nonfinite_gradients": "warn"})
    assert results == results[:1] * count
    once, again = results[0]
    assert "backward() number 1:" in once
    assert f"Linear.weight (inf on tower {count - 1})" in once
    assert "backward() number 10:" in again
    assert again.endswith("(10 backwards so far)")


def test_by_default_nothing_is_looked_at() -> None:
    assert towers(warn, 2, settings={"nonfinite_gradients": "ignore"}) == [[], []]


# -- one tower -------------------------------------------------------------------------------------------


def test_one_tower() -> None:
    [[text]] = towers(texts_of, [[{"large": NAN, "rows": INF}]], count=1, settings=RAISE)
    assert "backward() number 2: Odd.large (nan on tower 0), Odd.rows.weight (inf on tower 0). Look" in text


class Broken(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("broken")


def test_one_tower_goes_on_after_a_backward_that_failed() -> None:
    strategy = mirrored.MirroredStrategy(["cpu:0"], nonfinite_gradients="raise")
    model = strategy.mirror(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    x = torch.ones(1, 1)
    with pytest.raises(ArithmeticError):
        strategy.run(lambda: (model[1](Broken.apply(model[0](x))) * NAN).sum().backward())
    strategy.run(lambda: model[0](x).sum().backward())
    with pytest.raises(mirrored.NonFiniteGradientError, match=r"1\.weight \(nan on tower 0\)"):
        strategy.run(lambda: model(x).sum().backward())


def test_actions_that_there_are() -> None:
    with pytest.raises(ValueError, match="nonfinite_gradients is 'skip', but must be one of ignore, warn, raise"):
        mirrored.MirroredStrategy(["cpu:0"], nonfinite_gradients="skip")
