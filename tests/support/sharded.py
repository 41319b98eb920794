"""Training on two towers with and without ``shard_optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mirrored
from tests.support.features import mlp
from tests.support.jobs import strategy_of, towers
from towers.gradients import buckets
from towers.sharding.optimizer import OptimizerSharder


def small_training(
    strategy: mirrored.Strategy, make: Callable[[Any], Any], between: Callable[[nn.Module], object] = lambda model: None
) -> tuple[Any, Any, Callable[[], None]]:
    """A small model, an optimizer of it, and a step; ``between(model)`` runs before the optimizer's."""
    model = strategy.mirror(mlp())
    optimizer = make(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        between(model)
        optimizer.step()

    return model, optimizer, step


def launch(
    fn: Callable[..., Any],
    *args: Any,
    sharded: bool = True,
    central: bool = False,
    names: Sequence[str] = (),
    implementation: str = "auto",
    **options: Any,
) -> list[Any]:
    """``fn(strategy, *args)``, or ``fn(strategy, name)`` for each name, on towers; options as those of ``towers``.

    Args:
        sharded: is the optimizer's step shared out.
        central: and the parameters in central storage.
    """
    communication = mirrored.CommunicationOptions(implementation=implementation, bucket_bytes=20_000)
    sharding = {"central": True} if sharded and central else {"shard_optimizer": sharded}
    settings = {**sharding, "seed": 1, "communication": communication}
    return towers(_in_turn, fn, args, names, settings, settings=settings, **options)


def _in_turn(
    strategy: mirrored.Strategy, fn: Callable[..., Any], args: tuple[Any, ...], names: Sequence[str], settings: Any
) -> Any:
    buckets._LARGE_BYTES = 1000  # some of these small gradients are to be treated as large ones are

    def run(strategy: mirrored.Strategy, *args: Any) -> Any:
        assert (strategy.engine.attached(OptimizerSharder) is not None) is settings.get("shard_optimizer", True)
        return fn(strategy, *args)

    if not names:
        return run(strategy, *args)
    results = {}
    for name in names:
        try:
            results[name] = run(strategy_of(settings), name)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    return results


def assert_same_state(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(ours["state"], expected["state"], rtol=0, atol=0, check_stride=True)


def both(fn: Callable[..., Any], names: Sequence[str] = (), **options: Any) -> tuple[list[Any], list[Any]]:
    """What :func:`launch` gives on each tower, sharded and not."""
    ours, expected = (launch(fn, names=names, sharded=sharded, **options) for sharded in (True, False))
    return ours, expected


def assert_same_bits(ours: Any, expected: Any) -> None:
    """Tensors in any structure, each equal to the other's."""
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def equal_unsharded(
    fn: Callable[..., Any], names: Sequence[str] = (), *, central: bool = False, **options: Any
) -> None:
    """Sharded and not, and perhaps in central storage, each tower has the same bits."""
    ours, expected = both(fn, names, **options)
    assert_same_bits(ours, expected)
    if central:
        assert_same_bits(launch(fn, names=names, central=True, **options), expected)


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = sorted(optimizer.state_dict()["state"].items())
    return [v for _, state in states for v in state.values() if isinstance(v, Tensor)]
