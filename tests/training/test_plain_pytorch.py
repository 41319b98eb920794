"""Plain PyTorch works inside a scope: each feature against a single-device run of the same code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from tests.support.features import FEATURES, Result, train, with_feature
from tests.support.jobs import assert_close, make_data, parameters_of, towers
from tests.support.steps import equal_one_device, local_share


@pytest.mark.parametrize("name", FEATURES)
def test_feature_equals_the_single_device_run(name: str) -> None:
    equal_one_device(with_feature, name)


def with_autocast(strategy: mirrored.Strategy) -> Result:
    return train(strategy, dtype=torch.float32, autocast=True)


def test_bf16_autocast() -> None:
    # bfloat16 keeps 8 bits, and a share rounds its own sums: equal to the precision of the arithmetic.
    first, second = equal_one_device(with_autocast, tolerance=5e-3)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def in_two_scopes(strategy: mirrored.Strategy) -> list[Tensor]:
    """The body in one scope, the head in another, opened after training has begun."""

    def step(*modules: nn.Module) -> None:
        hidden, y = local_share(strategy, *make_data(8))
        optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.2)
        optimizer.zero_grad()
        for module in modules:
            hidden = module(hidden)
        F.cross_entropy(hidden, y).backward()
        optimizer.step()

    with torch.random.fork_rng():
        torch.manual_seed(0)
        with strategy.scope():
            body = nn.Linear(5, 4).double()
        strategy.run(step, args=(body,))
        torch.manual_seed(1)
        with strategy.scope():
            head = nn.Linear(4, 3).double()
    for _ in range(3):
        strategy.run(step, args=(body, head))
    return [*parameters_of(body), *parameters_of(head)]


def test_two_scopes() -> None:
    equal_one_device(in_two_scopes)


def batch_norm(strategy: mirrored.Strategy) -> tuple[list[Tensor], list[Tensor]]:
    with strategy.scope():
        model = nn.BatchNorm1d(5).double()
    x, _ = make_data(8)
    own = x[:4] if strategy.topology.index == 0 else x[4:]
    output = strategy.run(lambda: model(own))
    return [output.detach()], [model.running_mean.clone()]


def test_batch_norm_takes_local_statistics() -> None:
    # Documented: each tower normalises by its own share.
    x, _ = make_data(8)
    for own, (output, mean) in zip((x[:4], x[4:]), towers(batch_norm), strict=True):
        assert_close(output, [F.batch_norm(own, None, None, training=True)], 1e-12)
        assert_close(mean, [0.1 * own.mean(0)], 1e-12)
