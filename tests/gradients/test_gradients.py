"""Rule R2: after backward, grad is the mean over towers of what each contributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mirrored
from tests.support.jobs import assert_close, failures, make_data, make_mlp, parameters_of, towers
from towers.collectives.communicator import Alone
from towers.gradients.averager import GradientAverager
from towers.gradients.buckets import Bucket
from towers.gradients.streams import StreamOrder
from towers.gradients.usage import FlagsThroughHosts
from towers.mirroring.mirror import Named


def over_gloo(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return mirrored.launch(_over_gloo, (fn, args), towers=2, timeout=60)


def _over_gloo(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    options = mirrored.CommunicationOptions(implementation="gloo", bucket_bytes=64, wire_dtype=args[0])
    return fn(mirrored.MirroredStrategy(communication=options), *args[1:])


class Branches(nn.Module):
    """Two branches, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.idle = (nn.Linear(2, 1, bias=False) for _ in range(3))

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x)


def use_one_branch_each(strategy: mirrored.Strategy) -> list[list[float] | None]:
    with strategy.scope():
        model = Branches()
    r = strategy.topology.index
    strategy.run(lambda: model(torch.tensor([[2.0, 4.0]]), ["left", "right"][r]).sum().backward())
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def test_parameters_used_by_some_towers_count_zero_on_the_others() -> None:
    for left, right, idle in towers(use_one_branch_each):
        assert left == [1, 2]
        assert right == [1, 2]
        assert idle is None


def mix_models_and_towers(strategy: mirrored.Strategy) -> list[float | None]:
    """Two models; in the second backward tower 1 alone touches the second model."""
    with strategy.scope():
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    r = strategy.topology.index
    found: list[float | None] = []

    def backward(*models: nn.Module) -> None:
        for model in (first, second):
            model.zero_grad()
        sum(model(torch.full((1, 1), r + 1.0)).sum() for model in models).backward()
        found.extend(None if m.weight.grad is None else float(m.weight.grad) for m in (first, second))

    for _ in range(2):
        strategy.run(backward, args=(first,))
        strategy.run(backward, args=(first, second) if r else (first,))
        strategy.run(backward, args=(second,) if r else (first,))
    return found


def test_a_model_that_one_tower_alone_uses_is_exact() -> None:
    once = [1.5, None, 1.5, 1.0, 0.5, 1.0]
    assert towers(mix_models_and_towers) == [once * 2] * 2


def accumulate(strategy: mirrored.Strategy) -> dict[str, list[float]]:
    r = strategy.topology.index
    results = {}
    for name in ("two backwards", "no_sync", "no_sync in one run", "nothing new"):
        with strategy.scope():
            model, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def backward(scale: float, model=model) -> None:
            (model.weight * scale * (r + 1)).sum().backward()

        if name == "two backwards":
            strategy.run(backward, args=(1.0,))
            strategy.run(backward, args=(10.0,))
        elif name == "no_sync":
            with strategy.no_sync():
                strategy.run(backward, args=(1.0,))
                strategy.run(backward, args=(2.0,))
            results["local"] = model.weight.grad.flatten().tolist()
            strategy.run(backward, args=(10.0,))
        elif name == "no_sync in one run":

            def step() -> None:
                with strategy.no_sync():
                    backward(1.0)
                backward(10.0)

            strategy.run(step)
        else:  # accumulated without sync, and the synced backward touches another model
            with strategy.no_sync():
                strategy.run(backward, args=(1.0,))
            strategy.run(lambda other=other: other.weight.sum().backward())
        results[name] = model.weight.grad.flatten().tolist()
    return results


def test_accumulation() -> None:
    for r, result in enumerate(towers(accumulate)):
        assert result["two backwards"] == [16.5]  # 11 · mean(1, 2)
        assert result["local"] == [3.0 * (r + 1)]
        assert result["no_sync"] == [19.5]  # 13 · mean(1, 2)
        assert result["no_sync in one run"] == [16.5]
        assert result["nothing new"] == [1.5]


