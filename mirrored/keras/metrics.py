"""Metrics: each tower counts its own examples, and the towers' counts are combined when they are read.

The ``aggregation`` of a metric's variables defines how values of several towers are combined. ``"sum"`` is Keras'
default. ``"mean"`` is the mean over the examples. ``"only_first_replica"`` is tower 0's value. Values from before the
towers started to count, such as the zeros of ``reset_state``, count once. A scalar for ``Mean`` or ``Sum``, such as a
batch's loss, is a mean of this tower's examples. So it is weighted by the share's fraction of the batch.

[Note: tower 0's value is that of all] A variable of ``"only_first_replica"`` describes the global batch only if
``update_state`` gathers the examples of all towers. Then the towers' values are equal, except that a tower that
computed on a stand-in has an older value. The values of the other towers are compared when they are combined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import torch
from torch import Tensor

from mirrored.context import current_replica
from mirrored.keras.keras_private import around, metrics_of_default_steps, reduction_metrics
from mirrored.keras.probes import probe_first_update
from mirrored.keras.steps import Step, current
from mirrored.shares import Share
from towers.collectives.communicator import Communicator
from towers.collectives.values import all_reduce_together

Logs = dict[str, Any]


@around(reduction_metrics, "reduce_to_samplewise_values")
def _reduce_to_samplewise_values(original: Any, values: Any, sample_weight: Any, reduce_fn: Any, dtype: Any) -> Any:
    values, sample_weight = original(values, sample_weight, reduce_fn, dtype)
    step = current()
    if step is not None and sample_weight is None and not values.shape:
        sample_weight = keras.ops.cast(step.fraction, values.dtype)
        values = values * sample_weight
    return values, sample_weight


@around(keras.Metric, "add_variable")
def _add_variable(original: Any, metric: Any, *args: Any, **kwargs: Any) -> Any:
    variable = original(metric, *args, **kwargs)
    variable.name_of_metric = metric.name
    return variable


@around(keras.Variable, "assign")
def _assign(original: Any, variable: Any, value: Any) -> Any:
    """Refuses updates of a metric whose counts no tower would combine."""
    name, replica, step = getattr(variable, "name_of_metric", None), current_replica(), current()
    if name is None or replica is None:
        return original(variable, value)
    if step is not None and not step.combines(variable):
        raise RuntimeError(
            f"the metric {name!r} was updated in a step of a Keras model, but model.metrics does not list it, so "
            "result() would be that of one tower's examples. Make it an attribute of the model; if the model "
            "overrides the property metrics, list it there"
        )
    if step is None and replica.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"the metric {name!r} of Keras was updated inside strategy.run(...) of a custom training loop, where each "
            "tower counts only its own examples and result() would be that of one tower. Return sums and counts from "
            'the step and reduce them (strategy.reduce("sum", (correct, count))), use strategy.mirror(metric) with a '
            "metric of torchmetrics, or pass the metric to model.compile and call model.evaluate"
        )
    return original(variable, value)


class Metrics:
    """The metrics of one model on several towers.

    ``_base`` contains each variable with its value when the towers started to count separately.

    Args:
        model: the model. Its metrics may change at any time.
    """

    def __init__(self, model: Any, comm: Communicator) -> None:
        self._model = model
        self._comm = comm
        self._base: dict[int, tuple[Any, Tensor]] = {}
        self._examples = 0
        self._in_each_step = True  # whether this tower has counted in each step (stand-ins do not count)
        self._counting = False
        self._checked: set[int] = set()

    def begin(self) -> None:
        """Starts a step, which may count."""
        if self._counting:
            return
        self._counting = True
        for metric in self._model.metrics:
            if id(metric) not in self._checked:
                check(metric)
                self._checked.add(id(metric))
        self._base = {id(each): (each, each.value.clone()) for each in variables_of_metrics(self._model)}

    def have(self, variable: Any) -> bool:
        """Returns whether a variable belongs to one of the model's metrics.

        Those that Keras' own steps update count, too: if ``model.metrics`` omits them, no log contains them.
        """
        if id(variable) in self._base:
            return True
        hidden = (own for metric in metrics_of_default_steps(self._model) for own in metric.variables)
        return any(variable is own for own in (*variables_of_metrics(self._model), *hidden))

    def count(self, share: Share) -> None:
        """Ends a step with a share."""
        self._examples += share.local
        self._in_each_step = self._in_each_step and share.local > 0

    def state(self) -> list[tuple[Tensor, Tensor]]:
        """Returns each variable's tensor, and a copy of it."""
        return [(variable.value, variable.value.clone()) for variable in variables_of_metrics(self._model)]

    def forget(self) -> None:
        """Forgets this tower's counts after all towers have set the metrics to the same state."""
        self._counting, self._base, self._examples, self._in_each_step = False, {}, 0, True

    @torch.no_grad()
    def reduce(self, logs: Mapping[str, Any], step: Step) -> Logs:
        """Combines the counts of all towers, on every tower. The towers continue from there. All towers must call it.

        Args:
            logs: the result of this tower's last step.
            step: that step.

        Returns:
            The ``logs`` of the global batches. For a metric, it is the result for all examples so far. For another
            number, it is the mean over the last step's examples.

        Raises:
            TypeError: on all towers; see [Note: tower 0's value is that of all].
        """
        local, share = results(self._model), step.share
        keys = [key for key, value in logs.items() if _is_scalar(value) or key in local]
        device = self._comm.device
        is_result = [float(not share.local or _same(logs[key], local.get(key))) for key in keys]
        numbers = [float(logs[key]) * step.fraction if share.local and _is_scalar(logs[key]) else 0.0 for key in keys]
        variables = variables_of_metrics(self._model)
        own = [
            torch.tensor([float(self._examples), *is_result, *numbers], dtype=torch.float64, device=device),
            self._row(torch.tensor(float(self._in_each_step), dtype=torch.float64, device=device)),
            *(self._contribution(variable).double() for variable in variables),
        ]
        with self._comm.health.at("the metrics of a Keras model"):
            head, counted, *sums = all_reduce_together(self._comm, "sum", own)
        examples, *sums_of_logs = head.tolist()
        towers = counted.nonzero().flatten().tolist()
        for variable, total in zip(variables, sums, strict=True):
            self._set(variable, total, examples, towers)
        self.forget()
        combined, result = results(self._model), dict(logs)
        for position, key in enumerate(keys):
            if sums_of_logs[position] == self._comm.size:
                result[key] = combined.get(key, logs[key])
            elif _is_scalar(logs[key]):
                result[key] = sums_of_logs[len(keys) + position]
        return result

    def _contribution(self, variable: Any) -> Tensor:
        value: Tensor = variable.value.detach()
        if variable.aggregation == "mean":
            return value * self._examples
        if variable.aggregation == "only_first_replica":
            return self._row(value)
        base = self._base.get(id(variable))  # None: it was created in a step, from zeros
        return value - base[1] if base is not None else value

    def _row(self, value: Tensor) -> Tensor:
        """Returns a tensor with a row per tower, with ``value`` in this tower's row and zeros elsewhere.

        The sum over towers contains the values of all towers.
        """
        rows = value.new_zeros(self._comm.size, *value.shape)
        rows[self._comm.index] = value
        return rows

    def _set(self, variable: Any, total: Tensor, examples: float, towers: list[int]) -> None:
        value = variable.value
        if variable.aggregation == "mean":
            if not examples:
                return
            total = total / examples
        elif variable.aggregation == "only_first_replica":
            _check_equal(variable, total[towers])
            total = total[0]
        elif variable.aggregation == "sum" and (base := self._base.get(id(variable))) is not None:
            total = total + base[1].detach().double()
        value.copy_(total)


