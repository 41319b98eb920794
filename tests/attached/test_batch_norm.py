"""BatchNorm over the global batch: N towers, with uneven and empty shares, compute what one device computes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as quantised
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import mirrored
from tests.support.jobs import assert_close, parameters_of, towers

SHARES = {1: [11], 2: [7, 4], 3: [5, 0, 6], 5: [1, 1, 1, 1, 0]}
"""How many examples each tower has, by the number of towers."""

Values = dict[str, list[Tensor]]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (3 + 2 * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype)


def own_share(strategy: mirrored.Strategy, whole: Tensor, sizes: list[int]) -> Tensor:
    return whole.split(sizes)[strategy.topology.index].clone()


def in_scope(strategy: mirrored.Strategy, *make: Callable[[], nn.Module]) -> list[nn.Module]:
    """Models made in one scope with sync_batch_norm, with parameters that are eighths, exact in every dtype."""
    with strategy.scope(sync_batch_norm=True):
        models = [function() for function in make]
    for model in models:
        for number, parameter in enumerate(p for p in model.parameters() if not is_lazy(p)):
            parameter.detach().copy_(random(*parameter.shape, seed=number).mul(8).round().div(8))
    return models


def use(
    strategy: mirrored.Strategy,
    model: nn.Module,
    whole: Tensor,
    sizes: list[int],
    weights_dtype: torch.dtype = torch.float64,
) -> Values:
    """Train forward and backward; the loss weighs every output, the gradient is that of the sum over all towers."""
    own = own_share(strategy, whole, sizes).requires_grad_()
    weights = random(*whole.shape, seed=1).sub(3).to(weights_dtype).to(whole.dtype)
    weights = own_share(strategy, weights, sizes)

    def step(factor: int) -> Tensor:
        y = model(own * factor)
        (y * weights).sum().mul(len(sizes)).backward()
        return y.detach()

    outputs = [strategy.run(step, args=(factor,)) for factor in (1, 2, 4)]
    return {
        "output": outputs,
        "input gradient": [own.grad / len(sizes)],
        "parameter gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "statistics": [buffer.clone() for buffer in model.buffers()],
    }


def compare(results: list[Values], expected: Values, sizes: list[int], tolerance: float = 1e-12) -> None:
    """Outputs and input gradients joined in tower order, everything else on every tower."""
    for key, tensors in expected.items():
        if key in ("output", "input gradient"):
            joined = [torch.cat(parts) for parts in zip(*(result[key] for result in results), strict=True)]
            assert [len(result[key][0]) for result in results] == sizes
            assert_close(joined, tensors, tolerance)
        else:
            for result in results:
                assert_close(result[key], tensors, tolerance)
                assert all(torch.equal(a, b) for a, b in zip(result[key], results[0][key], strict=True)), key


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.BatchNorm1d(3).double(), (3,)),
    (lambda: nn.BatchNorm1d(3).double(), (3, 5)),
    (lambda: nn.BatchNorm2d(3).double(), (3, 4, 5)),
    (lambda: nn.BatchNorm3d(3).double(), (3, 2, 3, 2)),
]


def every_kind(strategy: mirrored.Strategy, sizes: list[int]) -> list[Values]:
    layers = in_scope(strategy, *(make for make, _ in LAYERS))
    wholes = [random(sum(sizes), *shape) for _, shape in LAYERS]
    return [use(strategy, layer, whole, sizes) for layer, whole in zip(layers, wholes, strict=True)]


@pytest.mark.parametrize("count", SHARES)
def test_layers_equal_the_single_device(count: int) -> None:
    sizes = SHARES[count]
    alone = every_kind(mirrored.OneDeviceStrategy(), [sum(sizes)])
    for results, expected in zip(zip(*towers(every_kind, sizes, count=count), strict=True), alone, strict=True):
        compare(list(results), expected, sizes)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.reentrant = nn.BatchNorm2d(3).double(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=self.reentrant)


class CheckpointedActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = WithActivation()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=False)


class Twice(nn.Module):
    """Several forwards before the backward, one of them without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm(x * x)
        return self.norm(x) * self.norm(x.exp())


