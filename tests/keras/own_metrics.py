"""Metrics as scripts write them: some add up over towers, and some do not."""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
from keras import ops

import mirrored


class Quotient(keras.metrics.Metric):
    """Two sums, and a number of examples that is a mean of its own."""

    def __init__(self) -> None:
        super().__init__(name="quotient")
        self.above = self.add_variable((), "zeros", name="above")
        self.below = self.add_variable((), "ones", name="below")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.above.assign(self.above + ops.sum(p[:, 0]))
        self.below.assign(self.below + ops.sum(p[:, 1] ** 2))

    def result(self) -> Any:
        return {"of all": self.above / self.below, "square": (self.above / self.below) ** 2}


class Gathered(keras.metrics.Metric):
    """The largest and the last number of all towers' examples."""

    def __init__(self, strategy: mirrored.Strategy) -> None:
        super().__init__(name="gathered")
        self.strategy = strategy
        self.largest = self.add_variable((), "zeros", aggregation="only_first_replica", name="largest")
        self.last = self.add_variable((), "zeros", aggregation="only_first_replica", name="last")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        p = self.strategy.gather(p.detach())
        self.largest.assign(ops.maximum(self.largest, ops.max(p)))
        self.last.assign(p[-1, 0])

    def result(self) -> Any:
        return self.largest + 10 * self.last


class Mixed(keras.metrics.Metric):
    """The largest number of all towers' examples, as a multiple of a mean that is counted apart."""

    def __init__(self, strategy: mirrored.Strategy) -> None:
        super().__init__(name="mixed")
        self.strategy = strategy
        self.largest = self.add_variable((), "zeros", aggregation="only_first_replica", name="largest")
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.largest.assign(ops.maximum(self.largest, ops.max(self.strategy.gather(p.detach()))))
        self.total.assign(self.total + ops.sum(p))
        self.count.assign(self.count + len(p))

    def result(self) -> Any:
        return self.largest / (self.total / self.count)


def mean_of_the_batch(y: Any, p: Any) -> Any:
    return ops.mean(ops.max(p, axis=1))


class Extreme(keras.metrics.Metric):
    """A maximum, or the last value, of the towers' own examples."""

    def __init__(self, aggregation: str = "sum", last: bool = False) -> None:
        super().__init__(name="extreme")
        self.last = last
        self.value = self.add_variable((), "zeros", aggregation=aggregation, name="value")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.value.assign(p[-1, 0] if self.last else ops.maximum(self.value, ops.max(p)))

    def result(self) -> Any:
        return self.value
