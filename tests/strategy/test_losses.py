"""Losses as shares of the global mean."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import mirrored
from tests.support.jobs import seeded, text_of, towers


def share_of(strategy: mirrored.Strategy, values: list[float], **options: object) -> tuple[float, float]:
    """The reduced loss over ``values`` cut among the towers, and the averaged gradient of a common factor."""
    with strategy.scope():
        factor = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.ones_(factor.weight)
    data = strategy.distribute_dataset(TensorDataset(torch.tensor(values, dtype=torch.float64)), len(values))

    def step(share: Tensor) -> Tensor:
        loss = mirrored.compute_average_loss(factor(share[:, None])[:, 0], **options)
        loss.backward()
        return loss.detach()

    [batch] = list(data)
    loss = strategy.run(step, args=batch)
    return float(strategy.reduce("sum", loss)), float(factor.weight.grad)


LOSSES = [2.5, 6.2, 5.0]


@pytest.mark.row(35, 36)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_shares_add_up_to_the_global_mean(count: int) -> None:
    """Uneven ones, and empty ones, which are an exact zero."""
    for loss, gradient in towers(share_of, LOSSES, count=count):
        assert loss == pytest.approx(13.7 / 3, rel=1e-15)
        assert gradient == pytest.approx(13.7 / 3, rel=1e-15)


def mean_of_a_share(strategy: mirrored.Strategy) -> float:
    """The averaged gradient of a plain mean over shares of two examples and one."""
    factor = strategy.mirror(torch.nn.Linear(1, 1, bias=False).double())
    [(x,)] = list(strategy.distribute_dataset(TensorDataset(torch.tensor([-20.0, -4.0, -2.0]).double()[:, None]), 3))
    strategy.run(lambda x: factor(x).mean().backward(), args=(x,))
    return float(factor.weight.grad)


@pytest.mark.row(35)
def test_a_plain_mean_over_uneven_shares_is_a_mean_of_means() -> None:
    assert towers(mean_of_a_share) == [-7.0, -7.0]  # the true mean is -26 / 3


def other_denominators(strategy: mirrored.Strategy) -> list[float]:
    r = strategy.topology.index
    losses, weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[: 2 - r], torch.tensor([1.0, 3.0])[: 2 - r]
    tokens = torch.ones(2 - r, 2)
    tokens[0, 1] = 0

    def step() -> list[Tensor]:
        average = mirrored.compute_average_loss
        return [
            average(losses, global_batch_size=3),  # further dimensions are summed: (10 + 3) / 3
            average(losses.sum(1), weights, global_batch_size=3),  # (3 + 3·7 + 3) / 3
            average(losses, tokens, denominator="weights"),  # (1 + 3 + 4 + 1) / (3 + 1)
            average(losses, 0.0, denominator="weights"),  # weights that are all zero
            average(losses[:, 0]),  # nobody distributed this: (1 + 3 + 1) / 3
            average(losses[r:r, 0]),  # and here nobody has any
            average(losses[2 * r :, 0]),  # and here one has none
        ]

    return [float(strategy.reduce("sum", value)) for value in strategy.run(step)]


def test_weights_and_denominators() -> None:
    for result in towers(other_denominators):
        assert result == pytest.approx([13 / 3, 27 / 3, 9 / 4, 0.0, (1 + 3 + 1) / 3, 0.0, (1 + 3) / 2])


@dataclasses.dataclass(eq=False)
class Batch:
    """A batch that is no tensor, as graph and text libraries have them."""

    values: Tensor


def reach_run_in_many_ways(strategy: mirrored.Strategy) -> list[float]:
    """Three examples, so shares are uneven; the loss must know it however the batch comes to it."""

    def mean(values: Tensor) -> Tensor:
        return mirrored.compute_average_loss(values)

    means = []
    for (x,) in strategy.distribute_dataset(TensorDataset(torch.tensor([1.0, 2.0, 6.0])), 3):
        means.append(strategy.run(mean, args=(x,)))
        means.append(strategy.run(mean, args=(x * 1,)))
        means.append(strategy.run(functools.partial(mean, x)))
        means.append(strategy.run(lambda batch: strategy.run(mean, args=(batch + 0,)), args=(x,)))
    collate: Any = lambda examples: Batch(torch.tensor(examples))  # noqa: E731
    for batch in strategy.distribute_dataset([1.0, 2.0, 6.0], 3, collate_fn=collate):
        means.append(strategy.run(lambda b: mean(b.values), args=(batch,)))
    for texts in strategy.distribute_dataset(["1", "2", "6"], 3):
        means.append(strategy.run(lambda t: mean(torch.tensor([float(text) for text in t])), args=(texts,)))
    return [float(strategy.reduce("sum", value)) for value in means]


def test_the_size_of_the_global_batch_is_known_however_the_batch_came() -> None:
    for result in [reach_run_in_many_ways(mirrored.OneDeviceStrategy()), *towers(reach_run_in_many_ways)]:
        assert result == [3.0] * 6


def two_batches_in_a_step(strategy: mirrored.Strategy) -> list[float]:
    """Labelled and unlabelled examples, each with a loss; of the former there is one, of the latter there are four."""
    labelled = strategy.distribute_dataset(TensorDataset(torch.tensor([3.0])), 1)
    unlabelled = strategy.distribute_dataset(TensorDataset(torch.arange(4.0)), 4)
    [[x], [u]] = list(labelled) + list(unlabelled)
    step = lambda x, u: [mirrored.compute_average_loss(x), mirrored.compute_average_loss(u)]  # noqa: E731
    return [float(strategy.reduce("sum", loss)) for loss in strategy.run(step, args=(x, u))]


def test_two_distributed_batches_in_one_step() -> None:
    assert towers(two_batches_in_a_step) == [[3.0, 1.5]] * 2


def add_losses(strategy: mirrored.Strategy) -> list[float]:
    """In place, as tutorials do; half-precision losses whose sum is too large for their dtype; a plain number."""

    def step() -> list[float]:
        weight = torch.tensor(2.0, requires_grad=True)
        loss = mirrored.compute_average_loss(weight * torch.ones(3))
        loss += mirrored.scale_regularization_loss(weight**2)
        loss.backward()
        half = mirrored.compute_average_loss(torch.full((20000,), 8.0, dtype=torch.float16))
        return [float(loss.detach()), float(weight.grad), float(half), float(mirrored.scale_regularization_loss(4.0))]

    return [float(value) for value in strategy.run(step)]


def test_losses_are_added_in_place_and_do_not_overflow() -> None:
    assert add_losses(mirrored.OneDeviceStrategy()) == [6.0, 5.0, 8.0, 4.0]
    # Each tower has half of the values, and before averaging twice its half of the gradients.
    assert towers(add_losses) == [[3.0, 6.0 - 1.0, 4.0, 2.0]] * 2


FACTORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multiplied": lambda loss, weight: loss * weight,
    "divided": lambda loss, weight: loss / weight,
    "uncertainty of tasks": lambda loss, weight: 2 * loss + torch.exp(-weight) * (2 * loss) + weight,
    "a dot product": lambda loss, weight: torch.stack([loss, loss]) @ torch.stack([weight, weight]),
}
"""Products of the result of ``compute_average_loss`` with a weight that is 2."""

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pow": lambda loss, weight: loss**2,
    "sqrt": lambda loss, weight: (loss + weight).sqrt(),
    "rsqrt": lambda loss, weight: loss.rsqrt(),
    "reciprocal": lambda loss, weight: 1 / loss,
    "div": lambda loss, weight: torch.ones(()) / loss,
    "exp": lambda loss, weight: loss.exp(),
    "expm1": lambda loss, weight: loss.expm1(),
    "sigmoid": lambda loss, weight: loss.sigmoid(),
    "tanh": lambda loss, weight: loss.tanh(),
    "softplus": lambda loss, weight: F.softplus(loss),
    "log": lambda loss, weight: loss.log(),
    "log2": lambda loss, weight: loss.log2(),
    "log10": lambda loss, weight: loss.log10(),
    "log1p": lambda loss, weight: loss.log1p(),
    "logsigmoid": lambda loss, weight: F.logsigmoid(loss),
    "logaddexp": lambda loss, weight: torch.logaddexp(loss, weight),
    "logsumexp": lambda loss, weight: torch.stack([loss, 2 * loss]).logsumexp(0),
}
"""Other wrong functions, by the names that the errors contain."""

RIGHT_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plus a penalty": lambda loss, weight: 2 * loss / 3 + weight * weight.exp(),
    "times a constant": lambda loss, weight: loss * weight.detach() - mirrored.scale_regularization_loss(weight**2),
    "clamped": lambda loss, weight: torch.stack([loss, 2 * loss]).mean().clamp(max=100.0),
    "many": lambda loss, weight: sum([loss] * 3000, weight),
}


def use_losses(strategy: mirrored.Strategy, first: int = 1) -> dict[str, list[str]]:
    """The errors of ``backward`` and ``autograd.grad`` in run number ``first``, by use."""

    def error_of(call: Callable[[Tensor, Tensor], object], use: Callable[[Tensor, Tensor], Tensor]) -> str:
        weight = torch.tensor(2.0, requires_grad=True)
        try:
            call(use(mirrored.compute_average_loss(weight * torch.ones(3)), weight), weight)
        except RuntimeError as error:
            return str(error)
        return ""

    def step() -> dict[str, list[str]]:
        calls = (lambda result, _: result.backward(), torch.autograd.grad)
        uses = {**FACTORS, **FUNCTIONS, **RIGHT_USES}
        return {name: [error_of(call, use) for call in calls] for name, use in uses.items()}

    for _ in range(1, first):
        strategy.run(int)
    return strategy.run(step)


def test_a_loss_is_only_added_and_multiplied_by_constants() -> None:
    for texts in [*towers(use_losses), *towers(use_losses, 4)]:
        for name, errors in texts.items():
            for error in errors:
                if name in FACTORS:
                    assert "is multiplied or divided by a value that has a gradient, too" in error
                elif name in FUNCTIONS:
                    assert f"a function ({name}) is applied to the result" in error
                else:
                    assert not error
    assert set(map(tuple, use_losses(mirrored.OneDeviceStrategy()).values())) == {("", "")}


Losses = Callable[[Tensor], Tensor]

WRONG_NUMBERS: dict[str, tuple[Tensor, Losses]] = {
    "sequences flattened to tokens": (torch.arange(12.0).view(3, 4), lambda x: x.flatten()),
    "a number that no share has": (torch.arange(7.0), lambda x: torch.ones(5)),
    "two crops of each example": (torch.arange(4.0), lambda x: torch.cat([x, x])),
    "some of the examples": (torch.arange(4.0), lambda x: x[:1]),
    "none of the examples": (torch.arange(4.0), lambda x: x[:0]),
}


def wrong_numbers(strategy: mirrored.Strategy) -> dict[str, list[str]]:
    """What is said of losses that do not fit the distributed batch, which is given to ``run``, or is only at hand."""
    texts: dict[str, list[str]] = {}
    for name, (examples, losses) in WRONG_NUMBERS.items():
        for (x,) in strategy.distribute_dataset(TensorDataset(examples), len(examples)):
            for args in ((), (x,)):
                average = lambda *_, x=x, of=losses: mirrored.compute_average_loss(of(x))  # noqa: E731
                texts.setdefault(name, []).append(text_of(ValueError, strategy.run, average, args=args))
    return texts


def test_losses_that_do_not_fit_their_batch_are_refused_on_any_number_of_towers() -> None:
    first, second = results = towers(wrong_numbers)
    for texts in [wrong_numbers(mirrored.OneDeviceStrategy()), *results]:
        for name in WRONG_NUMBERS:
            assert len(texts[name]) == 2, name
            assert all("Give one loss per example" in text for text in texts[name]), name
    words = "the loss has 5 entries, but this tower's part of the distributed batch has"
    assert first["a number that no share has"][1].startswith(f"{words} 4 of 7")
    assert second["a number that no share has"][1].startswith(f"{words} 3 of 7")


def sequences(strategy: mirrored.Strategy, how: str) -> tuple[float, list[Tensor]]:
    """One batch of three sequences of tokens, of which 0 is padding; the global loss and gradients."""
    model = strategy.mirror(seeded(lambda: torch.nn.Linear(1, 5).double()))
    words = torch.tensor([[1, 2, 3, 4], [2, 1, 0, 0], [3, 0, 0, 0]])

    def pad(rows: list[tuple[Tensor]]) -> Tensor:  # to the longest of the share
        return torch.stack([row[0] for row in rows])[:, : max(int((row[0] > 0).sum()) for row in rows)]

    def step(labels: Tensor) -> Tensor:
        output = model(labels[..., None].double())
        losses = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=0)
        if how == "examples":
            loss = mirrored.compute_average_loss(losses.view(labels.shape).mean(1))
        else:
            weight = (labels > 0).double()
            loss = mirrored.compute_average_loss(losses.view(labels.shape), weight, denominator="weights")
        loss.backward()
        return loss.detach()

    collate = pad if how == "tokens" else None
    [batch] = list(strategy.distribute_dataset(TensorDataset(words), 3, collate_fn=collate))
    loss = strategy.run(step, args=(batch if how == "tokens" else batch[0],))
    return float(strategy.reduce("sum", loss)), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["examples", "tokens"])
def test_sequences_as_the_readme_has_them(how: str) -> None:
    """Also where a share is empty, and where each tower pads its own share."""
    loss, gradients = sequences(mirrored.OneDeviceStrategy(), how)
    for count in (2, 4):
        for found, own in towers(sequences, how, count=count):
            assert found == pytest.approx(loss, rel=1e-12)
            for a, b in zip(own, gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def outside_run(strategy: mirrored.Strategy) -> list[str]:
    texts = []
    for loss in (mirrored.compute_average_loss, mirrored.scale_regularization_loss):
        for place in (contextlib.nullcontext(), strategy.scope()):
            with place:
                texts.append(text_of(RuntimeError, loss, torch.ones(2)))
    return texts


def test_outside_run_is_refused_when_there_are_towers() -> None:
    for texts in towers(outside_run):
        assert all("was called outside strategy.run(...)" in text for text in texts)
    assert mirrored.compute_average_loss(torch.tensor([1.0, 3.0])) == 2, "without a strategy there is one replica"


def test_wrong_arguments() -> None:
    losses = torch.ones(3)
    for arguments, words in (
        ((losses.sum(),), "needs one loss per example, but got a scalar: .* reduction='none'"),
        ((losses, torch.ones(2)), r"sample_weight of shape \(2,\) does not fit losses of shape \(3,\)"),
        ((losses, None, 0), "global_batch_size is 0, but must be positive"),
    ):
        with pytest.raises(ValueError, match=words):
            mirrored.compute_average_loss(*arguments)
    with pytest.raises(ValueError, match="denominator='weights' needs sample_weight"):
        mirrored.compute_average_loss(losses, denominator="weights")
    with pytest.raises(ValueError, match="denominator is 'tokens'"):
        mirrored.compute_average_loss(losses, denominator="tokens")
