"""Messages of all towers: few towers gather them with their values, and more than a few reduce digests of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mirrored
from tests.support.jobs import GLOO, towers
from towers.collectives import communicator
from towers.collectives.agreement import announce

KINDS: dict[str, dict[str, Any]] = {"shared memory": {}, "gloo": {"settings": GLOO}, "two hosts": {"hosts": "aab"}}


def text_of(call: Any, *args: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call(*args)
    return f"{type(caught.value).__name__}: {caught.value}"


def communicate(strategy: mirrored.Strategy, few: int) -> dict[str, Any]:
    communicator.FEW = few
    comm, index = strategy.communicator, strategy.topology.index
    return {
        "nothing": comm.all_gather_messages(b"", b""),
        "equal": comm.all_gather_messages(b"the same call" * 10, b""),
        "short": comm.all_gather_messages(b"the same call", bytes([index] * index)),
        "long": comm.all_gather_messages(b"the same call", bytes([index] * 200 * index)),
        "different": comm.all_gather_messages(b"call" * index, b"own" * (2 - index)),
        "bytes": comm.all_gather_bytes(bytes(300 * index)),
        "sum": strategy.reduce("sum", {"a": 1.5 + index, "b": torch.tensor([index, 2])}),
        "max": math.isnan(strategy.reduce("max", math.nan if index == 1 else 1.0)),
        "mean": strategy.reduce("mean", torch.full((100,), float(index))).tolist(),
        "gather": strategy.gather(torch.ones(index, 2)).shape,
        "details": announce(comm, "says its index", {"index": index, "pair": (1, 2)}),
        "equal details": announce(comm, "says a pair", {"pair": (1, 2)}),
        "no details": announce(comm, "says nothing"),
        "other shapes": text_of(strategy.reduce, "sum", torch.ones(1 + index)),
        "other kinds": text_of(strategy.reduce, "sum", 1.0 if index else torch.ones(2)),
        "wrong on one": text_of(strategy.reduce, "sum", "text" if index == 1 else 1.0),
        "other calls": text_of(
            strategy.reduce if index else strategy.gather, *(["sum"] if index else []), torch.ones(1)
        ),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_messages_of_few_towers_are_those_of_many(kind: str) -> None:
    few, many = [towers(communicate, limit, count=3, **KINDS[kind]) for limit in (3, 2)]
    for one, other in zip(few, many, strict=True):
        one["sum"], other["sum"] = ({"a": v["sum"]["a"], "b": v["sum"]["b"].tolist()} for v in (one, other))
        assert one == other
    first = few[0]
    assert first["short"] == [(b"the same call", bytes([index] * index)) for index in range(3)]
    assert first["different"] == [(b"call" * index, b"own" * (2 - index)) for index in range(3)]
    assert first["details"] == [{"index": index, "pair": [1, 2]} for index in range(3)]
    assert first["equal details"] == [{"pair": [1, 2]}] * 3
    assert (first["sum"], first["max"]) == ({"a": 7.5, "b": [3, 6]}, True)
    assert "shape (2,) on tower 1, but torch.float32 of shape (1,) on tower 0" in first["other shapes"]
    assert first["wrong on one"].startswith("TypeError: reduce('sum', axis=None) on tower 1: a value of type str")
    assert (
        "the towers made different calls: tower 1 reduce('sum', axis=None), tower 0 gather(axis=0)"
        in first["other calls"]
    )


def gathers_and_bytes(strategy: mirrored.Strategy, few: int) -> list[tuple[str, int]]:
    """The collectives of one ``reduce`` of a number, each with the bytes that this tower gives to it."""
    communicator.FEW = few
    comm: Any = strategy.communicator
    sent: list[tuple[str, int]] = []
    for name in ("all_gather", "all_reduce"):
        original = getattr(comm, name)

        def counted(tensor: torch.Tensor, *args: Any, original: Any = original, name: str = name) -> Any:
            sent.append((name, tensor.nbytes))
            return original(tensor, *args)

        setattr(comm, name, counted)
    assert strategy.reduce("sum", 1.0) == 2.0
    return sent


@pytest.mark.parametrize("few", [2, 1])
def test_a_reduced_number_takes_at_most_64_bytes_and_one_collective_more(few: int) -> None:
    for sent in towers(gathers_and_bytes, few):
        value = communicator.INLINE if few == 2 else 8  # bytes: the place for small values, or the number itself
        assert len(sent) == (1 if few == 2 else 2)
        assert sum(count for _, count in sent) - value <= 64
