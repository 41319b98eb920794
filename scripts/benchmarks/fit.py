"""What ``model.fit`` of Keras costs under a strategy.

Three ratios for each case, of epochs over the same arrays, taken in turns: on several CPU towers, ``fit`` over our own
loop (``distribute_dataset``, ``run``) on the same layers written in torch; and at one tower, ``fit`` under a strategy
over Keras' own ``fit`` of a model without one, in the same process and in a program that never imports mirrored. The
two differ by where processes find their memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import models
import steps
import torch
from beside import Program, serve
from plain import Step
from torch import nn

CASES = {"dense-64": ([64, 64], 64), "mlp-64": ([2048, 2048, 2048], 64)}
"""Name of a case, the widths of its dense layers, and its global batch size."""

BATCHES = 20


def _arrays(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples of an epoch."""
    return models.batch("mlp", BATCHES * CASES[case][1], seed=0)


def keras_model(case: str) -> Any:
    """A compiled Keras model."""
    import keras

    widths, _ = CASES[case]
    layers = [keras.layers.Input((784,)), *(keras.layers.Dense(width, "relu") for width in widths)]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def fit(model: Any, case: str) -> Step:
    """An epoch of ``model.fit``."""
    x, y = _arrays(case)
    return lambda: model.fit(x.numpy(), y.numpy(), batch_size=CASES[case][1], verbose=0)


def _torch_model(case: str) -> nn.Module:
    layers: list[nn.Module] = []
    before = 784
    for width in CASES[case][0]:
        layers += [nn.Linear(before, width), nn.ReLU()]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, 10))


def _measure(case: str, turns: int, seconds: float) -> steps.Times:
    import mirrored
    import mirrored.keras

    strategy = mirrored.MirroredStrategy()
    several = strategy.num_replicas_in_sync > 1
    with strategy.scope():
        model = keras_model(case)
    found: dict[str, Step] = {"fit": fit(model, case)}
    if several:
        with strategy.scope():
            plain = _torch_model(case)
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
        data = strategy.distribute_dataset(_arrays(case), CASES[case][1], shuffle=True)

        def train_step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            optimizer.zero_grad()
            logits = plain(x)
            loss = mirrored.compute_average_loss(models.per_example_loss(logits, y))
            loss.backward()
            optimizer.step()
            return loss.detach(), (logits.argmax(1) == y).sum()

        def epoch() -> Any:
            return strategy.reduce("sum", [strategy.run(train_step, args=batch) for batch in data][-1])

        found["loop"] = epoch
    else:
        found["keras"] = fit(keras_model(case), case)
        found["program"] = Program(__file__, case, torch.get_num_threads())
    return steps.alternate(found, turns, seconds, together=several)


def main(arguments: Sequence[str]) -> None:
    import mirrored

    parser = argparse.ArgumentParser(prog="scripts/bench fit", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated: " + ", ".join(CASES))
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15, help="alternations")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one variant's turn")
    options = parser.parse_args(arguments)
    print(f"torch {torch.version.__version__}; an epoch of {BATCHES} batches; medians of {options.turns} alternations")
    print(f"{'':<44}{'ms':>9}{'other':>9}{'ratio':>9}{'25 %':>9}{'75 %':>8}")
    for case in options.cases.split(","):
        timing = case, options.turns, options.seconds
        times = mirrored.launch(_measure, timing, devices=[f"cpu:{i}" for i in range(options.towers)])[0]
        print(steps.row(f"{case}: fit ÷ a loop of ours, {options.towers} towers", times["fit"], times["loop"]))
        times = mirrored.launch(_measure, timing, devices=["cpu:0"])[0]
        print(steps.row(f"{case}: fit ÷ Keras' own, one tower", times["fit"], times["keras"]))
        print(steps.row(f"{case}: the same in another program", times["fit"], times["program"]), flush=True)


def _serve() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    step = fit(keras_model(sys.argv[1]), sys.argv[1])
    gc.freeze()  # as in launched towers
    serve(step)


if __name__ == "__main__":
    _serve()
