"""Batches that come ready made: cut where they can be meant in one way only, else as ``batch_dims`` says."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import mirrored
from mirrored.data.batch_dims import BatchDims
from tests.support.datasets import Streamed
from tests.support.jobs import all_raise, assert_close, parameters_of, seeded, text_of, towers

Pair = namedtuple("Pair", "x y")


def cut(batch: Any, dims: Any = None) -> tuple[int, Any]:
    """How many examples a batch has, and its second one."""
    reading = BatchDims(dims)
    return reading.examples(batch), plain(reading.cut(batch, 1, 2))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(plain, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value.tolist() if isinstance(value, (Tensor, np.ndarray)) and value.ndim else value


X = torch.arange(6).view(3, 2)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (X, [[2, 3]]),
        (X.numpy(), [[2, 3]]),
        ((X, X[:, 0]), ([[2, 3]], [2])),
        ([X, X * 2], [[[2, 3]], [[4, 6]]]),
        (
            {"x": X, "names": ["a", "b", "c"], "n": 3, "kind": "k", "none": None},
            {"x": [[2, 3]], "names": ["b"], "n": 3, "kind": "k", "none": None},
        ),
        (Pair(X, np.float32(0.5)), Pair([[2, 3]], np.float32(0.5))),
        (["a", "b", "c"], ["b"]),
        ([torch.tensor(1), torch.tensor(2), torch.tensor(3)], [torch.tensor(2)]),
        ([X, [("a", "b", "c"), ("d", "e", "f")]], [[[2, 3]], [("b",), ("e",)]]),
        ({"x": X, "scale": torch.tensor(2.0)}, {"x": [[2, 3]], "scale": torch.tensor(2.0)}),
    ],
)
def test_what_is_certain(batch: Any, expected: Any) -> None:
    assert cut(batch) == (3, expected)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([X, torch.ones(4)], r"batch\[0\] has shape \(3, 2\), but batch\[1\] has shape \(4,\)"),
        ({"x": X, "size": (32, 32)}, r"batch\['x'\] has shape \(3, 2\), but batch\['size'\] has 2 entries"),
        ([{"x": X, "y": 1}, {"x": X, "y": 2}], "batch is a list of 2 dicts with equal keys: one for each example, or"),
        ([X, [{"box": X}]], r"batch\[1\] is a list of 1 dicts"),
        (
            [torch.ones(3, 8)] * 4,
            r"a list of 4 arrays of shape \(3, 8\): one for each example, or fields of a batch of 3",
        ),
        ([["a", "b"], ["c", "d"]], "batch is a list of 2 lists: one for each example, or fields of a batch of 2"),
        ({"x": X, "words": [["a", "b", "c"]] * 3}, r"batch\['words'\] is a list of 3 lists"),
        (pack_sequence([torch.ones(2), torch.ones(1)]), "batch is a PackedSequence"),
        ({"x": X, "graph": object()}, r"batch\['graph'\] is a object"),
        ({"scale": 2.0}, "the number of examples in a batch of type dict is unknown"),
    ],
)
def test_what_is_not_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"{words}.*batch_dims="):
        cut(batch)


@pytest.mark.parametrize(
    ("batch", "dims", "expected"),
    [
        ([X, torch.ones(2)], [0, None], (3, [[[2, 3]], [1.0, 1.0]])),
        ((X.T, X.T.numpy()), (1, 1), (3, ([[2], [3]], [[2], [3]]))),
        ({"x": X.T, "y": X.T}, -1, (3, {"x": [[2], [3]], "y": [[2], [3]]})),
        (Pair(X.T, X), Pair(1, 0), (3, Pair([[2], [3]], [[2, 3]]))),
        (Pair(X, X), 0, (3, Pair([[2, 3]], [[2, 3]]))),
        ([{"x": X}, {"x": X * 2}], 0, (2, [{"x": [[0, 2], [4, 6], [8, 10]]}])),
        (
            {"x": X, "edges": [5, 6]},
            {"x": 0, "edges": lambda value, start, end: value[1:]},
            (3, {"x": [[2, 3]], "edges": [6]}),
        ),
    ],
)
def test_batch_dims(batch: Any, dims: Any, expected: Any) -> None:
    assert cut(batch, dims) == expected


def test_sparse_tensors_are_cut() -> None:
    reading = BatchDims()
    assert reading.examples(torch.eye(3).to_sparse()) == 3
    assert reading.cut(torch.eye(3).to_sparse(), 1, 3).to_dense().tolist() == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("batch", "dims", "words"),
    [
        ([X, X], [0], r"batch_dims for batch are 1 entries, but it is a list of 2"),
        ({"x": X}, {"y": 0}, r"batch_dims for batch have the keys \['y'\], but it has \['x'\]"),
        (X, 2, r"batch_dims for batch are 2, but its shape is \(3, 2\)"),
        ([X, X.T], [0, 0], r"batch\[1\] has 2 examples, but batch\[0\] has 3"),
        ([X, X], [None, None], "batch_dims give no dimension"),
        ([X.T, X.T], 1, "batch_dims for batch are 1, but a list has no such dimension"),
        (X, "x", "must be a dimension, None or a function"),
        (X, {"x": 0}, "batch_dims for batch are a dict, but it is a Tensor"),
    ],
)
def test_batch_dims_that_do_not_fit(batch: Any, dims: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        cut(batch, dims)


def test_a_small_last_batch_is_read_as_those_before() -> None:
    """Two fields of one example have the form of two examples of one entry."""
    reading = BatchDims()
    assert reading.examples([X, X]) == 3
    assert reading.examples([X[:1], X[:1]]) == 1
    assert plain(reading.cut([X[:1], X[:1]], 0, 1)) == [[[0, 1]], [[0, 1]]]
    with pytest.raises(TypeError, match="one for each example, or fields"):
        BatchDims().examples([X[:1], X[:1]])


WEIGHTS = torch.tensor([1.0, 2.0, 0.5])
TOKENS = [torch.arange(7 * n).view(7, n) % 5 for n in (4, 1)]
DETECTIONS = [[{"image": torch.full((3, 2 + i), float(i)), "boxes": torch.ones(i, 4)} for i in range(5)]]


def through(strategy: mirrored.Strategy, batches: list[Any], dims: Any, kind: str) -> list[Any]:
    if kind == "pipeline":
        own = batches if strategy.is_chief else batches[:1]
        data = strategy.distribute_datasets_from_function(lambda _: own, batch_dims=dims)
    else:
        data = strategy.distribute_dataset(DataLoader(Streamed(batches), batch_size=None), batch_dims=dims)
    return list(data)


def streams(strategy: mirrored.Strategy) -> list[Any]:
    found = []
    for (x, w), (weights, _) in zip(
        through(strategy, [[X.float(), WEIGHTS], [X.float()[:1], WEIGHTS]], [0, None], "stream"),
        through(strategy, [(WEIGHTS, X.float()), (WEIGHTS, X.float()[:1])], (None, 0), "pipeline"),
        strict=True,
    ):
        assert torch.equal(w, WEIGHTS)
        assert torch.equal(weights, WEIGHTS), "class weights stay whole"
        found.append(strategy.gather(x).tolist())
    found.append([strategy.gather(t, axis=1).tolist() for t in through(strategy, TOKENS, 1, "stream")])
    [detections] = through(strategy, DETECTIONS, 0, "stream")
    found.append([tuple(d["image"].shape) for d in detections])
    return found


def test_streams_of_ready_made_batches() -> None:
    alone = streams(mirrored.OneDeviceStrategy())
    results = towers(streams, count=3)
    for found in results:
        assert found[:3] == alone[:3]
    assert alone[2] == [t.tolist() for t in TOKENS]
    assert [found[3] for found in results] == [[(3, 2), (3, 3)], [(3, 4), (3, 5)], [(3, 6)]]


def refused(strategy: mirrored.Strategy) -> list[str]:
    found = []
    for batches in ([[X, torch.ones(4)]], DETECTIONS):
        found += [text_of(TypeError, through, strategy, batches, None, kind) for kind in ("stream", "pipeline")]
    with pytest.raises(ValueError, match="batch_dims is for batches that are ready made"):
        strategy.distribute_dataset(range(8), 4, batch_dims=0)
    return found


def test_one_tower_refuses_what_several_refuse() -> None:
    alone = refused(mirrored.OneDeviceStrategy())
    for found in towers(refused):
        for text, expected in zip(found, alone, strict=True):
            assert text.split(" on tower 0: ")[-1] == expected.split(" on tower 0: ")[-1]


def other_sizes(strategy: mirrored.Strategy) -> None:
    """As a stream with a generator of its own may have."""
    list(strategy.distribute_dataset(Streamed(range(5 + strategy.topology.index)), 4))


def test_streams_of_different_sizes_are_refused() -> None:
    words = "batch 1 of the stream has different numbers of examples: 1 on tower 0, 2 on tower 1"
    all_raise(mirrored.DisagreementError, words, other_sizes)


def time_major(strategy: mirrored.Strategy) -> list[Tensor]:
    """Training on batches (time, examples) whose last one has a single example."""
    layers = seeded(lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten(2), nn.Linear(4, 5)))
    model = strategy.mirror(layers.double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def losses(tokens: Tensor) -> Tensor:
        output = model(tokens[:-1])
        return F.cross_entropy(output.transpose(1, 2), tokens[1:], reduction="none").mean(0)

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad()
        strategy.backward(losses, tokens)
        optimizer.step()

    loader = DataLoader(Streamed(TOKENS), batch_size=None)
    for tokens in strategy.distribute_dataset(loader, batch_dims=1, stand_in=True):
        strategy.run(step, args=(tokens,))
    return parameters_of(model)


@pytest.mark.parametrize("parts", [None, 4, 2])
def test_training_on_time_major_batches(parts: int | None) -> None:
    """Also where each tower has one virtual tower."""
    [alone], both = (towers(time_major, count=count, settings={"virtual_towers": parts}) for count in (1, 2))
    for parameters in both:
        assert_close(parameters, alone, 1e-12 if parts is None else 0)
