"""BatchNorm over the global batch: what it changes, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as quantised
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from tests.support.batch_norm import WithReLU1d, fresh, in_scope, own_share, random
from tests.support.jobs import SETTINGS, assert_close, failures, text_of, towers


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
        texts.append(text_of(RuntimeError, strategy.run, layer, args=(random(2, 3, 2, 2),)))
        layer.eval()
        strategy.run(layer, args=(random(2, 3, 2, 2),))
    patched = nn.BatchNorm2d(3)
    patched.forward = patched.forward
    with pytest.raises(TypeError, match="of 3 features, because a forward method was assigned to the object"):
        strategy.mirror(patched, sync_batch_norm=True)
    assert F.batch_norm is original
    return texts


def test_forwards_that_normalise_in_a_way_of_their_own_are_refused() -> None:
    for texts in towers(local_forwards):
        for text, kind in zip(texts, ("Ghost", "ByHand", "ByTheOperator"), strict=True):
            assert text.startswith(f"Sync{kind}: the forward of {kind} computes the batch statistics without")


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
        own = [WithReLU1d(1), WithReLU1d(1)]
        with strategy.scope():
            within = nn.BatchNorm1d(1)
        copied = copy.deepcopy(layers[1])
    with strategy.scope():
        outside = nn.BatchNorm1d(1)
    given = strategy.mirror(nn.Sequential(nn.BatchNorm1d(1), nn.ReLU()), sync_batch_norm=True)
    file = io.BytesIO()
    torch.save(layers[1], file)
    file.seek(0)
    assert b"mirrored" not in file.getvalue(), "it can be loaded where this package is not installed"
    loaded = torch.load(file, weights_only=False)
    for one in (copied, loaded):
        torch.testing.assert_close(one.state_dict(), layers[1].state_dict(), rtol=0, atol=0)
    return {
        "layers": [kinds(layer)[0] for layer in [*layers, within, copied, loaded]],
        "given": kinds(given),
        "untouched": [type(layer) for layer in [*untouched, outside]],
        "own": [kinds(layer)[0] for layer in own],
        "still": isinstance(layers[1], nn.BatchNorm2d) and isinstance(loaded, nn.BatchNorm2d),
        "keys": list(layers[1].state_dict()),
        "copies": [one.weight is not layers[1].weight for one in (copied, loaded)],
    }


def test_what_the_scope_changes_and_what_not() -> None:
    first, second = towers(what_changes)
    for found in (first, second):
        assert found["layers"] == [*(f"SyncBatchNorm{n}d" for n in (1, 2, 3, 1, 2)), "BatchNorm2d"]
        assert found["given"] == ["Sequential", "SyncBatchNorm1d", "ReLU"]
        plain = [nn.InstanceNorm2d, nn.GroupNorm, nn.LayerNorm, nn.SyncBatchNorm, nn.BatchNorm1d]
        assert found["untouched"] == [quantised.BatchNorm2d, *plain]
        assert found["own"] == ["SyncWithReLU1d"] * 2
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


def meet_in_different_places(strategy: mirrored.Strategy) -> list[str]:
    """Towers that are at different layers, of different widths, or at one layer in different directions."""
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

    mistakes = (same_width, other_width, other_direction)
    return [text_of(mirrored.DisagreementError, strategy.run, mistake) for mistake in mistakes]


PLACES = [
    ("forward through Sequential.0", "forward through Sequential.1"),
    ("forward through Sequential.2", "forward through Sequential.1"),
    ("forward through Sequential.0", "backward through Sequential.0"),
]


@pytest.mark.parametrize("setting", ["shared memory", "gloo"])
def test_towers_at_different_layers_are_told(setting: str) -> None:
    texts, others = towers(meet_in_different_places, settings=SETTINGS[setting])
    assert texts == others
    for text, (first, second) in zip(texts, PLACES, strict=True):
        assert text.startswith(f"the towers made different calls: tower 0 goes {first}, tower 1 goes {second}; every")


def wrong_channels(strategy: mirrored.Strategy) -> str:
    [layer] = in_scope(strategy, fresh)
    text = text_of(RuntimeError, strategy.run, lambda: layer(random(2, 4, 2, 2)))
    with pytest.raises(ValueError, match="expected 4D input"):
        strategy.run(lambda: layer(random(2, 3)))
    return text


def test_input_that_does_not_fit_is_refused() -> None:
    assert towers(wrong_channels) == ["a BatchNorm of 3 features was given 4 channels"] * 2


def _evaluate_on_the_chief(strategy: mirrored.Strategy) -> None:
    [model] = in_scope(strategy, lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    strategy.run(lambda: model(torch.ones(4, 2)).sum().backward())
    if strategy.is_chief:
        model(torch.ones(4, 2))  # without eval()
    strategy.reduce("sum", 1)


@pytest.mark.extended
def test_a_forward_of_the_chief_alone_names_the_layer() -> None:
    words = r"tower 0 is after step 1, in Sequential\.1 \(BatchNorm in training mode\), and waits for tower 1"
    assert any(re.search(words, str(error)) for error in failures(_evaluate_on_the_chief))  # others may see the loss


def _share_of_one(strategy: mirrored.Strategy) -> str:
    """A batch of three: tower 1 has one example."""
    with strategy.scope():
        model = nn.BatchNorm1d(2)
    [x] = strategy.distribute_dataset(torch.ones(3, 2), 3)
    if strategy.topology.index == 0:
        return str(len(strategy.run(model, args=(x,))))
    return text_of(ValueError, strategy.run, model, args=(x,))


def test_a_share_of_one_example_gets_a_hint() -> None:
    first, second = towers(_share_of_one)
    assert first == "2"
    assert second.startswith("Expected more than 1 value per channel")
    assert "tower 1's share of this batch has one example. With sync_batch_norm=True" in second
