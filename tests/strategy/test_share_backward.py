"""``strategy.backward`` without virtual towers, where a share has no examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored
from tests.support.jobs import SETTINGS, assert_close, make_data, parameters_of, seeded, towers
from towers.collectives import values

WAYS: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "gloo": {"communication": mirrored.CommunicationOptions(implementation="gloo", bucket_bytes=64)},
}


class Refusing(nn.Linear):
    """A layer that takes no empty batch."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x), "an empty share was computed"
        return super().forward(x)


def refusing() -> nn.Module:
    return nn.Sequential(Refusing(5, 4), nn.Tanh(), Refusing(4, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "global batch norm": lambda: nn.Sequential(
        nn.Linear(5, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)
    ),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 3)),
}


def train(strategy: mirrored.Strategy, how: str) -> tuple[list[Tensor], list[int]]:
    """Parameters, losses and norms of two epochs of batches, in the last of which the last tower has no examples.

    Also how many examples each call of the loss function had.
    """
    model = strategy.mirror(seeded(MODELS.get(how, refusing)).double(), sync_batch_norm=True)
    unused = strategy.mirror(nn.Linear(2, 2))
    optimizer = torch.optim.Adam([*model.parameters(), *unused.parameters()], lr=0.1)
    calls = []

    def losses(x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(x))
        return F.cross_entropy(model(x), y, reduction="none")

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        weighted = {"sample_weight": y + 1.0, "denominator": "weights"} if how == "weights" else {}
        if how == "twice":
            with strategy.no_sync():
                strategy.backward(losses, x, y)
        loss = strategy.backward(losses, x, y, **weighted)
        if how == "added":
            strategy.backward(losses, x, y)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, norm

    examples, later = (8, 3) if how == "global batch norm" else (5, 2)
    found = []
    for size in (1 if how in ("empty at first", "lazy") else later, later):
        for x, y in strategy.distribute_dataset(TensorDataset(*make_data(examples)), size):
            loss, norm = strategy.run(step, args=(x, y))
            assert loss.dtype == torch.float64
            assert not loss.requires_grad
            found += [loss, norm]
    assert all(p.grad is None for p in unused.parameters())
    return [*parameters_of(model), *found], calls


@pytest.mark.parametrize(
    ("setting", "how"),
    [
        *((setting, "plain") for setting in WAYS),
        *(("shared memory", how) for how in ("weights", "twice", "added", "empty at first")),
        ("sharded", "twice"),
        ("gloo", "empty at first"),
    ],
)
def test_an_empty_share_is_not_computed_and_contributes_nothing(setting: str, how: str) -> None:
    alone, _ = train(mirrored.OneDeviceStrategy(), how)
    first, second = towers(train, how, settings=WAYS[setting])
    for numbers, _ in (first, second):
        assert_close(numbers, alone, 1e-12)
    assert_close(first[0], second[0], 0)
    assert 0 not in second[1]
    assert len(second[1]) < len(first[1])


def test_a_forward_that_is_a_matter_of_all_towers_is_made_without_examples() -> None:
    for how, count in (("global batch norm", 3), ("lazy", 2)):
        [(alone, _)] = towers(train, how, count=1)
        results = towers(train, how, count=count)
        for numbers, _ in results:
            assert_close(numbers, alone, 1e-12)
        assert 0 in results[-1][1]


def sums(strategy: mirrored.Strategy, inline: int) -> list[Any]:
    values._INLINE_BYTES = inline
    found: list[Any] = []
    for dtypes in ((None, torch.bfloat16), (torch.float64, None), (None, None), (torch.half, torch.float32)):
        dtype = dtypes[strategy.topology.index]
        value = torch.tensor(1.5, dtype=dtype) if dtype is not None else None
        try:
            found.append(values.sum_of_some(strategy.communicator, "the call", value))
        except mirrored.DisagreementError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("inline", [128, 0])
def test_the_sum_of_some_towers_has_their_dtype(inline: int) -> None:
    for found in towers(sums, inline):
        assert [value.dtype for value in found[:3]] == [torch.bfloat16, torch.float64, torch.float32]
        assert [float(value) for value in found[:3]] == [1.5, 1.5, 0.0]
        assert found[3] == "the call: the values are of different dtypes: float16 on tower 0, float32 on tower 1"


def count_in_the_loss(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(nn.Linear(5, 3))

    def losses(x: Tensor, y: Tensor) -> Tensor:
        strategy.reduce("sum", len(x))
        return F.cross_entropy(model(x), y, reduction="none")

    for batch in strategy.distribute_dataset(TensorDataset(*make_data(3, torch.float32)), 2):
        strategy.run(lambda x, y: strategy.backward(losses, x, y), args=batch)


@pytest.mark.extended
def test_a_collective_in_the_loss_is_an_error_where_a_share_is_empty() -> None:
    where = r"at reduce\('sum', axis=None\), and waits for tower 1; tower 1 is in step 2, averaging gradients"
    with pytest.raises(mirrored.TowerFailedError, match=f"deadlock: tower 0 is in step 2, .*{where}"):
        towers(count_in_the_loss)
