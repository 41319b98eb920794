"""Training on two towers with and without ``shard_optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mirrored
from tests.support.waiting import HANG
from towers.gradients import buckets


def strategy_of(shard: bool, implementation: str = "auto") -> mirrored.MirroredStrategy:
    buckets._LARGE_BYTES = 1000  # some of these small gradients are to be treated as large ones are
    options = mirrored.CommunicationOptions(implementation=implementation, bucket_bytes=20_000)
    return mirrored.MirroredStrategy(shard_optimizer=shard, seed=1, communication=options)


def launch(fn: Callable[..., Any], *args: Any, count: int = 2, timeout: float = HANG) -> list[Any]:
    return mirrored.launch(fn, args, devices=[f"cpu:{i}" for i in range(count)], timeout=timeout)


def assert_same_state(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours["param_groups"] == expected["param_groups"]
    assert ours["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for key, value in state.items():
            mine = ours["state"][number][key]
            if not isinstance(value, Tensor):
                assert mine == value
                continue
            assert (mine.shape, mine.dtype, mine.stride()) == (value.shape, value.dtype, value.stride()), (number, key)
            assert torch.equal(mine, value), (number, key)


def in_turn(fn: Callable[..., Any], names: Sequence[str], *args: Any) -> dict[str, Any]:
    """``fn(name, *args)`` for each name, on the same towers."""
    return {name: fn(name, *args) for name in names}


def both(fn: Callable[..., Any], names: Sequence[str], *args: Any, count: int = 2) -> tuple[list[Any], list[Any]]:
    """What ``fn(name, shard, *args)`` gives on each tower, sharded and not."""
    ours, expected = (launch(in_turn, fn, names, shard, *args, count=count) for shard in (True, False))
    return ours, expected


def assert_same_bits(ours: Any, expected: Any) -> None:
    """Tensors in any structure, each equal to the other's."""
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def equal_unsharded(fn: Callable[..., Any], *args: Any, count: int = 2) -> None:
    """``fn(*args, shard)`` gives the same bits on each tower, sharded and not."""
    ours, expected = (launch(fn, *args, shard, count=count) for shard in (True, False))
    assert_same_bits(ours, expected)


def names_equal_unsharded(fn: Callable[..., Any], names: Sequence[str], count: int = 2) -> None:
    """As :func:`equal_unsharded` for each ``fn(name, shard)``, on the same towers."""
    ours, expected = both(fn, names, count=count)
    assert_same_bits(ours, expected)


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = sorted(optimizer.state_dict()["state"].items())
    return [v for _, state in states for v in state.values() if isinstance(v, Tensor)]