class GradientPenalty(nn.Module):
    """The gradient of the output with respect to the input is part of the output: second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).pow(3)
        [slope] = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.square()


class Plainer(nn.BatchNorm2d):
    """A class of the user's that keeps torch's forward."""

    def __init__(self) -> None:
        super().__init__(3, dtype=torch.float64)
        self.extra = 1


class WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a forward like torch's, then drop and activation."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(3, dtype=torch.float64, **settings)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        use_buffers = not self.training or self.track_running_stats
        y = F.batch_norm(
            x,
            self.running_mean if use_buffers else None,
            self.running_var if use_buffers else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            factor,
            self.eps,
        )
        standardised = F.batch_norm(torch.arange(12.0, dtype=x.dtype).view(1, 3, 4), None, None, training=True)
        return self.act(self.drop(y)) + standardised.sum()


class BySuper(nn.BatchNorm2d):
    """Takes another argument, and part of the values of each example only."""

    def __init__(self) -> None:
        super().__init__(3, affine=False, dtype=torch.float64)
        self.condition = WithActivation()

    def forward(self, x: Tensor, *, factor: float = 2.0) -> Tensor:
        return factor * super().forward(x.flatten(2)[:, :, 1:, None]).sum((2, 3), keepdim=True) + self.condition(x)


class ByTheClass(nn.BatchNorm1d):
    """Rows of tokens as examples."""

    def __init__(self) -> None:
        super().__init__(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).transpose(1, 2)
        return nn.BatchNorm1d.forward(self, rows.flatten(0, 1)).view_as(rows).transpose(1, 2).reshape(x.shape).tanh()


class AlwaysFrozen(nn.BatchNorm2d):
    """Normalises by its running statistics in training, too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class Cut(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class LazyCut(nn.LazyBatchNorm2d):
    cls_to_become = Cut
    forward = Cut.forward  # torch looks it up before the layer becomes a Cut


def frozen(*names: str) -> nn.Module:
    layer = nn.BatchNorm2d(3).double()
    for name in names:
        getattr(layer, name).requires_grad_(False)
    return layer


def fresh(**settings: Any) -> nn.Module:
    return nn.BatchNorm2d(3, dtype=torch.float64, **settings)


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "cumulative": lambda: fresh(momentum=None),
    "momentum 0": lambda: fresh(momentum=0.0),
    "not affine": lambda: fresh(affine=False),
    "no running statistics": lambda: fresh(track_running_stats=False),
    "frozen": lambda: frozen("weight", "bias"),
    "frozen bias": lambda: frozen("bias"),
    "large eps": lambda: fresh(eps=2.0),
    "lazy": lambda: nn.LazyBatchNorm2d(dtype=torch.float64),
    "two layers": lambda: nn.Sequential(fresh(), nn.Tanh(), fresh()),
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "several forwards": Twice,
    "gradient penalty": GradientPenalty,
    "subclass": Plainer,
    "with activation": WithActivation,
    "with activation, cumulative": lambda: WithActivation(momentum=None),
    "with activation, without statistics": lambda: WithActivation(track_running_stats=False, affine=False),
    "by super": BySuper,
    "by the class": ByTheClass,
    "always frozen": lambda: AlwaysFrozen(3, dtype=torch.float64),
    "lazy with a forward": lambda: LazyCut(dtype=torch.float64),
    "checkpoint with activation": CheckpointedActivation,
    "deepcopy": lambda: nn.Sequential(*(copy.deepcopy(layer) for layer in [fresh()] * 2)),
    "compiled": lambda: torch.compile(nn.Sequential(fresh(), nn.Tanh()), backend="eager"),
}


def every_variant(strategy: mirrored.Strategy, sizes: list[int]) -> dict[str, Values]:
    whole = random(sum(sizes), 3, 2, 2) / 4
    models = zip(VARIANTS, in_scope(strategy, *VARIANTS.values()), strict=True)
    return {name: use(strategy, model, whole, sizes) for name, model in models}


