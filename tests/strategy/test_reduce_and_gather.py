"""reduce and gather: what two towers get, by hand-computed values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mirrored
from tests.support.jobs import all_raise, towers
from tests.support.meeting import say, shorten_deadlines, wait_for
from tests.support.waiting import HANG, forever


def operations(strategy: mirrored.Strategy) -> dict[str, Any]:
    """Values that need no run; on one tower only what can differ."""
    r = strategy.topology.index
    integers, reals = torch.tensor([r + 1, 5 - r], dtype=torch.int32), torch.tensor([r + 1.5, 2.0])
    structure = {"loss": torch.tensor(r + 0.5), "counts": [r, np.array([r, 1])], "big": torch.full((4000,), float(r))}
    copies, rows = torch.full((r + 1,), float(r)), torch.arange(6.0).view(2, 3)[: r + 1]
    empty = torch.arange(3.0)[: 3 * r]
    # Conjugated without being computed so, and negated likewise.
    conjugated = torch.tensor([1 + 2j, 3 + 4j]).conj() if r else torch.tensor([1 + 2j, 3 + 4j])
    half = torch.tensor([1 + 2j], dtype=torch.complex32)
    values = {
        op: [strategy.reduce(op, integers), strategy.reduce(op.upper(), reals), strategy.reduce(op, r + 2)]
        for op in ("sum", "mean", "min", "max", "prod")
    }
    return {
        **values,
        "structure": strategy.reduce("sum", structure),
        "nothing": strategy.reduce("sum", {}),
        "bfloat16": strategy.reduce("mean", torch.tensor([r + 1.0], dtype=torch.bfloat16)),
        "truth": strategy.reduce(mirrored.ReduceOp.SUM, True),
        "sum along an axis": strategy.reduce("sum", copies, axis=0),
        "mean along an axis": strategy.reduce("mean", copies, axis=0),
        "mean of equal shares": strategy.reduce("mean", torch.tensor([1.0, 2.0]), axis=0),
        "mean of rows": strategy.reduce("mean", rows, axis=0),
        "mean of everything": strategy.reduce("mean", rows, axis=(0, -1)),
        "max with an empty share": strategy.reduce("max", empty, axis=0),
        "min with an empty share": strategy.reduce("min", empty.to(torch.int64), axis=0),
        "gather": strategy.gather(torch.full((r + 1, 1), r)),
        "gather of columns": strategy.gather(torch.full((1, r + 1), float(r)), axis=1),
        "gather of flags": strategy.gather(torch.ones(r, dtype=torch.bool)),
        "gather of nothing": strategy.gather(torch.ones(0, 3)),
        "gather of conjugated": strategy.gather(conjugated),
        "sum of conjugated": strategy.reduce("sum", conjugated),
        "gather of negated": strategy.gather(torch.tensor([1 + 2j]).conj().imag),
        "complex32": strategy.reduce("mean", half).to(torch.complex64),
        "uint64": strategy.reduce("max", torch.tensor([r, 7], dtype=torch.uint64)).tolist(),  # torch does not pickle it
        **{
            f"{op} of {size} with nan": strategy.reduce(op, torch.full((size,), math.nan if r else 1.0)).isnan().all()
            for op in ("min", "max")
            for size in (1, 100)
        },
    }


EXPECTED: dict[str, Any] = {
    "sum": [torch.tensor([3, 9]), torch.tensor([4.0, 4.0]), 5],
    "mean": [torch.tensor([1.5, 4.5]), torch.tensor([2.0, 2.0]), 2.5],
    "min": [torch.tensor([1, 4], dtype=torch.int32), torch.tensor([1.5, 2.0]), 2],
    "max": [torch.tensor([2, 5], dtype=torch.int32), torch.tensor([2.5, 2.0]), 3],
    "prod": [torch.tensor([2, 20]), torch.tensor([3.75, 4.0]), 6],
    "structure": {"loss": torch.tensor(2.0), "counts": [1, np.array([1, 2])], "big": torch.ones(4000)},
    "nothing": {},
    "bfloat16": torch.tensor([1.5], dtype=torch.bfloat16),
    "truth": 2,
    "sum along an axis": torch.tensor(2.0),
    "mean along an axis": torch.tensor(2 / 3),  # divided by the global count
    "mean of equal shares": torch.tensor(1.5),
    "mean of rows": torch.tensor([1.0, 2.0, 3.0]),  # (0 1 2), (0 1 2), (3 4 5)
    "mean of everything": torch.tensor(2.0),
    "max with an empty share": torch.tensor(2.0),
    "min with an empty share": torch.tensor(0),
    "gather": torch.tensor([[0], [1], [1]]),
    "gather of columns": torch.tensor([[0.0, 1.0, 1.0]]),
    "gather of flags": torch.tensor([True]),
    "gather of nothing": torch.ones(0, 3),
    "gather of conjugated": torch.tensor([1 + 2j, 3 + 4j, 1 - 2j, 3 - 4j]),
    "sum of conjugated": torch.tensor([2 + 0j, 6 + 0j]),
    "gather of negated": torch.tensor([-2.0, -2.0]),
    "complex32": torch.tensor([1 + 2j]),
    "uint64": [1, 7],
    **{f"{op} of {size} with nan": torch.tensor(True) for op in ("min", "max") for size in (1, 100)},
}


def test_operations() -> None:
    for result in towers(operations):
        torch.testing.assert_close(result, EXPECTED, rtol=0, atol=0)


def in_run(strategy: mirrored.Strategy) -> list[Any]:
    r = strategy.topology.index

    def step() -> Any:
        context = mirrored.get_replica_context()
        number, pair = torch.tensor([1.0, 3.0][r]), torch.tensor([[39.0, 2.0], [3.0, 41.0]][r])
        return [context.all_reduce(op, value).tolist() for value in (number, pair) for op in ("sum", "mean")]

    return [strategy.run(step), strategy.run(lambda: {"a": [r, (torch.tensor(r), None)], "b": "text"})]


def test_all_reduce_and_what_run_returns() -> None:
    for r, (reduced, returned) in enumerate(towers(in_run)):
        assert reduced == [4, 2, [42, 43], [21, 21.5]]
        assert returned == {"a": [r, (torch.tensor(r), None)], "b": "text"}


def call_badly(strategy: mirrored.Strategy, kind: str) -> None:
    r = strategy.topology.index
    calls: dict[str, Callable[[], object]] = {
        "gather of other sizes": lambda: strategy.gather(torch.zeros(2, r + 1)),
        "gather along another axis": lambda: strategy.gather(torch.zeros(2, 2), axis=r * 5),
        "gather of a scalar": lambda: strategy.gather(torch.tensor(1.0)),
        "structure": lambda: strategy.reduce("sum", [1.0] * (r + 1)),
        "operation": lambda: strategy.reduce(["sum", "max"][r], 1.0),
        "text": lambda: strategy.reduce("sum", "text"),
        "too large": lambda: strategy.reduce("max", torch.tensor([2**63 + 5 * r, 1], dtype=torch.uint64)),
        "different calls": lambda: strategy.gather(torch.zeros(1)) if r else strategy.reduce("sum", 1.0),
    }
    calls[kind]()


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
        wait_for("the other makes another call")
        shorten_deadlines(2)
        strategy.reduce("sum", 1)
    else:
        say("the other makes another call")
        forever()


@pytest.mark.extended
def test_a_collective_that_one_tower_makes_alone_is_explained() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(call_on_one_tower, devices=["cpu:0", "cpu:1"], timeout=HANG)
    text = str(caught.value)
    assert "tower 0 waited 2 s for tower 1 in a collective (before its first step, at reduce" in text
    assert "; tower 1 is before its first step, for " in text
    assert ". Every tower must make the same calls" in text
    assert "forever()" in text[text.index("tower 1, most recent call last:") :]
    assert isinstance(caught.value.__cause__, mirrored.CollectiveTimeoutError)


def no_words(strategy: mirrored.Strategy) -> float:
    embedding = strategy.mirror(nn.Embedding(4, 2, sparse=True))
    strategy.run(lambda: embedding(torch.empty(0, dtype=torch.int64)).sum().backward())
    return float(embedding.weight.grad.to_dense().abs().sum())


def test_sparse_gradients_that_are_empty_on_all_towers() -> None:
    assert towers(no_words) == [0.0, 0.0]
