"""Shares without examples: exact empty batches of every kind, and stand-ins that count nothing."""

from __future__ import annotations

import dataclasses
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import DataLoader

import mirrored
from tests.support.datasets import Streamed
from tests.support.jobs import towers

Pair = namedtuple("Pair", "tokens length")


@dataclasses.dataclass(frozen=True)
class Padded:
    tokens: Tensor
    lengths: tuple[int, ...]


def sentences() -> list[dict[str, Any]]:
    return [{"tokens": torch.arange(3 + i), "name": f"s{i}", "label": i} for i in range(2)]


def as_fields(rows: list[dict[str, Any]]) -> Any:
    return tuple(zip(*((row["name"], row["tokens"], row["label"]) for row in rows), strict=True))


def changing(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Takes the examples apart, as some collate functions do."""
    for row in rows:
        row["words"] = row.pop("tokens")
    return rows


def time_major(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": pad_sequence([row["tokens"] for row in rows]),
        "lengths": np.array([len(row["tokens"]) for row in rows]),
        "weights": torch.tensor([0.5, 2.0]),
        "names": {"first": [row["name"] for row in rows]},
        "examples": len(rows),
        "longest": max(len(row["tokens"]) for row in rows),
        "all tokens": torch.tensor(sum(len(row["tokens"]) for row in rows)),
        "kind": "text",
        "nothing": None,
    }


def joined(rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    """All tokens one after the other, where each sentence begins, pairs of sentences, and other containers."""
    lengths = [len(row["tokens"]) for row in rows]
    return (
        torch.cat([row["tokens"] for row in rows]),
        torch.tensor([0, *lengths]).cumsum(0),
        torch.zeros(len(rows), len(rows)),
        Pair(pad_sequence([row["tokens"] for row in rows], batch_first=True), tuple(lengths)),
        Padded(pad_sequence([row["tokens"] for row in rows]), tuple(lengths)),
        torch.eye(4)[[0] * len(rows)].to_sparse(),
    )


def batch_of_two(strategy: mirrored.Strategy, collate: Callable[..., Any], kind: str) -> Any:
    """This tower's share of a batch of two sentences."""
    if kind == "stream":
        data = strategy.distribute_dataset(Streamed(sentences()), 2, collate_fn=collate)
    elif kind == "loader":
        data = strategy.distribute_dataset(DataLoader(sentences(), 2, collate_fn=collate, num_workers=1))
    else:
        data = strategy.distribute_dataset(sentences(), 2, collate_fn=collate)
    [batch] = list(data)
    return batch


def lists(strategy: mirrored.Strategy) -> list[Any]:
    found = []
    for kind in ("map", "stream", "loader"):
        for collate in (list, changing, as_fields):
            batch = batch_of_two(strategy, collate, kind)
            found.append((batch, int(strategy.reduce("sum", len(batch if collate is not as_fields else batch[0])))))
    return found


def test_lists_of_no_examples_are_empty() -> None:
    """Evaluation that counts what it is given counts two, on any number of towers."""
    assert [count for _, count in lists(mirrored.OneDeviceStrategy())] == [2] * 9
    results = towers(lists, count=3)
    assert [[count for _, count in found] for found in results] == [[2] * 9] * 3
    assert [batch for batch, _ in results[2]] == [[], [], ((), (), ())] * 3


def plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    return (tuple(value.shape), value.dtype) if isinstance(value, (Tensor, np.ndarray)) else value


def tensors(strategy: mirrored.Strategy) -> list[dict[str, Any]]:
    return [
        {name: plain(value) for name, value in batch_of_two(strategy, time_major, kind).items()}
        for kind in ("map", "stream")
    ]


def test_what_grows_with_the_examples_is_empty_and_all_else_stays() -> None:
    expected = {
        "tokens": ((3, 0), torch.int64),
        "lengths": ((0,), np.dtype(int)),
        "weights": ((2,), torch.float32),
        "names": {"first": []},
        "examples": 0,
        "longest": 3,
        "all tokens": 0,
        "kind": "text",
        "nothing": None,
    }
    assert towers(tensors, count=3)[2] == [expected, expected]


def containers(strategy: mirrored.Strategy) -> Any:
    tokens, begins, pairs, pair, padded, sparse = batch_of_two(strategy, joined, "map")
    assert type(pair) is Pair
    shapes = [tuple(t.shape) for t in (tokens, pairs, pair.tokens, padded.tokens, sparse)]
    return shapes, begins.tolist(), pair.length, padded.lengths


def test_containers_of_all_sorts() -> None:
    shapes, begins, *lengths = towers(containers, count=3)[2]
    assert shapes == [(0,), (0, 0), (0, 3), (3, 0), (0, 4)]
    assert begins == [0]
    assert lengths == [(), ()]


def packed(rows: list[dict[str, Any]]) -> PackedSequence:
    return pack_sequence([row["tokens"] for row in rows], enforce_sorted=False)


class Graph:
    """An object of a library that nobody else can cut."""


def graphs(rows: list[Any]) -> Any:
    return {"graph": Graph(), "y": torch.zeros(len(rows))}


def by_name(rows: list[Any]) -> Any:
    return {row["name"]: row["tokens"] for row in rows}


REFUSED = {
    packed: "batch is a PackedSequence",
    graphs: r"batch\['graph'\] is a Graph",
    by_name: "nothing in it grows with the number of examples",
}


def refusals(strategy: mirrored.Strategy) -> list[str]:
    found = []
    for collate in REFUSED:
        try:
            list(strategy.distribute_dataset(sentences()[:1], 1, collate_fn=collate))
            found.append("")
        except TypeError as error:
            found.append(str(error))
        list(strategy.distribute_dataset(sentences()[:1], 1, collate_fn=collate, stand_in=True))
    return found


def test_what_cannot_be_empty_is_refused_and_the_stand_in_named() -> None:
    first, second = towers(refusals)
    assert first == ["", "", ""]
    for text, words in zip(second, REFUSED.values(), strict=True):
        assert re.search(f"tower 1's share of a batch has no examples.*{words}.*stand_in=True", text)