def test_variants_equal_the_single_device() -> None:
    sizes = SHARES[3]
    results = towers(every_variant, sizes, count=3)
    alone = every_variant(mirrored.OneDeviceStrategy(), [sum(sizes)])
    for name, expected in alone.items():
        try:
            compare([result[name] for result in results], expected, sizes, 1e-10 if "penalty" in name else 1e-12)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


DTYPES = [
    (torch.float32, torch.float32, 1e-5),
    (torch.bfloat16, torch.float32, 4e-2),
    (torch.float16, torch.float32, 5e-3),
    (torch.bfloat16, torch.bfloat16, 4e-2),
]
"""Of the input, of the layer, and a tolerance for what is rounded to the former."""


def through_dtypes(strategy: mirrored.Strategy, sizes: list[int]) -> list[Values]:
    layers = in_scope(strategy, *(lambda dtype=dtype: nn.BatchNorm2d(3, dtype=dtype) for _, dtype, _ in DTYPES))
    wholes = [random(sum(sizes), 3, 4, 4, dtype=dtype) for dtype, _, _ in DTYPES]
    return [use(strategy, layer, whole, sizes) for layer, whole in zip(layers, wholes, strict=True)]


def test_dtypes() -> None:
    sizes = [4, 7]
    plain = through_dtypes(mirrored.OneDeviceStrategy(), [sum(sizes)])
    for (dtype, inside, tolerance), own, *results in zip(DTYPES, plain, *towers(through_dtypes, sizes), strict=True):
        for key, tensors in own.items():
            assert [t.dtype for t in results[0][key]] == [t.dtype for t in tensors]
        # What one device computes in the same dtypes is rounded, too: the reference is its float64.
        strategy = mirrored.OneDeviceStrategy()
        [layer] = in_scope(strategy, fresh)
        whole = random(sum(sizes), 3, 4, 4, dtype=dtype).double()
        exact = use(strategy, layer, whole, [sum(sizes)], weights_dtype=dtype)
        rounded = [
            {key: [t if not t.is_floating_point() else t.double() for t in tensors] for key, tensors in result.items()}
            for result in results
        ]
        statistics = rounded[0].pop("statistics")
        # Statistics are as precise as their buffers, whatever comes in.
        assert_close(statistics, exact.pop("statistics"), tolerance if inside == torch.bfloat16 else 2e-6)
        compare([rounded[0], {**rounded[1]}], exact, sizes, tolerance)


def formats(strategy: mirrored.Strategy) -> list[bool]:
    [layer] = in_scope(strategy, fresh)
    found = []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        own = random(3, 3, 4, 4).to(memory_format=memory_format).requires_grad_()
        y = strategy.run(lambda own=own: layer(own))
        y.sum().backward()
        found += [t.is_contiguous(memory_format=memory_format) for t in (y, own.grad)]
    return found


def test_memory_formats_are_kept() -> None:
    assert towers(formats) == [[True] * 4] * 2


def with_autocast(strategy: mirrored.Strategy, sizes: list[int]) -> Tensor:
    [model] = in_scope(strategy, lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    own = own_share(strategy, random(sum(sizes), 3, 4, 4, dtype=torch.float32), sizes)
    with torch.autocast("cpu", torch.bfloat16):
        y = strategy.run(lambda: model(own))
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    return y.detach()


def test_autocast() -> None:
    expected = with_autocast(mirrored.OneDeviceStrategy(), [11])
    assert_close([torch.cat(towers(with_autocast, [4, 7]))], [expected], 3e-2)


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(5),
            nn.LazyBatchNorm1d(),
            nn.Linear(5, 3),
        ).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def train_small_net(strategy: mirrored.Strategy, freeze: bool = False) -> Values:
    torch.manual_seed(0)
    with strategy.scope(sync_batch_norm=True):
        model = SmallNet()
    if freeze:
        model.body[0].requires_grad_(False)
    model.eval()
    model(torch.ones(1, 2, 6, 6, dtype=torch.float64))  # gives lazy modules their shapes
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # The last batch has 4 examples.
    data = strategy.distribute_dataset(TensorDataset(random(48, 2, 6, 6), torch.arange(48) % 3), 11)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()

    for batch in data:
        strategy.run(step, args=batch)
    model.eval()
    with torch.no_grad():
        evaluated = model(random(3, 2, 6, 6, seed=2))
    return {"parameters": parameters_of(model), "statistics": list(model.buffers()), "evaluated": [evaluated]}


