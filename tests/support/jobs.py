"""Helpers that run in the towers of a test or start them."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import mirrored
from tests.support.patience import patient_launch
from tests.support.programs import check_code, end_of, run_program, start_program, variables_with  # noqa: F401
from tests.support.waiting import HANG

ROOT = pathlib.Path(__file__).resolve().parents[2]


Settings = dict[str, Any]

GLOO: Settings = {"communication": mirrored.CommunicationOptions(implementation="gloo")}
SETTINGS: dict[str, Settings] = {"shared memory": {}, "gloo": GLOO, "sharded": {"shard_optimizer": True}}
"""Ways of averaging gradients."""
WAYS: dict[str, Settings] = {**SETTINGS, "virtual towers": {"virtual_towers": 4}}


def towers(
    fn: Callable[..., Any],
    *args: Any,
    count: int = 2,
    settings: Settings | None = None,
    hosts: str = "",
) -> list[Any]:
    """``fn(strategy, *args)`` on ``count`` CPU towers, each with its own ``MirroredStrategy``; the results in order.

    Args:
        settings: see :func:`strategy_of`; the seed is 0 if they have none.
        hosts: a letter for each tower, which are then on different hosts as their letters are.
    """
    return launch(_with_strategy, fn, args, settings or {}, hosts, count=count)


def launch(fn: Callable[..., Any], *args: Any, count: int = 2) -> list[Any]:
    """``fn(*args)`` on ``count`` CPU towers; the results in order."""
    return mirrored.launch(fn, args, devices=[f"cpu:{i}" for i in range(count)], timeout=HANG)


def _with_strategy(fn: Callable[..., Any], args: tuple[Any, ...], settings: Settings, hosts: str) -> Any:
    if hosts:
        os.environ["NCCL_HOSTID"] = hosts[int(os.environ["RANK"])]
    return fn(strategy_of(settings), *args)


def strategy_of(settings: Settings) -> mirrored.Strategy:
    """A strategy with these arguments; with "central" a CentralStorageStrategy."""
    options = {"seed": 0, **settings}
    return (mirrored.CentralStorageStrategy if options.pop("central", False) else mirrored.MirroredStrategy)(**options)


def failures(fn: Callable[..., Any], *args: Any, **options: Any) -> list[BaseException]:
    """The exceptions of a job that must fail on all of its towers, in tower order; options as those of ``towers``."""
    count = options.get("count", 2)
    try:
        with patient_launch():
            towers(fn, *args, **options)
    except mirrored.TowerFailedError as error:
        found = {failure.tower: failure.exception for failure in error.failures}
        assert sorted(found) == list(range(count)), f"only towers {sorted(found)} failed: {error}"
        return [found[tower] for tower in range(count)]
    raise AssertionError("the job did not fail")


def text_of(kind: type[BaseException], fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a call says that must raise an exception of this kind."""
    with pytest.raises(kind) as error:
        fn(*args, **kwargs)
    return str(error.value)


def all_raise(
    kind: type[BaseException], words: str, fn: Callable[..., Any], *args: Any, same: bool = False, **options: Any
) -> list[str]:
    """What the towers of a job say that must fail on all of them with ``kind`` and ``words`` (a regular expression).

    Args:
        same: they raise the same, to the letter.
        options: as those of ``towers``.
    """
    errors = failures(fn, *args, **options)
    for error in errors:
        assert isinstance(error, kind), error
        assert re.search(words, str(error)), error
    assert not same or len({(type(error), str(error)) for error in errors}) == 1, errors
    return [str(error) for error in errors]


def trace_no_backward() -> None:
    """Turn off what torch_tpu turns on, by which compiled steps call no hooks, and Keras' ``jit_compile`` fails."""
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):
        torch._dynamo.config.trace_autograd_ops = False


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """What ``make()`` gives on the CPU, with the same values wherever it is called: a GPU's generator draws others."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        return make()


def make_mlp(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """A small network."""
    return seeded(lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)), seed).to(dtype)


def make_data(examples: int = 66, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (examples, 5) and classes (examples,), the same wherever they are made."""
    g = torch.Generator().manual_seed(1)
    with torch.device("cpu"):
        inputs = torch.randn(examples, 5, generator=g, dtype=torch.float64).to(dtype)
        return inputs, torch.randint(0, 3, (examples,), generator=g)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters."""
    return [p.detach().clone() for p in model.parameters()]


def assert_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> None:
    """Equal shapes, and values within an absolute and relative tolerance."""
    torch.testing.assert_close(list(actual), list(expected), rtol=tolerance, atol=tolerance)
