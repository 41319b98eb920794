"""Virtual towers with what else scripts do: compiled models, sharding, sparse gradients, hosts; and mistakes."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored
from tests.support.features import train_gan
from tests.support.jobs import all_raise, assert_close, make_data, make_mlp, towers
from tests.support.steps import averaging_step
from tests.support.virtual import V, counting, digest, one_digest, virtual


def usual_step(strategy: mirrored.Strategy, kind: str) -> str:
    """Three steps of ragged batches with one of the usual extras."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    called = torch.compile(model, dynamic=False) if kind == "compile" else model
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1, enabled=kind == "scaler")
    autocast: Any = torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else contextlib.nullcontext()
    examples = 120 if kind == "compile" else 130  # each other size of a share is compiled anew
    data = strategy.distribute_dataset(TensorDataset(*make_data(examples, torch.float32)), 48, shuffle=True)
    losses = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with autocast:
            loss = strategy.backward(lambda x, y: scaler.scale(F.cross_entropy(called(x), y, reduction="none")), x, y)
        if kind == "scaler":
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    for batch in data:
        losses.append(strategy.run(step, args=batch))
    state = optimizer.state_dict()["state"]
    return digest([*model.parameters(), *model.buffers(), *losses, *(v for s in state.values() for v in s.values())])


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["plain", "scaler", "autocast", "compile"])
def test_the_usual_extras(kind: str) -> None:
    one_digest(usual_step, kind)


def test_sharded_optimizer() -> None:
    plain = one_digest(usual_step, "plain", counts=(1,))
    assert one_digest(usual_step, "plain", counts=(2, 4), shard_optimizer=True) == plain


def two_models(strategy: mirrored.Strategy) -> str:
    return digest(train_gan(strategy))


def test_two_models_with_two_optimizers() -> None:
    one_digest(two_models)


def on_played_hosts(strategy: mirrored.Strategy) -> str:
    assert "across 2 hosts" in strategy.communicator.backend
    return usual_step(strategy, "plain")


def test_several_hosts() -> None:
    found = towers(on_played_hosts, count=4, hosts="aaab", settings={"virtual_towers": V})
    assert set(found) == {one_digest(usual_step, "plain", counts=(1,))}