@pytest.mark.parametrize(("count", "freeze"), [(1, False), (2, False), (3, True), (5, False)])
def test_training_a_network_equals_the_single_device(count: int, freeze: bool) -> None:
    alone = train_small_net(mirrored.OneDeviceStrategy(), freeze)
    compare(towers(train_small_net, freeze, count=count), alone, [], 1e-12)


def plain_mean(strategy: mirrored.Strategy) -> Values:
    """A script written for DDP: equal shares and ``loss.mean()``."""
    [model] = in_scope(strategy, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double())
    count = strategy.num_replicas_in_sync
    own = own_share(strategy, random(12, 4), [12 // count] * count)
    strategy.run(lambda: model(own).square().mean().backward())
    return {"parameters": [p.grad for p in model.parameters()]}


def test_a_plain_mean_has_the_gradient_of_the_single_device() -> None:
    compare(towers(plain_mean, count=3), plain_mean(mirrored.OneDeviceStrategy()), [])


def sizes_of_pictures(strategy: mirrored.Strategy) -> list[Tensor]:
    [layer] = in_scope(strategy, fresh)
    own = [random(2, 3, 4, 4), random(1, 3, 2, 7, seed=1)][strategy.topology.index]
    return [strategy.run(lambda: layer(own)).detach(), layer.running_mean, layer.running_var]


def test_towers_may_have_pictures_of_different_sizes() -> None:
    pictures = random(2, 3, 4, 4).transpose(0, 1).flatten(1), random(1, 3, 2, 7, seed=1)[0].flatten(1)
    values = torch.cat(pictures, 1)
    for _, mean, variance in towers(sizes_of_pictures):
        assert_close([mean, variance], [0.1 * values.mean(1), 0.9 + 0.1 * values.var(1)], 1e-12)


def few_values(strategy: mirrored.Strategy, sizes: list[int]) -> tuple[Any, ...]:
    [layer] = in_scope(strategy, lambda: nn.BatchNorm1d(3).double())
    own = own_share(strategy, random(sum(sizes), 3), sizes).requires_grad_()
    try:
        y = strategy.run(lambda: layer(own))
    except ValueError as error:
        return type(error), str(error)
    y.sum().backward()
    return y.shape, [p.grad for p in layer.parameters()], list(layer.buffers())


def test_one_value_in_all_is_an_error_on_all_towers() -> None:
    kind, text = few_values(mirrored.OneDeviceStrategy(), [1])
    assert "Expected more than 1 value per channel when training" in text
    for found in towers(few_values, [0, 1, 0], count=3):
        assert found[0] is kind
        assert found[1] == (
            "Expected more than 1 value per channel when training, but all towers together have 1 at SyncBatchNorm1d"
        )


def test_one_value_each_is_none() -> None:
    for shape, _, _ in towers(few_values, [1, 1]):
        assert shape == (1, 3)


def test_an_empty_global_batch_changes_no_statistics() -> None:
    shape, gradients, buffers = few_values(mirrored.OneDeviceStrategy(), [0])
    assert torch.equal(buffers[0], torch.zeros(3, dtype=torch.float64))
    for found in towers(few_values, [0, 0]):
        assert found[0] == shape == (0, 3)
        assert_close([*found[1], *found[2]], [*gradients, *buffers], 0.0)


def evaluate_alone(strategy: mirrored.Strategy) -> list[Tensor]:
    """In eval mode one tower may use the layer alone."""
    [layer] = in_scope(strategy, fresh)
    strategy.run(lambda: None)
    layer.eval()
    if strategy.is_chief:
        return [
            layer(random(2, 3, 2, 2)).detach(),
            torch.compile(layer, fullgraph=True, backend="eager")(random(2, 3, 2, 2)),
        ]
    return []


def test_eval_mode_is_plain() -> None:
    [[output, compiled], _] = towers(evaluate_alone)
    assert_close([output, compiled], evaluate_alone(mirrored.OneDeviceStrategy()), 0.0)


class OwnForward(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Ghost(nn.BatchNorm2d):
    """Normalises halves of the batch by themselves."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        statistics = (torch.cat([t, t]) for t in (self.running_mean, self.running_var, self.weight, self.bias))
        return F.batch_norm(x.reshape(n // 2, 2 * c, h, w), *statistics, True, 0.1, self.eps).view(n, c, h, w)


class ByHand(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)


class ByTheOperator(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        statistics = self.weight, self.bias, self.running_mean, self.running_var
        return torch.batch_norm(x, *statistics, True, 0.1, self.eps, False)


def local_forwards(strategy: mirrored.Strategy) -> list[str]:
    """What is said of forwards whose statistics cannot be made global."""
    original, texts = F.batch_norm, []
    layers = in_scope(strategy, *(lambda kind=kind: kind(3).double() for kind in (Ghost, ByHand, ByTheOperator)))
    for layer in layers:
        with pytest.raises(RuntimeError) as error:
            strategy.run(lambda layer=layer: layer(random(2, 3, 2, 2)))
        texts.append(str(error.value))
        layer.eval()
        strategy.run(lambda layer=layer: layer(random(2, 3, 2, 2)))
    patched = nn.BatchNorm2d(3)
    patched.forward = patched.forward
    with pytest.raises(TypeError, match="a BatchNorm2d of 3 features with a forward that was put on the object"):
        strategy.mirror(patched, sync_batch_norm=True)
    assert F.batch_norm is original
    return texts


def test_forwards_that_normalise_in_a_way_of_their_own_are_refused() -> None:
    for texts in towers(local_forwards):
        for text, kind in zip(texts, ("Ghost", "ByHand", "ByTheOperator"), strict=True):
            assert text.startswith(f"Sync{kind}: the forward of {kind} takes the statistics of a batch in a way of its")


def what_changes(strategy: mirrored.Strategy) -> dict[str, Any]:
    def kinds(model: nn.Module) -> list[str]:
        return [type(layer).__name__ for layer in model.modules()]

    with strategy.scope(sync_batch_norm=True):
        layers = [nn.BatchNorm1d(1), nn.BatchNorm2d(1), nn.BatchNorm3d(1, affine=False, track_running_stats=False)]
        untouched = [
            quantised.BatchNorm2d(1),
            nn.InstanceNorm2d(1, affine=True),
            nn.GroupNorm(1, 1),
            nn.LayerNorm(1),
            nn.SyncBatchNorm(1),
        ]
        own = [OwnForward(1), OwnForward(1)]
        with strategy.scope():
            within = nn.BatchNorm1d(1)
        copied = copy.deepcopy(layers[1])
    with strategy.scope():
        outside = nn.BatchNorm1d(1)
    given = strategy.mirror(nn.Sequential(nn.BatchNorm1d(1), nn.ReLU()), sync_batch_norm=True)
    file = io.BytesIO()
    torch.save(layers[1], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    return {
        "layers": [kinds(layer)[0] for layer in [*layers, within, copied, loaded]],
        "given": kinds(given),
        "untouched": [type(layer) for layer in [*untouched, outside]],
        "own": [kinds(layer)[0] for layer in own],
        "still": isinstance(layers[1], nn.BatchNorm2d) and isinstance(loaded, nn.BatchNorm2d),
        "keys": list(layers[1].state_dict()),
        "copies": [
            all(
                torch.equal(a, b)
                for a, b in zip(one.state_dict().values(), layers[1].state_dict().values(), strict=True)
            )
            and one.weight is not layers[1].weight
            for one in (copied, loaded)
        ],
    }


def test_what_the_scope_changes_and_what_not() -> None:
    first, second = towers(what_changes)
    for found in (first, second):
        assert found["layers"] == [f"SyncBatchNorm{n}d" for n in (1, 2, 3, 1, 2, 2)]
        assert found["given"] == ["Sequential", "SyncBatchNorm1d", "ReLU"]
        plain = [nn.InstanceNorm2d, nn.GroupNorm, nn.LayerNorm, nn.SyncBatchNorm, nn.BatchNorm1d]
        assert found["untouched"] == [quantised.BatchNorm2d, *plain]
        assert found["own"] == ["SyncOwnForward"] * 2
        assert found["still"]
        assert found["keys"] == list(nn.BatchNorm2d(1).state_dict())
        assert found["copies"] == [True, True]


def one_tower(strategy: mirrored.Strategy) -> list[type]:
    [model] = in_scope(strategy, lambda: nn.Sequential(nn.BatchNorm1d(2)))
    return [type(layer) for layer in strategy.mirror(model, sync_batch_norm=True).modules()]


def test_one_tower_keeps_plain_layers() -> None:
    for found in [one_tower(mirrored.OneDeviceStrategy()), *towers(one_tower, count=1)]:
        assert found == [nn.Sequential, nn.BatchNorm1d]


def load_without_towers(strategy: mirrored.Strategy) -> bytes:
    file = io.BytesIO()
    torch.save(*in_scope(strategy, fresh), file)
    return file.getvalue()


def test_a_saved_layer_is_plain_where_there_are_no_towers() -> None:
    [data, _] = towers(load_without_towers)
    layer, plain = torch.load(io.BytesIO(data), weights_only=False), fresh()
    plain.load_state_dict(layer.state_dict())
    assert_close([layer(random(4, 3, 2, 2))], [plain(random(4, 3, 2, 2))], 0.0)
    assert_close(list(layer.buffers()), list(plain.buffers()), 0.0)


def meet_in_different_places(implementation: str) -> list[str]:
    """Towers that are at different layers, of different widths, or at one layer in different directions."""
    strategy = mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(implementation=implementation))
    with strategy.scope(sync_batch_norm=True):
        model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(100))
    first = strategy.is_chief
    x = torch.randn(3, 4, requires_grad=True)

    def same_width() -> None:
        model[0 if first else 1](x)

    def other_width() -> None:
        model[2 if first else 1](torch.randn(3, 100) if first else x)

    def other_direction() -> None:
        y = model[0](x)
        model[0](x) if first else y.sum().backward()

    texts = []
    for mistake in (same_width, other_width, other_direction):
        with pytest.raises(mirrored.DisagreementError) as error:
            strategy.run(mistake)
        texts.append(str(error.value))
    return texts


@pytest.mark.parametrize("implementation", ["shared_memory", "gloo"])
def test_towers_at_different_layers_are_told(implementation: str) -> None:
    first, second = mirrored.launch(meet_in_different_places, (implementation,), devices=["cpu:0", "cpu:1"], timeout=30)
    assert first == second
    for text, (mine, other) in zip(
        first,
        [
            ("forward through Sequential.0", "forward through Sequential.1"),
            ("forward through Sequential.2", "forward through Sequential.1"),
            ("forward through Sequential.0", "backward through Sequential.0"),
        ],
        strict=True,
    ):
        assert text.startswith(f"the towers do different things: tower 0 goes {mine}, tower 1 goes {other}; every")


def wrong_channels(strategy: mirrored.Strategy) -> str:
    [layer] = in_scope(strategy, fresh)
    with pytest.raises(RuntimeError) as error:
        strategy.run(lambda: layer(random(2, 4, 2, 2)))
    with pytest.raises(ValueError, match="expected 4D input"):
        strategy.run(lambda: layer(random(2, 3)))
    return str(error.value)


def test_input_that_does_not_fit_is_refused() -> None:
    assert towers(wrong_channels) == ["a BatchNorm of 3 features was given 4 channels"] * 2
