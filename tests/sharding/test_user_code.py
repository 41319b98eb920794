"""What scripts do to gradients and parameters around a sharded step."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored
from tests.support.features import mlp
from tests.support.jobs import make_data, make_mlp, parameters_of, towers
from tests.support.sharded import equal_unsharded, small_training
from towers.sharding.optimizer import OptimizerSharder
from towers.sharding.shards import ShardedState


def user_code(strategy: mirrored.Strategy, what: str) -> list[Tensor]:
    """What scripts do to gradients and parameters between backward and the next step."""
    model = strategy.mirror(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    x, y = make_data(24, torch.float32)
    seen: list[Tensor] = []
    kept: list[Tensor] = []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        output = model(x.to(model[0].weight.dtype))
        return mirrored.compute_average_loss(F.cross_entropy(output, y, reduction="none"))

    def backward(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=what != "zero_grad to zeros")
        loss_of(x, y).backward()

    def step(x: Tensor, y: Tensor) -> None:
        if what == "closure":

            def closure() -> float:
                backward(x, y)
                return 1.0

            def broken() -> float:
                raise KeyError("broken")

            with pytest.raises(KeyError, match="broken"):
                optimizer.step(broken)
            assert optimizer.step(closure) == 1.0
            return
        if what in ("GradScaler", "GradScaler without unscale_"):
            optimizer.zero_grad()
            scaler.scale(loss_of(x, y)).backward()
            if what == "GradScaler":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            return
        if what == "no zero_grad":
            loss_of(x, y).backward()
            optimizer.step()
            return
        backward(x, y)
        if what == "log":
            seen.extend(p.grad.clone() for p in model.parameters())
        elif what == "clip_grad_value_":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        elif what == "in place":
            for p in model.parameters():
                p.grad.mul_(0.5).add_(p.detach(), alpha=0.1)
        elif what == "grad.data":
            for p in model.parameters():
                p.grad.data = p.grad.data * 0.5
        elif what == "replaced":
            for p in model.parameters():
                p.grad = p.grad.sign()
        elif what == "one read":
            seen.append(model[2].bias.grad.norm())
        elif what == "numpy":
            seen.append(torch.from_numpy(model[0].weight.grad.numpy().copy()))
        elif what == "several losses":  # their gradients are compared, then summed
            kept[:] = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            (loss_of(x, y) * 0.5).backward()
            for p, other in zip(model.parameters(), kept, strict=True):
                p.grad = p.grad + other
        elif what == "two backwards":
            (loss_of(x, y) * 0.5).backward()
        elif what == "other dtype":
            model.double()
        elif what == "backward of a gradient":
            (p := model[2].bias).grad.requires_grad_(False)
            (p * 2).backward(p.grad)
        elif what == "accumulation":
            with strategy.no_sync():
                loss_of(x, y).backward()
            loss_of(x, y).backward()
        optimizer.step()
        if what == "after the step":
            seen.extend(p.grad.clone() for p in model.parameters())
        elif what == "clamped":
            for p in model.parameters():
                p.data.clamp_(-0.1, 0.1)
        elif what == "scaled":
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
                    p.data.mul_(0.9)
        elif what == "other memory":
            for p in model.parameters():
                p.data = p.data.clone()
        elif what == "loaded":
            model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        elif what == "moved by share_memory":
            model.share_memory()
        elif what == "loaded by assignment":
            state = {name: value * 0.9 for name, value in model.state_dict().items()}
            for name, p in model.named_parameters():
                p.data = state[name]

    for batch in strategy.distribute_dataset(TensorDataset(x, y), 8):
        strategy.run(step, batch)
    assert isinstance(optimizer.state, ShardedState) is (strategy.engine.attached(OptimizerSharder) is not None)
    return [*parameters_of(model), *seen]


USER_CODE = (
    *("log", "clip_grad_value_", "in place", "grad.data", "replaced", "one read", "numpy", "several losses"),
    *("two backwards", "accumulation", "other dtype", "backward of a gradient"),
    *("after the step", "clamped", "scaled", "other memory", "loaded", "loaded by assignment", "moved by share_memory"),
    *("closure", "GradScaler", "GradScaler without unscale_", "no zero_grad", "zero_grad to zeros"),
)
"""Between backward and step, after the step, and instead of the usual step."""


@pytest.mark.extended
def test_what_scripts_do_to_gradients_and_parameters() -> None:
    equal_unsharded(user_code, USER_CODE, central=True)


def without_memory(strategy: mirrored.Strategy, what: str) -> list[Tensor]:
    """Tower 1 gets no more memory to share than a strategy begins with."""
    make, asked = os.memfd_create, []

    def create(*args: Any) -> int:
        asked.append(args)
        if os.environ["RANK"] == "1":
            raise OSError(28, "no memory")
        return make(*args)

    os.memfd_create = create
    try:
        return user_code(strategy, what)
    finally:
        os.memfd_create = make
        assert asked


WITHOUT_MEMORY = ("log", "accumulation", "after the step", "scaled")


def test_without_memory_to_share(capfd: pytest.CaptureFixture[str]) -> None:
    equal_unsharded(without_memory, WITHOUT_MEMORY)
    said = re.findall(
        r"\[tower 1\].*a shared region of [0-9.e-]+ MB cannot be allocated \(\[Errno 28\] no memory\)",
        capfd.readouterr().err,
    )
    assert len(said) == 2 * len(WITHOUT_MEMORY), "once for each strategy"


def two_alike(strategy: mirrored.Strategy, what: str) -> list[Tensor]:
    """Two parameters of one shape, whose gradients lie in one memory, or change places."""
    model = strategy.mirror(nn.ParameterList([torch.zeros(40, 50), torch.zeros(40, 50)]))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    factors = torch.randn(2000, generator=torch.Generator().manual_seed(strategy.topology.index))

    def step() -> None:
        optimizer.zero_grad()
        first, second = model
        if what == "one memory":
            ((first.view(-1) + second.flatten()) * factors).sum().backward()
        else:
            (first.view(-1) * factors + second.view(-1) * factors.flip(0)).sum().backward()
        if what == "swapped":
            first.grad, second.grad = second.grad, first.grad
        optimizer.step()

    for _ in range(2):
        strategy.run(step)
    return parameters_of(model)


def test_gradients_that_share_memory_or_change_places() -> None:
    equal_unsharded(two_alike, ("one memory", "swapped"))


def read_an_old_gradient(strategy: mirrored.Strategy) -> list[Tensor]:
    """A second backward reaches one half; then a gradient of the other half, which is still there, is read."""
    with strategy.scope():
        halves = [nn.Linear(40, 50), nn.Linear(40, 50)]
    x = torch.ones(2, 40) * (strategy.topology.index + 1)

    def step() -> Tensor:
        (halves[0](x).square().mean() + halves[1](x).square().mean()).backward()
        for p in halves[1].parameters():
            p.grad.norm()
        halves[0](x).square().mean().backward()
        return halves[1].weight.grad.norm()

    return [strategy.run(step), *(p.grad.clone() for half in halves for p in half.parameters())]


def test_old_gradients_stay_whole() -> None:
    equal_unsharded(read_an_old_gradient, count=3)


def keep_a_state_dict(strategy: mirrored.Strategy) -> list[Tensor]:
    model, _, step = small_training(strategy, torch.optim.Adam)
    kept = model.state_dict()  # lies in the parameters' memory
    for _ in range(2):
        strategy.run(step)
    assert all(torch.equal(a, b) for a, b in zip(kept.values(), model.parameters(), strict=True))
    return parameters_of(model)


def test_parameters_that_share_their_memory_stay_there_and_it_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    equal_unsharded(keep_a_state_dict)
    said = (
        "Adam number 0: 4 parameters (Sequential.0.weight, Sequential.0.bias, Sequential.2.weight …) are updated whole"
    )
    assert capfd.readouterr().err.count(said) == 1


def keys_of_memory(strategy: mirrored.Strategy) -> list[tuple[set[int], set[int]]]:
    """After the steps of each of four models, of which none is kept: the keys in use, and those to be used again."""
    x, y = make_data(8)
    averager: Any = strategy.engine.averager
    sharder: Any = strategy.engine.attached(OptimizerSharder)
    found = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"), 8).backward()
        optimizer.step()

    for number in range(4):
        model = strategy.mirror(make_mlp(seed=number))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        strategy.run(step, args=(model, optimizer))
        used = [*(bucket.key for bucket in averager.layout.buckets), *sharder._transport._keys.values()]
        used.append(sharder._known[optimizer]._readable._key)
        assert len(set(used)) == len(used)
        found.append((set(used), {*averager.keys._free, *averager.keys._released}))
    return found


def test_memory_in_use_is_not_given_to_others() -> None:
    for found in towers(keys_of_memory, settings={"shard_optimizer": True}):
        assert [used & free for used, free in found] == [set()] * 4
