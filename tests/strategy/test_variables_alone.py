"""A variable of one tower: what it computes, converts and refuses."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mirrored
from tests.support.jobs import text_of


@pytest.fixture
def strategy() -> mirrored.Strategy:
    return mirrored.OneDeviceStrategy()


def test_it_computes_as_its_value(strategy: mirrored.Strategy) -> None:
    v, n, rows = strategy.variable(7.0), strategy.variable(7), strategy.variable([[1.0, 2.0], [3.0, 4.0]])
    assert [v + 1, 3 + v, v + v, v - 2, 13 - v, v * 2, 3 * v, v / 2, 14 / v] == [8, 10, 14, 5, 6, 14, 21, 3.5, 2]
    assert [n // 2, 15 // n, n % 2, 16 % n, n & 3, 11 & n, n | 8, 16 | n, n ^ 3, 11 ^ n] == [
        *(3, 2, 1, 2, 3, 3, 15, 23, 4, 12)
    ]
    assert [v**3, 2**v, -v, +v, ~n, abs(-v), n << 1, 1 << n, n >> 1] == [343, 128, -7, 7, ~7, 7, 14, 128, 3]
    assert [v < 12, v <= 7, v == 7, v != 8, v > 7, v >= 8] == [True, True, True, True, False, False]
    assert torch.equal(rows @ rows, rows.value() @ rows.value())
    assert (torch.ones(2) @ rows).tolist() == [4, 6]
    assert [rows[1, 0], len(rows), rows.sum(), *(row.sum() for row in rows)] == [3, 2, 10, 3, 7]
    assert torch.equal(torch.stack([rows, rows])[1], rows.value())
    assert torch.nn.functional.relu(torch.ones(2) + v).tolist() == [8, 8]
    assert {v: 1}[v] == 1


def test_it_converts_as_its_value(strategy: mirrored.Strategy) -> None:
    v, n = strategy.variable(2.5), strategy.variable(3)
    assert (float(v), int(v), bool(v), complex(v), f"{v:.2f}", [0, 1, 2, 3][n]) == (2.5, 2, True, 2.5, "2.50", 3)
    assert [v.item(), v.numpy(), np.asarray(v)] == [2.5] * 3
    assert np.asarray(v, np.float64).dtype == np.float64
    assert repr(v).startswith("<'Variable_0' (on_write, none), tower 0: 2.5")


def test_nothing_changes_it_but_assigning(strategy: mirrored.Strategy) -> None:
    v, new = strategy.variable(torch.zeros(2)), torch.ones(2)
    assert "assign_add" in text_of(TypeError, exec, "v += 1", {"v": v})
    assert "assign_add" in text_of(AttributeError, lambda: v.add_(1))
    v.value().add_(1)
    v.state_dict()["value"].add_(1)
    writes: list[Callable[[], Any]] = [
        lambda: nn.init.constant_(v, 3.0),
        lambda: torch.relu_(v),
        lambda: torch._foreach_add_([v], 1),
        lambda: torch.add(new, 1, out=v),
        lambda: nn.utils.vector_to_parameters(new, [v]),
        *(functools.partial(setattr, v, name, new) for name in ("data", "grad", "requires_grad")),
    ]
    for write in writes:
        assert "assign_add" in text_of(TypeError, write)
    assert torch.zeros(2).add_(v).tolist() == torch.add(v, 0, out=torch.zeros(2)).tolist() == [0, 0]
    assert (v.tolist(), v.data.tolist(), v.grad) == ([0, 0], [0, 0], None)
    before = v.assign(new)
    new.add_(1)
    v.assign_add([1, 1])
    assert (before.tolist(), v.tolist()) == ([1, 1], [2, 2])
    assert not hasattr(v, "no_such_name")


def test_it_is_no_parameter(strategy: mirrored.Strategy) -> None:
    parameter = nn.Parameter(torch.tensor(2.0))
    v = strategy.variable(parameter)
    assert not v.assign_add(parameter * 2).requires_grad
    assert not v.value().requires_grad
    (v * parameter).backward()
    assert parameter.grad == 6
    text_of(TypeError, torch.optim.SGD, [v], 0.1)


def test_properties(strategy: mirrored.Strategy) -> None:
    v = strategy.variable([1, 2], "ON_READ", "Sum", dtype=torch.float32, name="v")
    options = (v.name, v.synchronization, v.aggregation, v.shape, v.dtype, v.device)
    assert options == ("v", "on_read", "sum", (2,), torch.float32, torch.device("cpu"))
    assert [strategy.variable(x).dtype for x in (1, 1.0, True)] == [torch.int64, torch.float32, torch.bool]
    assert strategy.variable(1.0, "auto", mirrored.ReduceOp.MEAN).aggregation == "mean"


def test_a_copy_is_another_variable(strategy: mirrored.Strategy) -> None:
    v = strategy.variable(1.0, aggregation="mean")
    other = copy.deepcopy({"v": v})["v"]
    other.assign(2.0)
    assert (float(v), float(other), other.aggregation) == (1.0, 2.0, "mean")
    assert "save its state_dict()" in text_of(TypeError, pickle.dumps, v)
    for state in ({}, {"of_each_tower": 3}):
        assert f"needs a state with 'value', but that one has {[*state]}" in text_of(
            ValueError, v.load_state_dict, state
        )


def test_what_is_written_is_converted_as_far_as_nothing_is_lost(strategy: mirrored.Strategy) -> None:
    v = strategy.variable(0.0, "on_read", "mean", dtype=torch.float64)
    strategy.run(v.assign, (0.1,))
    assert v.item() == 0.1
    strategy.run(v.assign_add, (np.float32(1),))
    strategy.run(v.assign_add, (1,))
    assert v.item() == 2.1
    text_of(TypeError, strategy.variable(0, "on_read", "sum").assign, 0.5)


@pytest.mark.row(51)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((1, "on_write", "mean"), "a mean of torch.int64 has another dtype: give dtype=torch.float32"),
        ((True, "on_read", "sum"), "a sum of torch.bool has another dtype"),
        ((1.0, "on_write", "max"), "aggregation is 'max', but must be one of sum, mean, only_first_replica, none"),
        ((1.0, "none"), "synchronization is 'none', but must be one of on_write, on_read, auto"),
    ],
)
def test_an_option_that_cannot_be_is_refused(strategy: mirrored.Strategy, options: tuple[Any, ...], words: str) -> None:
    assert words in text_of(ValueError, strategy.variable, *options)


def test_virtual_towers_write_outside_run() -> None:
    strategy = mirrored.OneDeviceStrategy(virtual_towers=2)
    strategy.variable(1).assign(2)
    for options in ("on_read", "sum"), ("on_read", "none"), ("on_write", "sum"):
        assert "with virtual_towers, write it outside" in text_of(ValueError, strategy.variable, 1, *options)


def test_another_strategys_run_is_no_place_for_it(strategy: mirrored.Strategy) -> None:
    v = strategy.variable(1.0)
    other = mirrored.OneDeviceStrategy()
    for call in (v.value, lambda: v.assign(2.0)):
        assert "strategies cannot be mixed" in other.run(lambda call: text_of(RuntimeError, call), (call,))
