"""A right script for ``mirrored verify``, of whose parts any can be another."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from mirrored.verification import Cause

TEMPLATE = """\
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mirrored

{before}
strategy = {strategy}
with {scope}:
    model = {model}
    optimizer = {optimizer}
inputs, targets = torch.randn({examples}, 5), torch.randint(0, 3, ({examples},))
data = {data}
train = {train}
{after}


def train_step({parameters}):
    {begin}
    loss = {loss}
    {update}


for epoch in range({epochs}):
    for step, batch in enumerate(train):
        {run}
    {evaluation}
{end}
"""
"""In braces are parts of a :class:`Script`, whose lines are all indented as the first one is."""

ADAM = "torch.optim.Adam(model.parameters(), lr=0.01)"
SGD = "torch.optim.SGD(model.parameters(), lr={})"
LOSSES = 'F.cross_entropy(model(x), y, reduction="none")'
SUM = 'F.cross_entropy(model(x), y, reduction="sum")'
AVERAGE = "mirrored.compute_average_loss({})"
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.05)"


@dataclasses.dataclass(frozen=True)
class Script:
    """The parts of a script, and what verify is to say of it.

    Attributes:
        causes: none where the script is right.
        words: what verify also says.
        steps: how many are compared.
        exact: whether bits are.
    """

    before: str = ""
    strategy: str = "mirrored.MirroredStrategy()"
    scope: str = "strategy.scope()"
    model: str = "nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))"
    optimizer: str = SGD.format(0.1)
    examples: int = 24
    data: str = "TensorDataset(inputs, targets)"
    train: str = "strategy.distribute_dataset(data, 8, shuffle=True)"
    after: str = ""
    parameters: str = "x, y"
    begin: str = "optimizer.zero_grad()"
    loss: str = AVERAGE.format(LOSSES)
    update: str = "loss.backward()\noptimizer.step()\nreturn loss.detach()"
    epochs: str = "3"
    run: str = "loss = strategy.run(train_step, args=batch)"
    evaluation: str = ""
    end: str = ""
    causes: tuple[Cause, ...] = ()
    words: str = ""
    steps: int = 5
    exact: bool = False

    def but(self, *causes: Cause, **parts: Any) -> Script:
        """A script with other parts, of which verify is to name these causes, or the same ones."""
        return dataclasses.replace(self, causes=causes or self.causes, **parts)

    def text(self) -> str:
        """The whole script."""
        lines = []
        for line in TEMPLATE.splitlines():
            code = line.lstrip(" ")
            lines.append(textwrap.indent(code.format(**vars(self)), " " * (len(line) - len(code))))
        return "\n".join(lines) + "\n"