def variables_of_metrics(model: Any) -> list[Any]:
    """Returns the variables of a model's metrics."""
    return list({id(v): v for metric in model.metrics for v in metric.variables}.values())


def results(model: Any) -> Logs:
    """Returns the current results of a model's metrics by name, in both forms that a ``train_step`` may return."""
    nested: Logs = {metric.name: metric.result() for metric in model.metrics}
    nested.update(model.get_metrics_result())
    return nested


def _check_equal(variable: Any, values: Tensor) -> None:
    """Checks that the towers' values are equal, except for rounding differences between processors.

    See [Note: tower 0's value is that of all].
    """
    if not torch.allclose(values, values[:1].expand_as(values), rtol=1e-6, atol=0.0, equal_nan=True):
        raise TypeError(
            f"the metric variable {variable.path!r} has aggregation='only_first_replica', which takes tower 0's "
            "value for that of all towers, but the towers' values differ, because each has counted its own "
            "examples: let update_state gather the examples of all towers (y_pred = strategy.gather(y_pred))"
        )


def check(metric: Any) -> None:
    """Checks that a metric's values of several towers can be combined.

    Raises:
        TypeError: they cannot be combined.
    """
    for each in getattr(metric, "metrics", None) or [metric]:
        if not each.variables and type(each).__module__.partition(".")[0] != "keras":
            raise TypeError(
                f"the metric {each.name!r} ({type(each).__name__}) has no variables, so the towers' counts "
                "cannot be combined: keep its state in variables of self.add_variable(...), with the "
                "aggregation that combines them ('sum' or 'mean')"
            )
        for variable in each.variables:
            if variable.aggregation == "none":
                raise TypeError(
                    f"the variable {variable.path!r} of the metric {each.name!r} has aggregation='none', so the "
                    "towers' counts cannot be combined: create it with self.add_variable(..., "
                    "aggregation='sum'), 'mean' or 'only_first_replica'"
                )
        probe_first_update(each)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _same(value: Any, result: Any) -> bool:
    """Returns whether a value of the logs is a metric's result."""
    if isinstance(value, Mapping) or isinstance(result, Mapping):
        return isinstance(value, Mapping) and isinstance(result, Mapping)
    if result is None or not (_is_scalar(value) and _is_scalar(result)):
        return isinstance(value, Tensor) and isinstance(result, Tensor) and value.shape == result.shape
    one, other = float(value), float(result)
    return one == other or (one != one and other != other)