def step_without_sync(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        with strategy.no_sync():
            model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    strategy.run(step)


def test_stepping_on_unaveraged_gradients_is_refused() -> None:
    for error in failures(step_without_sync):
        with pytest.raises(mirrored.MirrorError, match=r"Linear.*accumulated under no_sync"):
            raise error


def freeze_between(strategy: mirrored.Strategy) -> list[float]:
    """Accumulated without sync, then frozen or thawed elsewhere, before the backward that averages."""
    with strategy.scope():
        model, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    r = strategy.topology.index
    with strategy.no_sync():
        strategy.run(lambda: (model.weight * (r + 1)).sum().backward())
    other.requires_grad_(False)
    strategy.run(lambda: (model.weight * 10 * (r + 1)).sum().backward())
    return [float(model.weight.grad)]


def test_freezing_does_not_forget_what_was_accumulated() -> None:
    assert towers(freeze_between) == [[16.5], [16.5]]


def step_inside_backward(strategy: mirrored.Strategy, after_the_first_run: bool) -> None:
    """An optimizer for each parameter, stepped by a hook, which comes before or after the strategy's own."""
    with strategy.scope():
        model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if after_the_first_run:
        strategy.run(lambda: None)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())


@pytest.mark.parametrize("after_the_first_run", [False, True])
def test_stepping_inside_backward_is_refused(after_the_first_run: bool) -> None:
    for error in failures(step_inside_backward, after_the_first_run):
        with pytest.raises(mirrored.MirrorError, match=r"optimizer.step\(\) before the gradients are averaged"):
            raise error


