"""Plain PyTorch works inside a scope: each feature against a single-device run of the same code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored
from tests.support.features import FEATURES, Result, mlp, train, with_feature
from tests.support.jobs import assert_close, make_data, parameters_of, towers

pytestmark = pytest.mark.slow


def compare(results: list[Result], expected: Result, tolerance: float) -> None:
    for result in results:
        for key, tensors in expected.items():
            assert_close(result[key], tensors, tolerance)


@pytest.mark.parametrize("name", FEATURES)
def test_feature_equals_the_single_device_run(name: str) -> None:
    compare(towers(with_feature, name), with_feature(mirrored.OneDeviceStrategy(), name), 1e-12)


def with_autocast(strategy: mirrored.Strategy) -> Result:
    return train(strategy, dtype=torch.float32, autocast=True)


def test_bf16_autocast() -> None:
    # bfloat16 keeps 8 bits, and a share rounds its own sums: equal to the precision of the arithmetic.
    results = towers(with_autocast)
    compare(results, with_autocast(mirrored.OneDeviceStrategy()), 5e-3)
    assert all(torch.equal(a, b) for a, b in zip(results[0]["parameters"], results[1]["parameters"], strict=True))


def with_compile(strategy: mirrored.Strategy) -> Result:
    return train(strategy, dtype=torch.float32, prepare=torch.compile)


@pytest.mark.slow
def test_compiled_model() -> None:
    compare(towers(with_compile), train(mirrored.OneDeviceStrategy(), dtype=torch.float32), 1e-5)


def with_compiled_step(strategy: mirrored.Strategy, compiled: bool = True) -> list[Tensor]:
    """The whole step under torch.compile: loss, backward and optimizer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with strategy.scope():
            model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    data = strategy.distribute_dataset(TensorDataset(*make_data(21, torch.float32)), 8)

    @torch.compile(disable=not compiled)
    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()

    for batch in data:
        strategy.run(step, args=batch)
    return parameters_of(model)


@pytest.mark.slow
def test_compiled_step() -> None:
    expected = with_compiled_step(mirrored.OneDeviceStrategy(), compiled=False)
    for result in towers(with_compiled_step):
        assert_close(result, expected, 1e-5)


def convert_after_the_scope(strategy: mirrored.Strategy) -> list[Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with strategy.scope():
            model = mlp()
    model.to(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    data = strategy.distribute_dataset(TensorDataset(*make_data(21)), 8)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()

    for batch in data:
        strategy.run(step, args=batch)
    return parameters_of(model)


def test_model_to_dtype_after_the_scope() -> None:
    expected = convert_after_the_scope(mirrored.OneDeviceStrategy())
    assert expected[0].dtype == torch.float64
    for result in towers(convert_after_the_scope):
        assert_close(result, expected, 1e-12)


def in_two_scopes(strategy: mirrored.Strategy) -> list[Tensor]:
    """The body in one scope, the head in another, opened after training has begun."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with strategy.scope():
            body = nn.Linear(5, 4).double()
        x, y = make_data(8)
        own = slice(0, 8)
        if strategy.num_replicas_in_sync > 1:
            own = slice(0, 4) if strategy.topology.index == 0 else slice(4, 8)

        def step(*modules: nn.Module) -> None:
            optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.2)
            optimizer.zero_grad()
            hidden = x[own]
            for module in modules:
                hidden = module(hidden)
            F.cross_entropy(hidden, y[own]).backward()
            optimizer.step()

        strategy.run(step, args=(body,))
        torch.manual_seed(1)
        with strategy.scope():
            head = nn.Linear(4, 3).double()
    for _ in range(3):
        strategy.run(step, args=(body, head))
    return [*parameters_of(body), *parameters_of(head)]


def test_two_scopes() -> None:
    expected = in_two_scopes(mirrored.OneDeviceStrategy())
    for result in towers(in_two_scopes):
        assert_close(result, expected, 1e-12)


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


def with_grad_scaler(strategy: mirrored.Strategy) -> tuple[list[Tensor], float]:
    """A gradient that overflows on one tower makes all towers skip the step."""
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(value: float) -> None:
        optimizer.zero_grad()
        x = torch.full((1, 1), value if strategy.topology.index else 1.0)
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    strategy.run(step, args=(float("inf"),))
    strategy.run(step, args=(3.0,))
    return parameters_of(model), scaler.get_scale()


def test_grad_scaler_decides_alike_on_all_towers() -> None:
    for [weight], scale in towers(with_grad_scaler):
        assert float(weight) == -1.0  # 1 - mean(1, 3)
        assert scale == 2.0
