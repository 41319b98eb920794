"""The models of the step benchmark, with a batch for each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm and a shortcut (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for 32×32 images, ``width`` channels in its first stage."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        inputs = width
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            blocks += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Transformer(nn.Module):
    """A 6-layer encoder of width 256 over 4,096 tokens, 64 positions, without dropout."""

    def __init__(self, vocabulary: int = 4096, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)))


def mlp(widths: Sequence[int] = (784, 2048, 2048, 2048, 10)) -> nn.Module:
    """Dense layers; 784-2048-2048-2048-10 have 10 million parameters."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


CASES = {"mlp-64": 64, "resnet-8": 8, "resnet-64": 64, "transformer-2": 2, "transformer-16": 16}
"""Name of a case and its global batch size."""

ONLY_NAMED = {"deep-64": 64, "even-64": 64, "many-8": 8, "resnet-2048": 2048, "transformer-512": 512}
"""Cases that are measured where they are named: 40 million parameters, 8 million in equal layers, 400 small tensors,
and batches that keep a GPU busy."""

CASES |= ONLY_NAMED


def make(case: str) -> nn.Module:
    """The model of a case."""
    if case.startswith("deep"):
        return mlp((784, *[2048] * 10, 10))
    if case.startswith("even"):
        return mlp((784, *[1024] * 8, 10))
    if case.startswith("many"):
        return mlp((784, *[64] * 199, 10))
    return {"mlp": mlp, "resnet": ResNet18, "transformer": Transformer}[case.split("-")[0]]()


def units(case: str) -> list[type[nn.Module]]:
    """The classes of the layers that are sharded one at a time; a small model is sharded as a whole."""
    kinds = {"resnet": [ResidualBlock], "transformer": [nn.TransformerEncoderLayer], "deep": [nn.Linear]}
    return kinds.get(case.split("-")[0], [])


def batch(case: str, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random inputs and targets for ``size`` examples of a case."""
    g = torch.Generator().manual_seed(seed)
    if case.startswith(("mlp", "deep", "even", "many")):
        return torch.randn(size, 784, generator=g), torch.randint(0, 10, (size,), generator=g)
    if case.startswith("resnet"):
        return torch.randn(size, 3, 32, 32, generator=g), torch.randint(0, 10, (size,), generator=g)
    tokens = torch.randint(0, 4096, (2, size, 64), generator=g)
    return tokens[0], tokens[1]


def per_example_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each example (for sequences the mean over their positions)."""
    if output.dim() == 3:
        return F.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)
    return F.cross_entropy(output, target, reduction="none")