def train_gan(strategy: mirrored.Strategy, examples: int) -> list[Tensor]:
    """Two models, two optimizers, two losses in one step; towers get contiguous halves of the examples."""
    with strategy.scope():
        g, d = nn.Linear(3, 2).double(), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        optimize_g, optimize_d = torch.optim.Adam(g.parameters(), 0.01), torch.optim.Adam(d.parameters(), 0.01)
    with torch.no_grad():
        for i, p in enumerate([*g.parameters(), *d.parameters()]):
            p.copy_(torch.linspace(-1, 1 + i, p.numel()).view_as(p))
    generator = torch.Generator().manual_seed(3)
    real, noise = (torch.randn(examples, n, generator=generator, dtype=torch.float64) for n in (2, 3))
    half = -(-examples // strategy.num_replicas_in_sync)
    own = slice(half * strategy.topology.index, half * (strategy.topology.index + 1))

    def step(real: Tensor, noise: Tensor) -> None:
        fake = g(noise)
        optimize_d.zero_grad()
        costs = F.softplus(-d(real)) + F.softplus(d(fake.detach()))
        mirrored.compute_average_loss(costs, global_batch_size=examples).backward()
        optimize_d.step()
        optimize_g.zero_grad()
        mirrored.compute_average_loss(F.softplus(-d(fake)), global_batch_size=examples).backward()
        optimize_g.step()

    for _ in range(4):
        strategy.run(step, args=(real[own], noise[own]))
    return [*parameters_of(g), *parameters_of(d)]


def test_gan_with_two_optimizers_equals_the_single_device_run() -> None:
    expected = train_gan(mirrored.OneDeviceStrategy(), 9)
    for result in towers(train_gan, 9):
        assert_close(result, expected, 1e-12)


class Tied(nn.Module):
    """An embedding whose matrix is also the output layer's."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3, sparse=sparse)
        self.out = nn.Linear(3, 6, bias=False)
        if not sparse:
            self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x))


def train_embedding(strategy: mirrored.Strategy, sparse: bool) -> tuple[list[Tensor], list[str], bool]:
    with strategy.scope():
        model = Tied(sparse)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.tensor([0, 1, 1, 4, 0])
    own = tokens[:3] if strategy.topology.index == 0 else tokens[3:]
    own = own if strategy.num_replicas_in_sync > 1 else tokens
    kinds = []

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(own), own, reduction="none")
        mirrored.compute_average_loss(loss, global_batch_size=5).backward()
        kinds.append(model.embed.weight.grad.is_sparse)
        optimizer.step()

    for _ in range(3):
        strategy.run(step)
    return parameters_of(model), sorted(model.state_dict()), all(kinds)


@pytest.mark.parametrize("sparse", [False, True], ids=["tied", "row_40_sparse"])
def test_embeddings(sparse: bool) -> None:
    expected, keys, expected_kind = train_embedding(mirrored.OneDeviceStrategy(), sparse)
    assert expected_kind is sparse
    for result, result_keys, kind in towers(train_embedding, sparse):
        assert_close(result, expected, 1e-6)
        assert result_keys == keys == ["embed.weight", "out.weight"]
        assert kind is sparse


def sparse_on_one_tower(strategy: mirrored.Strategy) -> tuple[list[float], list[float]]:
    with strategy.scope():
        table = nn.Embedding(4, 1, sparse=True)
        dense = nn.Linear(1, 1, bias=False)
    r = strategy.topology.index

    def backward() -> None:
        loss = dense(torch.ones(1, 1)).sum()
        if r:
            loss = loss + table(torch.tensor([1, 1, 3])).sum()
        loss.backward()

    strategy.run(backward)
    first = table.weight.grad.to_dense().flatten().tolist()
    table.zero_grad()
    mixed = table(torch.tensor([0])).sum() if r else (table.weight * 2).sum()
    strategy.run(mixed.backward)
    return first, table.weight.grad.to_dense().flatten().tolist()


@pytest.mark.row(40)
def test_sparse_gradients_of_one_tower_and_mixed_with_dense_ones() -> None:
    assert towers(sparse_on_one_tower) == [([0, 1, 0, 0.5], [1.5, 1, 1, 1])] * 2


def train_and_freeze(strategy: mirrored.Strategy) -> list[Tensor]:
    """Body frozen from the start, thawed after two steps, head frozen after four."""
    with strategy.scope():
        model = make_mlp()
    body, head = model[0], model[2]
    body.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = make_data(10)
    own = slice(0, 10)
    if strategy.num_replicas_in_sync > 1:
        own = slice(0, 6) if strategy.topology.index == 0 else slice(6, 10)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[own]), y[own], reduction="none")
        mirrored.compute_average_loss(loss, global_batch_size=10).backward()
        optimizer.step()

    for i in range(6):
        if i == 2:
            body.requires_grad_(True)
        if i == 4:
            head.requires_grad_(False)
        strategy.run(step)
    return parameters_of(model)


def test_freezing_and_thawing_equals_the_single_device_run() -> None:
    expected = train_and_freeze(mirrored.OneDeviceStrategy())
    for result in towers(train_and_freeze):
        assert_close(result, expected, 1e-12)


def train_lazily(strategy: mirrored.Strategy) -> tuple[list[Tensor], float]:
    torch.manual_seed(strategy.topology.index)
    with strategy.scope():
        model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    r = strategy.topology.index

    def step() -> float:
        optimizer.zero_grad()
        model(torch.full((2, 3), r + 1.0)).sum().backward()
        optimizer.step()
        return float(model[2].bias.grad[0])

    gradients = [strategy.run(step) for _ in range(2)]
    return parameters_of(model), gradients[0]


def test_lazy_modules_are_mirrored_when_they_meet_their_first_batch() -> None:
    (first, gradient), (second, _) = towers(train_lazily)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert gradient == 2.0


def share_a_layer(strategy: mirrored.Strategy, reentrant: bool) -> list[Tensor]:
    with strategy.scope():
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).view(4, 3)
    own = x
    if strategy.num_replicas_in_sync > 1:
        own = x[:3] if strategy.topology.index == 0 else x[3:]

    def step() -> None:
        y = own.clone().requires_grad_()
        for layer in (model[0], model[1], model[1]):
            y = checkpoint(layer, y, use_reentrant=reentrant).tanh()
        mirrored.compute_average_loss(y.sum(1), global_batch_size=4).backward()

    strategy.run(step)
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_with_a_shared_layer(reentrant: bool) -> None:
    expected = share_a_layer(mirrored.OneDeviceStrategy(), reentrant)
    for result in towers(share_a_layer, reentrant):
        assert_close(result, expected, 1e-12)


def look_at_a_complex_parameter(strategy: mirrored.Strategy) -> tuple[list[complex], list[int]]:
    with strategy.scope():
        model = nn.Module()
        model.weight = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]) * (strategy.topology.index + 1))
        model.steps = nn.Parameter(torch.tensor([strategy.topology.index]), requires_grad=False)
    r = strategy.topology.index
    strategy.run(lambda: (model.weight * (r + 1)).real.sum().backward())
    return [*model.weight.detach().tolist(), *model.weight.grad.tolist()], model.steps.tolist()


@pytest.mark.row(41)
def test_complex_and_integer_parameters() -> None:
    for numbers, steps in towers(look_at_a_complex_parameter):
        assert numbers == [1 + 1j, 2 - 1j, 1.5, 1.5]
        assert steps == [0]


def exchange_in_mid_backward(strategy: mirrored.Strategy) -> list[float]:
    """A collective of the user's inside backward, while only tower 1's buckets are full before it."""
    with strategy.scope():
        early, late = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    r = strategy.topology.index

    def step() -> None:
        x = late(torch.full((1, 1), r + 1.0))
        total = mirrored.get_replica_context().all_reduce("sum", x)
        (early(total) if r else total * 1.0).sum().backward()

    for m in (early, late):
        nn.init.ones_(m.weight)
    strategy.run(step)
    return [float(early.weight.grad), float(late.weight.grad)]


def test_user_collectives_do_not_meet_gradient_buckets() -> None:
    # early: tower 1 alone, 3 / 2. late: the all-sum's gradient is 2 on both, times mean(1, 2).
    assert towers(exchange_in_mid_backward) == [[1.5, 3.0]] * 2


def fail_in_backward(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def step(fail: bool) -> None:
        hidden = model[0](torch.ones(1, 1))
        if fail:
            hidden.register_hook(lambda _: 1 / 0)
        model[1](hidden).sum().backward()

    with pytest.raises(ZeroDivisionError):
        strategy.run(step, args=(True,))
    strategy.run(step, args=(False,))


def test_going_on_after_a_broken_backward_is_refused() -> None:
    for error in failures(fail_in_backward):
        with pytest.raises(mirrored.TowersError, match=r"backward\(\) on tower \d ended in an exception"):
            raise error


def attached_at_one_tower() -> tuple[int, int]:
    strategy = mirrored.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        model = make_mlp()
    strategy.run(lambda: model(make_data(4)[0]).sum().backward())
    hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
    return hooks, len(model._forward_pre_hooks)


def test_nothing_is_attached_at_one_tower() -> None:
    assert attached_at_one_tower() == (0, 0)


def convert_and_come_back(strategy: mirrored.Strategy) -> list[float]:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
    r = strategy.topology.index
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        model.zero_grad()
        strategy.run(lambda dtype=dtype: model(torch.full((1, 1), r + 1.0, dtype=dtype)).sum().backward())
        assert model.weight.grad.dtype == dtype
        found.append(float(model.weight.grad))
    return found


def test_converting_a_model_between_steps() -> None:
    assert towers(convert_and_come_back) == [[1.5, 1.5, 1.5]] * 2


def train_models_in_turn(strategy: mirrored.Strategy) -> tuple[list[float], int]:
    """Models come and go under one strategy; those that are gone are forgotten."""
    r = strategy.topology.index
    found = []
    for _ in range(3):
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
        strategy.run(lambda model=model: (model.weight * (r + 1)).sum().backward())
        found.append(float(model.weight.grad))
        del model
    return found, len(strategy.engine.averager._layout.slots)


def test_models_that_are_gone_are_forgotten() -> None:
    assert towers(train_models_in_turn) == [([1.5, 1.5, 1.5], 1)] * 2


def keep_gradients(strategy: mirrored.Strategy) -> list[float]:
    """As methods do that compare the gradients of several losses."""
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
    r = strategy.topology.index

    def backward(factor: int) -> Tensor:
        model.zero_grad()
        (model.weight * factor * (r + 1)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    kept = [strategy.run(backward, args=(factor,)) for factor in (1, 10, 100)]
    views = [strategy.run(backward, args=(factor,)).view(-1)[:1] for factor in (1, 10)]
    return [float(gradient) for gradient in kept + views]


def test_a_gradient_that_was_kept_does_not_change() -> None:
    assert towers(keep_gradients) == [[1.5, 15, 150, 1.5, 15]] * 2


@pytest.mark.parametrize("how", ["there and back", "channels last", "clamped"])
def test_gradients_whose_data_was_replaced(how: str) -> None:
    assert towers(replace_data, how) == [1.5, 1.5]


def replace_data(strategy: mirrored.Strategy, how: str) -> float:
    with strategy.scope():
        model = nn.Conv2d(2, 2, 2, bias=False)
    r = strategy.topology.index

    def backward() -> Tensor:
        (model.weight * (r + 1)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    gradient = strategy.run(backward)
    if how == "there and back":
        model.double().float()
    elif how == "channels last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        gradient.data = gradient.data.clamp(-1, 1)
    model.zero_grad()
    return float(strategy.run(backward).flatten()[0])


def alternate_what_is_trained(strategy: mirrored.Strategy, first: int, second: int) -> float:
    """Thaws and freezes inside the step, as a GAN's does; returns the largest error of any gradient."""
    with strategy.scope():
        one = nn.ParameterList([nn.Parameter(torch.zeros(10)) for _ in range(first)])
        two = nn.ParameterList([nn.Parameter(torch.zeros(10)) for _ in range(second)])
    one.requires_grad_(False)
    r = strategy.topology.index

    def backward(learning: nn.ParameterList, other: nn.ParameterList) -> float:
        learning.requires_grad_(True)
        other.requires_grad_(False)
        learning.zero_grad()
        everything = torch.cat([*learning, *other])
        (everything * (r + 1)).sum().backward()
        return max(float((p.grad - 1.5).abs().max()) for p in learning if p.grad is not None)

    def step() -> float:
        return max(backward(one, two), backward(two, one))

    return max(strategy.run(step) for _ in range(3))


def test_thawing_inside_the_step() -> None:
    """Parameters of both kinds share a bucket, or lie in several."""
    assert towers(alternate_what_is_trained, 20, 5) == [0, 0]
    assert towers(alternate_what_is_trained, 1, 1) == [0, 0]


def throw_away_what_was_accumulated(strategy: mirrored.Strategy) -> list[float | None]:
    """Accumulated without sync and dropped; then one tower alone uses the parameter."""
    with strategy.scope():
        dropped, used = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    r = strategy.topology.index
    optimizer = torch.optim.SGD(dropped.parameters(), lr=1.0)
    with strategy.no_sync():
        strategy.run(lambda: (dropped.weight + used.weight).sum().backward())
    dropped.zero_grad()
    used.zero_grad()
    strategy.run(optimizer.step)  # there is nothing of this tower's own left to refuse
    strategy.run(lambda: (dropped.weight + used.weight if r else used.weight).sum().backward())
    return [None if p.grad is None else float(p.grad) for p in (dropped.weight, used.weight)]


def test_gradients_that_were_thrown_away_are_not_averaged() -> None:
    assert towers(throw_away_what_was_accumulated) == [[0.5, 1.0]] * 2


def keep_models_on_one_tower(strategy: mirrored.Strategy) -> list[float]:
    """The chief keeps the model of each fold, the others drop theirs."""
    kept, found = [], []
    for width in (500, 300, 100):
        with strategy.scope():
            model = nn.Linear(width, 2, bias=False)
        strategy.run(lambda m: (m.weight * (strategy.topology.index + 1)).sum().backward(), args=(model,))
        assert model.weight.grad is not None
        found.append(float(model.weight.grad.max()))
        if strategy.is_chief:
            kept.append(model)
        del model
    return found


def test_towers_may_keep_different_old_models() -> None:
    assert towers(keep_models_on_one_tower) == [[1.5] * 3] * 2


def build_more_after_a_broken_backward(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def step() -> None:
        hidden = model[0](torch.ones(1, 1))
        hidden.register_hook(lambda _: 1 / 0)
        model[1](hidden).sum().backward()

    with pytest.raises(ZeroDivisionError):
        strategy.run(step)
    with strategy.scope():
        nn.Linear(1, 1)
    strategy.run(lambda: None)


def test_building_more_after_a_broken_backward_is_refused() -> None:
    for error in failures(build_more_after_a_broken_backward):
        with pytest.raises(mirrored.TowersError, match="start again from the last checkpoint"):
            raise error


def use_in_another_order(strategy: mirrored.Strategy) -> tuple[list[list[str]], list[float], list[float]]:
    """The first layer is made last; tower 1 goes through the two branches the other way round."""
    with strategy.scope():
        model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("idle", "b", "a", "out", "first")})
    averager = strategy.engine.averager
    layouts, losses = [], []
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(8, 8, generator=generator) for _ in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), start, strict=True):
            p.copy_(value)

    def step() -> None:
        model.zero_grad()
        x = model["first"](torch.eye(8)[strategy.topology.index : strategy.topology.index + 1])
        names = ("a", "b") if strategy.is_chief else ("b", "a")
        model["out"](sum(model[name](x) for name in names)).square().mean().backward()

    for _ in range(3):
        strategy.run(step)
        layouts.append([slot.name.split(".")[1] for bucket in averager.buckets for slot in bucket.slots])
        losses.append(float(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)))
    model.zero_grad()
    x = model["first"](torch.eye(8)[:2])
    model["out"](model["a"](x) + model["b"](x)).square().mean().backward()
    alone = float(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))
    return layouts, losses, [alone] * 3


