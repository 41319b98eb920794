"""What ``model.fit`` of Keras costs under a strategy.

Three ratios for each case, of epochs over the same arrays, taken in turns: on several CPU towers, ``fit`` over our own
loop (``distribute_dataset``, ``run``) on the same layers written in torch; and at one tower, ``fit`` under a strategy
over Keras' own ``fit`` of a model without one, in the same process and in a program that never imports mirrored. The
two differ by where processes find their memory. At one tower, the calls of functions are counted, too.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import command
import models
import steps
import torch
from beside import Program, serve
from plain import Step

CASES = {"dense-64": (64, 64), "mlp-64": (2048, 2048, 2048)}
"""Name of a case, and the widths of its dense layers."""

BATCH = 64

BATCHES = 20


def _arrays(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples of an epoch."""
    return models.batch("mlp", BATCHES * BATCH, seed=0)


def keras_model(case: str) -> Any:
    """A compiled Keras model."""
    import keras

    layers = [keras.layers.Input((784,)), *(keras.layers.Dense(width, "relu") for width in CASES[case])]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def fit(model: Any, case: str) -> Step:
    """An epoch of ``model.fit``."""
    x, y = _arrays(case)
    return lambda: model.fit(x.numpy(), y.numpy(), batch_size=BATCH, verbose=0)


def _measure(case: str, turns: int, seconds: float) -> steps.Times:
    import mirrored
    import mirrored.keras

    strategy = mirrored.MirroredStrategy()
    several = strategy.num_replicas_in_sync > 1
    with strategy.scope():
        model = keras_model(case)
    variants: dict[str, Step] = {"fit": fit(model, case)}
    if several:
        with strategy.scope():
            plain = models.mlp((784, *CASES[case], 10))
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
        data = strategy.distribute_dataset(_arrays(case), BATCH, shuffle=True)

        def train_step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            optimizer.zero_grad()
            logits = plain(x)
            loss = mirrored.compute_average_loss(models.per_example_loss(logits, y))
            loss.backward()
            optimizer.step()
            return loss.detach(), (logits.argmax(1) == y).sum()

        def epoch() -> Any:
            return strategy.reduce("sum", [strategy.run(train_step, args=batch) for batch in data][-1])

        variants["loop"] = epoch
    else:
        variants["keras"] = fit(keras_model(case), case)
        variants["program"] = Program(__file__, case, torch.get_num_threads())
    times = steps.alternate(variants, turns, seconds)
    if not several:
        times |= {f"calls of {name}": [_calls(variants[name])] for name in ("fit", "keras")}
    return times


def _calls(step: Step) -> float:
    """The calls of functions, also of those in C, by Python in a batch. They are repeatable, as times are not."""
    count = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        step()
    finally:
        sys.setprofile(before)
    return count / BATCHES


def main(arguments: Sequence[str]) -> None:
    import mirrored

    options = command.parser("fit", __doc__, turns=15, seconds=1.0, cases=CASES).parse_args(arguments)
    steps.print_head(f"an epoch of {BATCHES} batches; medians of {options.turns} alternations")
    for case in options.cases:
        timing = case, options.turns, options.seconds
        times = mirrored.launch(_measure, timing, devices=command.cpus(options.towers))[0]
        steps.print_row(f"{case}: fit ÷ a loop of ours, {options.towers} towers", times["fit"], times["loop"])
        times = mirrored.launch(_measure, timing, devices=["cpu:0"])[0]
        steps.print_row(f"{case}: fit ÷ Keras' own, one tower", times["fit"], times["keras"])
        steps.print_row(f"{case}: the same in another program", times["fit"], times["program"])
        ([ours], [other]) = times["calls of fit"], times["calls of keras"]
        print(f"{f'{case}: calls of Python in a batch':<44}{ours:>9.0f}{other:>9.0f}{ours / other:>9.3f}")


def _serve() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    step = fit(keras_model(sys.argv[1]), sys.argv[1])
    gc.freeze()  # as in launched towers
    serve(step)


if __name__ == "__main__":
    _serve()