def sparse_table(strategy: mirrored.Strategy, also_dense: bool) -> tuple[str, bool, Tensor]:
    with strategy.scope():
        table = nn.Embedding(20, 4, sparse=True)
        nn.init.uniform_(table.weight, generator=torch.Generator().manual_seed(3))
        kind = torch.optim.SGD if also_dense else torch.optim.SparseAdam
        optimizer = kind(table.parameters(), lr=0.1)

    def losses(words: Tensor) -> Tensor:
        found = table(words).square().sum((1, 2))
        return found + table.weight.sum() if also_dense and 4 in words else found

    def step(words: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = strategy.backward(losses, words)
        gradients.append(table.weight.grad)
        optimizer.step()
        return loss

    gradients: list[Tensor] = []
    words = torch.arange(60).view(20, 3) ** 2 % 17
    kept = [strategy.run(step, args=batch) for batch in strategy.distribute_dataset(TensorDataset(words), 11)]
    assert len(kept) == 2
    first = gradients[0]
    return digest([table.weight, *kept]), first.is_sparse, first.to_dense() if first.is_sparse else first


@pytest.mark.parametrize("also_dense", [False, True])
def test_sparse_gradients(also_dense: bool) -> None:
    found = [one for count in (1, 4) for one in virtual(sparse_table, also_dense, count=count)]
    assert len({one for one, _, _ in found}) == 1
    assert {is_sparse for _, is_sparse, _ in found} == {not also_dense}
    if not also_dense:
        table = torch.empty(20, 4).uniform_(generator=torch.Generator().manual_seed(3)).requires_grad_()
        words = (torch.arange(60).view(20, 3) ** 2 % 17)[:11]
        F.embedding(words, table).square().sum((1, 2)).mean().backward()
        assert_close([found[0][2]], [table.grad], 1e-6)


def with_a_model_that_the_chief_keeps(strategy: mirrored.Strategy) -> str:
    """Folds: every one trains a new model, and the chief alone keeps the first."""
    kept, losses = [], []
    for fold in range(3):
        model = strategy.mirror(
            nn.Sequential(nn.Linear(5, 4 + 8 * fold), nn.BatchNorm1d(4 + 8 * fold), nn.Linear(4 + 8 * fold, 1))
        )
        for batch in strategy.distribute_dataset(TensorDataset(make_data(16, torch.float32)[0]), 16):
            losses.append(strategy.run(lambda x, m=model: strategy.backward(lambda x: m(x).sum(1), x), args=batch))
        if strategy.is_chief and fold == 0:
            kept.append(model)
    return digest([*losses, *model.buffers()])


def test_a_model_that_one_tower_keeps_does_no_harm() -> None:
    one_digest(with_a_model_that_the_chief_keeps)


def test_a_model_that_was_dropped_is_let_go() -> None:
    strategy = mirrored.OneDeviceStrategy(virtual_towers=2, seed=0)
    x = make_data(8, torch.float32)[0]
    with strategy.scope():
        models = [nn.BatchNorm1d(5), nn.BatchNorm1d(5)]
    strategy.run(lambda: strategy.backward(lambda x: models[0](x).sum(1), x))
    gone = weakref.ref(models.pop(0))
    gc.collect()
    assert gone() is None
    strategy.run(lambda: strategy.backward(lambda x: models[0](x).sum(1), x))


def test_numbers_of_virtual_towers_that_cannot_be() -> None:
    for count in (0, 6):
        with pytest.raises(ValueError, match="power of two"):
            mirrored.OneDeviceStrategy(virtual_towers=count)
    narrow = mirrored.CommunicationOptions(wire_dtype="bfloat16")
    with pytest.raises(ValueError, match="rounds gradients that are sent"):
        mirrored.MirroredStrategy(["cpu:0"], virtual_towers=4, communication=narrow)
    all_raise(ValueError, "3 towers cannot share", counting, count=3, settings={"virtual_towers": V})


def test_mistakes_are_named() -> None:
    strategy = mirrored.OneDeviceStrategy(virtual_towers=4, seed=0)
    model = strategy.mirror(make_mlp())
    x, y = make_data(8)

    def run(loss_fn: Callable[..., Any], *batch: Any, **kwargs: Any) -> Any:
        return strategy.run(lambda: strategy.backward(loss_fn, *batch, **kwargs))

    def sums(x: Tensor, *_: Any) -> Tensor:
        return model(x).sum(1)

    def under_no_sync() -> None:
        with strategy.no_sync():
            run(sums, x)

    def step_of_another_model() -> None:
        outside = make_mlp()
        outside(x).sum().backward()
        strategy.run(torch.optim.SGD(outside.parameters(), lr=0.1).step)

    def run_with_a_lazy_model() -> None:
        lazy = strategy.mirror(nn.LazyLinear(3))
        strategy.run(lambda: lazy)

    weight, by_weight = torch.ones(8), {"denominator": "weights"}
    for kind, words, call in (
        (ValueError, "one loss per example", lambda: run(lambda x, y: F.cross_entropy(model(x), y), x, y)),
        (ValueError, "drop or add examples in the dataset", lambda: run(lambda x, y: model(x[:-1])[:, 0], x, y)),
        (ValueError, r"losses of shape \(1,\)", lambda: run(lambda x: model(x).sum().unsqueeze(0), x)),
        (ValueError, "a float", lambda: run(lambda x: 1.0, x)),
        (ValueError, "no batch", lambda: run(lambda: model(x).sum(1))),
        (ValueError, "denominator", lambda: run(sums, x, **by_weight)),
        (ValueError, "shape of the losses", lambda: run(model, x, sample_weight=weight, **by_weight)),
        (ValueError, "does not fit", lambda: run(sums, x, sample_weight=torch.ones(3))),
        (ValueError, r"shape \(1,\) does not fit 8", lambda: run(sums, x, sample_weight=torch.ones(1))),
        (ValueError, r"shape \(4,\), but this tower's share has 8 examples", lambda: run(sums, x, torch.ones(4))),
        (ValueError, "has 8 examples", lambda: run(sums, x, ["a", "b"])),
        (ValueError, "sync_batch_norm", lambda: strategy.scope(sync_batch_norm=True).__enter__()),
        (ValueError, "sync_batch_norm", lambda: strategy.mirror(model, sync_batch_norm=True)),
        (ValueError, "backwards is -1", lambda: strategy.load_state_dict({"seed": 0, "backwards": -1})),
        (RuntimeError, "no_sync", under_no_sync),
        (RuntimeError, "all parameters frozen", lambda: run(lambda x: x.sum(1), x)),
        (RuntimeError, r"for the function that strategy\.run", lambda: strategy.backward(sums, x)),
        (mirrored.MirrorError, "no scope mirrored", step_of_another_model),
        (RuntimeError, "LazyLinear gets its shape in its first forward", run_with_a_lazy_model),
    ):
        with pytest.raises(kind, match=words):
            call()


def with_a_nan(strategy: mirrored.Strategy) -> tuple[str, list[str]]:
    """The second of three batches has one, in the last virtual tower; the script leaves that batch out."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, _ = make_data(48, torch.float32)
    x[31, 2] = torch.nan
    texts = []

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        try:
            strategy.backward(lambda x: model(x).squeeze(1), x)
        except mirrored.NonFiniteGradientError as error:
            texts.append(str(error))
        else:
            optimizer.step()

    for batch in strategy.distribute_dataset(TensorDataset(x), 16):
        strategy.run(step, args=batch)
    return digest([*model.parameters(), *model.buffers()]), texts


def test_a_nan_is_named_and_may_be_skipped() -> None:
    found = {count: virtual(with_a_nan, count=count, nonfinite_gradients="raise") for count in (1, 4)}
    for count, results in found.items():
        for sha, texts in results:
            assert sha == found[1][0][0], "the batch is left out as if it had not been"
            assert len(texts) == 1
            if count > 1:
                assert f"nan on tower {count - 1}" in texts[0]


def ordinary_backward(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(make_mlp())
    step = averaging_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in strategy.distribute_dataset(TensorDataset(*make_data(16)), 8):
        strategy.run(step, args=batch)


def test_the_ordinary_backward_is_said_not_to_be_exact(capfd: pytest.CaptureFixture[str]) -> None:
    virtual(ordinary_backward, count=2)
    assert capfd.readouterr().err.count("strategy.backward(loss_fn, *batch)") == 1