def test_buckets_take_tower_0s_order_after_the_first_backward() -> None:
    (layouts, *_), (others, *_) = results = over_gloo(use_in_another_order, "same")
    assert layouts == others
    assert layouts[0] == layouts[1] == layouts[2]
    assert layouts[0][0] == "out"
    assert set(layouts[0][1:3]) == {"a", "b"}
    assert layouts[0][3:] == ["first", "idle"]
    for _, ours, alone in results:
        assert ours == pytest.approx(alone, rel=1e-5)


def with_flags_apart(strategy: mirrored.Strategy, fn: Callable[[mirrored.Strategy], Any]) -> Any:
    cycle = strategy.engine.averager._cycle
    cycle._flags = FlagsThroughHosts(cycle._channel)  # as between GPUs
    return fn(strategy)


@pytest.mark.parametrize("fn", [use_one_branch_each, keep_models_on_one_tower, use_in_another_order])
def test_flags_by_way_of_the_hosts_give_the_same(fn: Callable[[mirrored.Strategy], Any]) -> None:
    assert over_gloo(with_flags_apart, "same", fn) == over_gloo(fn, "same")


def gradient_on_the_wire(strategy: mirrored.Strategy) -> tuple[Tensor, Tensor]:
    with strategy.scope():
        model = nn.ParameterList([torch.zeros(1000), torch.zeros(1000, dtype=torch.float64)])
    factors = torch.randn(2, 1000, generator=torch.Generator().manual_seed(strategy.topology.index)).double()
    strategy.run(lambda: sum((p * f).sum() for p, f in zip(model, factors, strict=True)).backward())
    return model[0].grad, model[1].grad


