"""BatchNorm over the global batch: N towers, with uneven and empty shares, compute what one device computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import mirrored
from tests.support import batch_norm_kernels
from tests.support.batch_norm import fresh, in_scope, own_share, random
from tests.support.jobs import assert_close, parameters_of, towers
from tests.support.steps import averaging_step

SHARES = {1: [11], 2: [7, 4], 3: [5, 0, 6], 5: [1, 1, 1, 1, 0]}
"""How many examples each tower has, by the number of towers."""


Values = dict[str, list[Tensor]]


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


def every_kind(strategy: mirrored.Strategy, sizes: list[int], kinds: list[Any] = LAYERS) -> list[Values]:
    layers = in_scope(strategy, *(make for make, _ in kinds))
    wholes = [random(sum(sizes), *shape) for _, shape in kinds]
    return [use(strategy, layer, whole, sizes) for layer, whole in zip(layers, wholes, strict=True)]


@pytest.mark.parametrize("count", SHARES)
def test_layers_equal_the_single_device(count: int) -> None:
    sizes = SHARES[count]
    alone = every_kind(mirrored.OneDeviceStrategy(), [sum(sizes)])
    for results, expected in zip(zip(*towers(every_kind, sizes, count=count), strict=True), alone, strict=True):
        compare(list(results), expected, sizes)


def with_bias_only() -> nn.Module:
    """As Keras' layers may be."""
    norm = nn.BatchNorm1d(3).double()
    norm.weight = None
    return norm


PENALTY = (lambda: Around(gradient_penalty)), (3, 4, 5)


def with_torchs_kernels(strategy: mirrored.Strategy, sizes: list[int]) -> list[Values]:
    if strategy.num_replicas_in_sync > 1:
        batch_norm_kernels.use()
    return every_kind(strategy, sizes, [*LAYERS, (with_bias_only, (3, 4)), PENALTY])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_layers_equal_the_single_device_with_torchs_kernels(count: int) -> None:
    """What runs on CUDA."""
    sizes = SHARES[count]
    alone = with_torchs_kernels(mirrored.OneDeviceStrategy(), [sum(sizes)])
    results = towers(with_torchs_kernels, sizes, count=count)
    for values, expected in zip(zip(*results, strict=True), alone, strict=True):
        compare(list(values), expected, sizes)


class Around(nn.Module):
    """Calls a function with a layer, and the input."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Any], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.call = norm or fresh(), call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.norm, x)


def checkpointed(norm: nn.Module, x: Tensor) -> Any:
    return checkpoint(norm, x, use_reentrant=False)


def several_forwards(norm: nn.Module, x: Tensor) -> Tensor:
    """Before the backward, one of them without gradients."""
    with torch.no_grad():
        norm(x * x)
    return norm(x) * norm(x.exp())


def gradient_penalty(norm: nn.Module, x: Tensor) -> Tensor:
    """The gradient of the output with respect to the input is part of the output: second derivatives."""
    y = norm(x).pow(3)
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


def turned_off() -> nn.Module:
    """Torch's forward gives ``F.batch_norm`` none of the buffers then."""
    layer = fresh(affine=False)
    layer.track_running_stats = False
    return layer


VARIANTS: dict[str, Callable[[], nn.Module]] = {
    "cumulative": lambda: fresh(momentum=None),
    "momentum 0": lambda: fresh(momentum=0.0),
    "not affine": lambda: fresh(affine=False),
    "no running statistics": lambda: fresh(track_running_stats=False),
    "statistics turned off later": turned_off,
    "frozen": lambda: frozen("weight", "bias"),
    "frozen bias": lambda: frozen("bias"),
    "large eps": lambda: fresh(eps=2.0),
    "lazy": lambda: nn.LazyBatchNorm2d(dtype=torch.float64),
    "two layers": lambda: nn.Sequential(fresh(), nn.Tanh(), fresh()),
    "checkpoint": lambda: Around(checkpointed),
    "reentrant checkpoint": lambda: Around(lambda norm, x: checkpoint(norm, x, use_reentrant=True)),
    "several forwards": lambda: Around(several_forwards),
    "gradient penalty": lambda: Around(gradient_penalty),
    "subclass": Plainer,
    "with activation": WithActivation,
    "with activation, cumulative": lambda: WithActivation(momentum=None),
    "with activation, without statistics": lambda: WithActivation(track_running_stats=False, affine=False),
    "by super": BySuper,
    "by the class": ByTheClass,
    "always frozen": lambda: AlwaysFrozen(3, dtype=torch.float64),
    "lazy with a forward": lambda: LazyCut(dtype=torch.float64),
    "checkpoint with activation": lambda: Around(checkpointed, WithActivation()),
    "deepcopy": lambda: nn.Sequential(*(copy.deepcopy(layer) for layer in [fresh()] * 2)),
    "compiled": lambda: torch.compile(nn.Sequential(fresh(), nn.Tanh()), backend="eager"),
}


def every_variant(strategy: mirrored.Strategy, sizes: list[int]) -> dict[str, Values]:
    whole = random(sum(sizes), 3, 2, 2) / 4
    models = zip(VARIANTS, in_scope(strategy, *VARIANTS.values()), strict=True)
    return {name: use(strategy, model, whole, sizes) for name, model in models}


@pytest.mark.extended
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


def small_net() -> nn.Sequential:
    first = [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    second = [nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.Linear(5, 3)).double()


def train_small_net(strategy: mirrored.Strategy, freeze: bool = False) -> Values:
    torch.manual_seed(0)
    with strategy.scope(sync_batch_norm=True):
        model = small_net()
    if freeze:
        model[0].requires_grad_(False)
    model.eval()
    model(torch.ones(1, 2, 6, 6, dtype=torch.float64))  # gives lazy modules their shapes
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # The last batch has 4 examples.
    step = averaging_step(model, optimizer)
    for batch in strategy.distribute_dataset(TensorDataset(random(48, 2, 6, 6), torch.arange(48) % 3), 11):
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
