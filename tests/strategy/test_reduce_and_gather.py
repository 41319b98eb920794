"""reduce and gather: what two towers get, by hand-computed values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.support.jobs import all_raise, towers
from tests.support.meeting import say, shorten_deadlines, wait_for
from tests.support.waiting import HANG, forever


def each(strategy: mirrored.Strategy) -> object:
    r = strategy.topology.index
    results = strategy.run(lambda: r + 1)
    nested = strategy.run(lambda: {"a": [r, (torch.tensor(r), None)], "b": "text"})
    return results, nested


def test_run_returns_what_fn_returns() -> None:
    results = towers(each)
    assert [value for value, _ in results] == [1, 2]
    for r, (_, nested) in enumerate(results):
        assert nested == {"a": [r, (torch.tensor(r), None)], "b": "text"}


def all_reduce(strategy: mirrored.Strategy) -> object:
    r = strategy.topology.index

    def step() -> list[object]:
        context = mirrored.get_replica_context()
        number, pair = torch.tensor([1.0, 3.0][r]), torch.tensor([[39.0, 2.0], [3.0, 41.0]][r])
        return [context.all_reduce(op, value) for value in (number, pair) for op in ("sum", "mean")]

    return strategy.run(step)


def test_all_reduce() -> None:
    for total, mean, totals, means in towers(all_reduce):
        assert total == 4
        assert mean == 2
        assert totals.tolist() == [42, 43]
        assert means.tolist() == [21, 21.5]


def reduce_operations(strategy: mirrored.Strategy) -> object:
    r = strategy.topology.index
    whole, real = torch.tensor([r + 1, 5 - r], dtype=torch.int32), torch.tensor([r + 1.5, 2.0])
    return {
        op: (strategy.reduce(op, whole), strategy.reduce(op.upper(), real), strategy.reduce(op, r + 2))
        for op in ("sum", "mean", "min", "max", "prod")
    }


def test_reduce_operations_and_dtypes() -> None:
    for result in towers(reduce_operations):
        whole, real, number = zip(*(result[op] for op in ("sum", "mean", "min", "max", "prod")), strict=True)
        assert [t.tolist() for t in whole] == [[3, 9], [1.5, 4.5], [1, 4], [2, 5], [2, 20]]
        assert [t.tolist() for t in real] == [[4, 4], [2, 2], [1.5, 2], [2.5, 2], [3.75, 4]]
        assert list(number) == [5, 2.5, 2, 3, 6]
        assert isinstance(number[0], int)
        assert isinstance(number[1], float)
        assert whole[0].dtype == torch.int64
        assert whole[1].dtype == torch.float32
        assert whole[2].dtype == torch.int32
        assert all(t.dtype == torch.float32 for t in real)


def reduce_along_axis(strategy: mirrored.Strategy) -> object:
    r = strategy.topology.index
    copies = torch.full((r + 1,), float(r))
    pair = torch.tensor([1.0, 2.0])
    matrix = torch.arange(6.0).view(2, 3)[: r + 1]
    empty = torch.arange(3.0)[: 3 * r]
    return {
        "sum": strategy.reduce("sum", copies, axis=0),
        "mean": strategy.reduce("mean", copies, axis=0),
        "equal": strategy.reduce("mean", pair, axis=0),
        "rows": strategy.reduce("mean", matrix, axis=0),
        "all": strategy.reduce("mean", matrix, axis=(0, -1)),
        "max": strategy.reduce("max", empty, axis=0),
        "min": strategy.reduce("min", empty.to(torch.int64), axis=0),
    }


def test_reduce_along_an_axis_divides_by_the_global_count() -> None:
    for result in towers(reduce_along_axis):
        assert result["sum"] == 2
        assert result["mean"] == pytest.approx(2 / 3)
        assert result["equal"] == 1.5
        assert result["rows"].tolist() == [1, 2, 3]  # rows (0 1 2), (0 1 2), (3 4 5)
        assert result["all"] == 2
        assert result["max"] == 2
        assert result["min"] == 0


def reduce_structures(strategy: mirrored.Strategy) -> object:
    r = strategy.topology.index
    value = {"loss": torch.tensor(r + 0.5), "counts": [r, np.array([r, 1])], "big": torch.full((4000,), float(r))}
    result = strategy.reduce("sum", value)
    nothing = strategy.reduce("sum", {})
    half = strategy.reduce("mean", torch.tensor([r + 1.0], dtype=torch.bfloat16))
    return result, nothing, half, strategy.reduce(mirrored.ReduceOp.SUM, True)


def test_reduce_keeps_structures_and_kinds() -> None:
    for result, nothing, half, truth in towers(reduce_structures):
        assert result["loss"] == 2
        assert result["counts"][0] == 1
        assert isinstance(result["counts"][1], np.ndarray)
        assert result["counts"][1].tolist() == [1, 2]
        assert result["big"].tolist() == [1.0] * 4000
        assert nothing == {}
        assert half.dtype == torch.bfloat16
        assert half == 1.5
        assert truth == 2


def gather_shapes(strategy: mirrored.Strategy) -> tuple[Tensor, Tensor, Tensor]:
    r = strategy.topology.index
    flags = torch.ones(r, dtype=torch.bool)
    return (
        strategy.gather(torch.full((r + 1, 1), r)),
        strategy.gather(torch.full((1, r + 1), float(r)), axis=1),
        strategy.gather(flags),
    )


def test_gather() -> None:
    for rows, columns, flags in towers(gather_shapes):
        assert rows.tolist() == [[0], [1], [1]]
        assert columns.tolist() == [[0, 1, 1]]
        assert flags.tolist() == [True]
        assert flags.dtype == torch.bool


def reduce_unusual_numbers(strategy: mirrored.Strategy) -> tuple[object, ...]:
    """Conjugated without being computed so, negated likewise, half precision; on one tower only what can differ."""
    r = strategy.topology.index
    conjugated = torch.tensor([1 + 2j, 3 + 4j]).conj() if r else torch.tensor([1 + 2j, 3 + 4j])
    half = torch.tensor([1 + 2j], dtype=torch.complex32)
    return (
        strategy.gather(conjugated).tolist(),
        strategy.reduce("sum", conjugated).tolist(),
        strategy.gather(torch.tensor([1 + 2j]).conj().imag).tolist(),
        strategy.reduce("mean", half).to(torch.complex64).tolist(),
        strategy.reduce("max", torch.tensor([r, 7], dtype=torch.uint64)).tolist(),
    )


def test_unusual_numbers() -> None:
    for found in towers(reduce_unusual_numbers):
        assert found == ([1 + 2j, 3 + 4j, 1 - 2j, 3 - 4j], [2, 6], [-2, -2], [1 + 2j], [1, 7])


def call_badly(strategy: mirrored.Strategy, kind: str) -> None:
    r = strategy.topology.index
    if kind == "gather of other sizes":
        strategy.gather(torch.zeros(2, r + 1))
    elif kind == "gather along another axis":
        strategy.gather(torch.zeros(2, 2), axis=r * 5)
    elif kind == "gather of a scalar":
        strategy.gather(torch.tensor(1.0))
    elif kind == "structure":
        strategy.reduce("sum", [1.0] * (r + 1))
    elif kind == "operation":
        strategy.reduce(["sum", "max"][r], 1.0)
    elif kind == "text":
        strategy.reduce("sum", "text")
    elif kind == "too large":
        strategy.reduce("max", torch.tensor([2**63 + 5 * r, 1], dtype=torch.uint64))
    else:
        strategy.gather(torch.zeros(1)) if r else strategy.reduce("sum", 1.0)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("gather of other sizes", ValueError, r"shape \(2, 2\) on tower 1"),
        ("gather along another axis", ValueError, "on tower 1: axis 5 is out of range"),
        ("gather of a scalar", ValueError, "a scalar cannot be gathered"),
        ("structure", mirrored.DisagreementError, r"tower 1 reduce\('sum', axis=None\) of \[\*,\*\]"),
        ("operation", mirrored.DisagreementError, r"tower 1 reduce\('max'"),
        ("text", TypeError, "type str cannot be reduced"),
        ("too large", ValueError, "one of these is 2\\*\\*63 or more"),
        ("different calls", mirrored.DisagreementError, r"tower 1 gather\(axis=0\)"),
    ],
)
def test_the_same_error_on_all_towers(kind: str, error: type[Exception], words: str) -> None:
    """Other shapes and dtypes are in test_bad_training.py."""
    all_raise(error, words, call_badly, kind, same=True)


def test_unknown_operation() -> None:
    with pytest.raises(ValueError, match="unknown operation 'median'; use one of sum, mean, min, max, prod"):
        mirrored.OneDeviceStrategy().reduce("median", 1.0)


def test_one_tower_reduces_to_itself() -> None:
    strategy = mirrored.OneDeviceStrategy()
    assert strategy.reduce("mean", torch.tensor([1.0, 2.0])).tolist() == [1, 2]
    assert strategy.reduce("mean", torch.tensor([1.0, 2.0]), axis=0) == 1.5
    assert strategy.gather(torch.ones(2, 1)).shape == (2, 1)
    assert strategy.local_results(3) == (3,)


def values_from_function(strategy: mirrored.Strategy) -> object:
    value = strategy.distribute_values_from_function(
        lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
    )
    return strategy.local_results(value)


def test_values_from_function() -> None:
    assert towers(values_from_function) == [((0, 2),), ((1, 2),)]


def call_on_one_tower(strategy: mirrored.Strategy | None = None) -> None:
    strategy = mirrored.MirroredStrategy()
    if strategy.is_chief:
        wait_for("the other does something else")
        shorten_deadlines(2)
        strategy.reduce("sum", 1)
    else:
        say("the other does something else")
        forever()


@pytest.mark.slow
def test_a_collective_that_one_tower_makes_alone_is_explained() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(call_on_one_tower, devices=["cpu:0", "cpu:1"], timeout=HANG)
    text = str(caught.value)
    assert "tower 0 waited 2 s for tower 1 in a collective (before its first step, at reduce" in text
    assert "; tower 1 is before its first step, for " in text
    assert ". Every tower must make the same calls" in text
    assert "forever()" in text[text.index("tower 1, most recent call last:") :]
    assert isinstance(caught.value.__cause__, mirrored.CollectiveTimeoutError)


def empty_everywhere(strategy: mirrored.Strategy) -> tuple[list[int], float]:
    """No detections in this batch, no words for this embedding."""
    with strategy.scope():
        embedding = nn.Embedding(4, 2, sparse=True)
    strategy.run(lambda: embedding(torch.empty(0, dtype=torch.int64)).sum().backward())
    assert embedding.weight.grad is not None
    return list(strategy.gather(torch.ones(0, 3)).shape), float(embedding.weight.grad.to_dense().abs().sum())


def test_values_that_are_empty_on_all_towers() -> None:
    assert towers(empty_everywhere) == [([0, 3], 0.0)] * 2


@pytest.mark.parametrize("size", [1, 100])
def test_not_a_number_stays_so(size: int) -> None:
    assert all(towers(reduce_nan, size))


def reduce_nan(strategy: mirrored.Strategy, size: int) -> bool:
    value = torch.full((size,), math.nan if strategy.topology.index else 1.0)
    return all(bool(strategy.reduce(op, value).isnan().all()) for op in ("min", "max"))