def test_bfloat16_on_the_wire() -> None:
    factors = [torch.randn(2, 1000, generator=torch.Generator().manual_seed(i)).double() for i in range(2)]
    narrow, wide = (factors[0] + factors[1]) / 2
    for single, double in over_gloo(gradient_on_the_wire, "bfloat16"):
        assert torch.equal(single, single.bfloat16().float())
        assert torch.allclose(single.double(), narrow, rtol=0, atol=2**-7 * float(narrow.abs().max()))
        assert torch.allclose(double, wide, rtol=1e-14)
    for single, _ in over_gloo(gradient_on_the_wire, "same"):
        assert torch.allclose(single.double(), narrow, rtol=1e-6, atol=1e-7)


class FakeStream:
    """Notes for whom it waits."""

    def __init__(self) -> None:
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


def test_gradients_of_one_bucket_may_come_on_several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do on a GPU where a part of the model was made a CUDA graph; the streams here are none."""
    now, one, other = [FakeStream()], FakeStream(), FakeStream()
    kept: list[tuple[Tensor, FakeStream]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[0])
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: kept.append((tensor, stream)))
    bucket = Bucket(0, torch.float32, torch.device("cpu"))
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter in parameters:
        bucket.add(Named("", parameter, "parameter", True))
        parameter.grad = torch.ones(3)

    bucket.streams = StreamOrder(torch.device("cuda", 0))

    def come(*streams: FakeStream) -> None:
        for now[0] in streams:
            bucket.streams.advance()

    gradients = [parameter.grad for parameter in parameters]
    come(one, one, other, one)
    assert (one.waited_for, other.waited_for) == ([other], [one])
    bucket.pack(Alone(bucket.device), 1.0)
    assert [(id(tensor), stream) for tensor, stream in kept] == [(id(gradient), one) for gradient in gradients]
    bucket.reset()
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    come(other, other)
    bucket.pack(Alone(bucket.device), 1.0)
    assert (len(one.waited_for), len(other.waited_for), len(kept)) == (1, 1, 2)


def test_each_arrival_on_a_gpu_is_ordered_after_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    for owner, name in ((StreamOrder, "advance"), (Bucket, "copy_in"), (Bucket, "pack")):
        method = getattr(owner, name)

        def noting(*args: Any, _name: str = name, _method: Any = method, **kwargs: Any) -> Any:
            did.append(_name)
            return _method(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)
    averager = GradientAverager(Alone(torch.device("cpu")))
    model = nn.Linear(300, 200)
    averager.add([Named(name, p, "parameter", True) for name, p in model.named_parameters()])
    for bucket in averager.buckets:
        bucket.streams = StreamOrder(torch.device("cuda", 0))
    model(torch.ones(1, 300)).sum().backward()
    assert sorted(did[:3]) == ["advance", "advance", "copy_in"]
    assert did[did.index("copy_in") - 1] == "advance"
    assert did[3:] == ["advance", "pack"]
