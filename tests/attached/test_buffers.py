"""Buffers that a forward computes from each tower's share: DDP's default would broadcast them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import mirrored
from tests.support.jobs import towers


class Codebook(nn.Module):
    """A vector quantisation whose codes move to the mean of their inputs."""

    codes: torch.Tensor

    def __init__(self, reduced: bool = False, **options: Any) -> None:
        super().__init__()
        self.reduced = reduced
        self.register_buffer("codes", torch.zeros(4), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        if self.reduced and (replica := mirrored.get_replica_context()) is not None:
            mean = replica.all_reduce("mean", mean)
        self.codes = self.codes * 0.9 + mean * 0.1
        return x + self.codes


KINDS: dict[str, Any] = {
    "own": Codebook,
    "reduced": lambda: Codebook(reduced=True),
    "not saved": lambda: Codebook(persistent=False),
    "normalisation": lambda: nn.BatchNorm1d(4),
    "several": lambda: nn.Sequential(Codebook(), Codebook()),
}


def warned(strategy: mirrored.Strategy, kind: str) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mirrored")
    logger.addHandler(handler)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 4), KINDS[kind](), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        strategy.backward(lambda x: model(x).square(), x)
        optimizer.step()

    for x in strategy.distribute_dataset(torch.randn(60, 4), 5):
        strategy.run(step, args=(x,))
    strategy.check_mirrored()
    return [text for text in found if text.startswith("buffer")]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("own", "buffer Sequential.1.codes is not the same on all towers"),
        pytest.param(
            "several",
            "buffer Sequential.1.0.codes and 1 more are not the same on all towers",
            marks=pytest.mark.extended,
        ),
        pytest.param("reduced", None, marks=pytest.mark.extended),
        ("not saved", None),
        pytest.param("normalisation", None, marks=pytest.mark.extended),
    ],
)
def test_a_buffer_that_differs_is_reported_once(kind: str, words: str | None) -> None:
    chief, other = towers(warned, kind)
    assert other == []
    assert len(chief) == (words is not None)
    assert words is None or words in chief[0]


@pytest.mark.extended
def test_with_virtual_towers_and_on_one_tower_none_differs() -> None:
    assert towers(warned, "own", settings={"virtual_towers": 4}) == [[], []]
    assert towers(warned, "own", count=1) == [[]]
