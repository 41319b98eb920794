"""Metrics of torchmetrics on shares that can be empty.

torchmetrics adds up the states of its metrics over the ranks of torch.distributed when they are computed. So every
example counts once if shares do not overlap. Empty shares cause three problems:

1. Many metrics cannot be updated with them.
2. A metric that stores examples but has none gathers a state of another shape and dtype than the other towers (Gloo
   then aborts the process).
3. Lists whose entries are gathered one by one have different lengths, so that entries of different states are mixed.

torchmetrics has interfaces for the first two, ``update`` and ``dist_sync_fn``.

[Note: values that depend on the split] Some metrics of torchmetrics 1.9 have a value that depends on how examples are
split into updates, also on one device. They are refused where it would differ. ``BootStrapper`` draws random numbers.

[Note: lists are gathered at once] The third problem is fixed in ``_sync_dist``, which calls ``dist_sync_fn`` for every
entry of a list. That name is private to torchmetrics, but ``dist_sync_fn`` cannot find out which state an entry belongs
to.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mirrored.context import current_strategy
from mirrored.empty_shares import is_stand_in
from towers.collectives import values
from towers.collectives.agreement import Announcement, announce, announce_with_body
from towers.collectives.communicator import Communicator, as_bytes
from towers.system import tree as trees


def prepare(module: nn.Module, comm: Communicator) -> None:
    """Makes the metrics in ``module``, which may itself be a metric, accept empty shares and stand-ins."""
    for _, updated in _metrics_in(module, "Metric", "MetricCollection"):
        if getattr(updated.update, "func", None) is not _update:
            updated.update = functools.partial(_update, updated.update, updated)
    for path, metric in _metrics_in(module):
        if _is_a(metric, "NormalizedRootMeanSquaredError"):
            raise ValueError(
                "torchmetrics does not combine the statistics of NormalizedRootMeanSquaredError correctly over several "
                "processes: divide the value of MeanSquaredError(squared=False) by the value that normalises it"
            )
        if not isinstance(metric.dist_sync_fn, GatherStates):
            metric.dist_sync_fn = GatherStates(comm, " ".join(filter(None, (type(metric).__name__, path))))
            metric._sync_dist = functools.partial(_sync_dist, metric)
            if not metric.dist_sync_on_step:  # otherwise, the forward is a collective
                metric.forward = functools.partial(_forward, metric)


def _metrics_in(module: nn.Module, *kinds: str) -> Iterator[tuple[str, Any]]:
    """Yields the metrics in a module, or its objects of other ``kinds`` of torchmetrics, with their paths."""
    for path, layer in module.named_modules() if "torchmetrics" in sys.modules else ():
        if _is_a(layer, *(kinds or ("Metric",))):
            yield path, layer


def _is_a(layer: object, *kinds: str) -> bool:
    """Returns whether an object is of one of these classes of torchmetrics."""
    wanted = {f"torchmetrics.{kind}" for kind in kinds}
    return any(f"{base.__module__.split('.')[0]}.{base.__name__}" in wanted for base in type(layer).__mro__)


def states_of(module: nn.Module) -> dict[str, Any]:
    """Returns the states of the metrics in ``module``, by path. torchmetrics leaves them out of ``state_dict()``."""
    return {
        path: {"state": dict(metric.metric_state), "updates": metric._update_count}
        for path, metric in _metrics_in(module)
    }


def problem_of(module: nn.Module, states: Any) -> str | None:
    """Returns why ``states`` cannot be a result of :func:`states_of` for ``module``, or None if it can."""
    if not isinstance(states, Mapping):
        return "its metrics were saved in a form that is not a dict"
    metrics = dict(_metrics_in(module))
    for path, saved in states.items():
        if (metric := metrics.get(path)) is None:
            return f"{path!r} is a metric in the checkpoint, but not in this program"
        if not isinstance(saved, Mapping) or not isinstance(saved.get("state"), Mapping):
            return f"the metric {path!r} was saved in a form that is not a dict"
        updates = saved.get("updates")
        if isinstance(updates, bool) or not isinstance(updates, int) or updates < 0:
            return f"the metric {path!r} is saved after {updates!r} updates"
        for name, value in saved["state"].items():
            if name not in metric._defaults:
                return f"the metric {path!r} has no state {name!r}"
            kinds = (list, Tensor) if isinstance(metric._defaults[name], list) else (int, float, Tensor)
            if not isinstance(value, kinds):
                return f"the state {name!r} of the metric {path!r} is saved as a {type(value).__name__}"
    return None


def set_states_of(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Sets the states of the metrics in ``module`` to ``states``, which :func:`problem_of` has checked."""
    for path, saved in states.items():
        metric: Any = module.get_submodule(path)
        for name, value in saved["state"].items():
            setattr(metric, name, trees.map_leaves(functools.partial(_on, metric.device), value))
        metric._update_count, metric._computed = saved["updates"], None


def _on(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _has_no_examples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a metric's arguments are an empty share or a stand-in."""
    sizes = [len(leaf) for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes:  # strings, detections
        sizes = [len(value) for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    if sizes and not any(sizes):
        return True
    strategy = current_strategy()
    entries = sizes[0] if sizes else None
    return strategy is not None and is_stand_in(strategy, (args, kwargs), entries, "the values given to a metric")


_COUNTING = ("Running", "MinMaxMetric")


def _update(update: Callable[..., Any], metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the ``update`` of a metric or collection. Without examples it does nothing, except for wrappers.

    ``Running`` keeps the last updates, one of which may be that of an empty share, and ``MinMaxMetric`` leaves the
    examples to another metric. They are updated in any case. In a collection, the others are not: from the first
    update, it infers which of them have equal states.

    Raises:
        ValueError: see [Note: values that depend on the split].
    """
    if not _is_a(metric, *_COUNTING) and _has_no_examples(args, kwargs):
        for own in metric.values(copy_state=False) if _is_a(metric, "MetricCollection") else ():
            if _is_a(own, *_COUNTING):
                own.update(*args, **kwargs)
        return None
    if _is_a(metric, "BinaryFairness", "BinaryGroupStatRates", "MultilabelRankingLoss"):
        _check_split(metric, *args, **kwargs)
    return update(*args, **kwargs)


def _check_split(metric: Any, preds: Any, target: Any, groups: Any = None) -> None:
    """Checks that the value of a metric does not depend on the examples that are in the same update."""
    if groups is not None:
        problem = "an example of each group" if len(torch.unique(groups)) < metric.num_groups else None
    else:
        relevant = target.eq(1).sum(1)
        mixed = (relevant > 0) & (relevant < target.shape[1])
        problem = None if mixed.any() else "an example that has some of the labels, but not all"
    if problem is not None:
        name = type(metric).__name__
        raise ValueError(
            f"the value of {name} depends on how its examples are split into updates, unless each update contains "
            f"{problem}. This tower's share does not: pass strategy.gather(...) of the arguments to "
            f"{name}(sync_on_compute=False)"
        )


def _forward(metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a metric's ``forward``. Without examples, it returns NaN and leaves the metric unchanged.

    Some wrappers compute in ``forward``, which is a collective of the metrics in them.
    """
    if not _is_a(metric, *_COUNTING, "BootStrapper") and _has_no_examples(args, kwargs):
        return torch.full((), torch.nan, device=metric.device)
    try:
        return type(metric).forward(metric, *args, **kwargs)
    except Exception as error:
        name = type(metric).__name__
        error.add_note(f"mirrored: {name}(...) computes the value of this tower's share. {name}.update(...) does not")
        raise


def _sync_dist(metric: Any, dist_sync_fn: Any = None, process_group: object = None) -> None:
    """Replaces a metric's ``_sync_dist``, and gathers lists whose lengths differ because of empty shares.

    See [Note: lists are gathered at once]. Lists of tensors that are not to be concatenated (``dist_reduce_fx`` is None
    or a custom function) are gathered at once, with all entries. The result contains the first entries of all towers in
    tower order, then the second entries, and so on. torchmetrics does the same with lists of equal length. The rows of
    concatenated lists have this order, too, which is that of the examples if each update adds one entry.

    Raises:
        DisagreementError: on all towers: they make different calls.
    """
    from torchmetrics.utilities.data import dim_zero_cat

    uncatenated = {
        name: value
        for name, value in metric.metric_state.items()
        if isinstance(value, list) and metric._reductions[name] is not dim_zero_cat
    }
    lists = {name: value for name, value in metric.metric_state.items() if isinstance(value, list)}
    lengths = {name: [_rows(entry) for entry in value] for name, value in lists.items() if name not in uncatenated}
    gathered, orders = {}, dict[str, Tensor]()
    if isinstance(dist_sync_fn, GatherStates):
        gathered = dist_sync_fn.gather_lists(uncatenated, metric.device) if uncatenated else {}
        orders = dist_sync_fn.orders(lengths) if lengths else {}
    for name in gathered:
        setattr(metric, name, [])
    type(metric)._sync_dist(metric, dist_sync_fn, process_group=process_group)
    for name, entries in gathered.items():
        reduce = metric._reductions[name]
        setattr(metric, name, entries if reduce is None or not entries else reduce(entries))
    for name, order in orders.items():
        if isinstance(rows := getattr(metric, name), Tensor) and len(rows) == len(order):
            setattr(metric, name, rows[order.to(rows.device)])


class GatherStates:
    """A ``dist_sync_fn`` of torchmetrics: gathers every tower's state, of any size along the first dimension.

    Args:
        name: the metric's name in messages; equal on all towers.

    Raises:
        DisagreementError: on all towers: they make different calls.
    """

    def __init__(self, comm: Communicator, name: str) -> None:
        self._comm = comm
        self._call = f"compute() of the metric {name}"

    def __call__(self, state: Tensor, group: object = None) -> list[Tensor]:
        described = announce(self._comm, self._call, [str(state.dtype), list(state.shape)])
        # A tower that has stored no examples does not know their shape and dtype.
        dtype, like = next(
            (state_of_tower for state_of_tower in described if not _is_nothing(state_of_tower)), described[0]
        )
        state = state.to(_dtype(dtype))
        shapes = [[0, *like[1:]] if _is_nothing(state_of_tower) else state_of_tower[1] for state_of_tower in described]
        state = state.reshape(shapes[self._comm.index]).contiguous()
        if not like:
            return list(self._comm.all_gather(state).unbind())
        rows = values.concatenate(self._comm, state, shapes, 0)
        return list(rows.split([shape[0] for shape in shapes]))

    def gather_lists(self, lists: Mapping[str, list[Any]], device: torch.device) -> dict[str, list[Tensor]]:
        """Gathers every tower's lists into one list each. Lists with a non-tensor entry on any tower are left out."""
        described = {
            name: [[str(entry.dtype), list(entry.shape)] for entry in entries]
            for name, entries in lists.items()
            if all(isinstance(entry, Tensor) for entry in entries)
        }
        body = b"".join(_bytes(entry) for name in described for entry in lists[name])
        announcements = announce_with_body(self._comm, self._call, described, body)
        common = [name for name in lists if all(name in announcement.details for announcement in announcements)]
        towers = [_unpacked(announcement, device) for announcement in announcements]
        rows = {name: itertools.zip_longest(*(lists_of_tower[name] for lists_of_tower in towers)) for name in common}
        return {name: [entry for row in rows[name] for entry in row if entry is not None] for name in common}

    def orders(self, lengths: Mapping[str, list[int]]) -> dict[str, Tensor]:
        """Returns the order of rows, stored tower by tower, in which towers' first entries come first, and so on.

        Args:
            lengths: the rows of each entry of this tower's lists.
        """
        towers = announce(self._comm, self._call, dict(lengths))
        found = {}
        for name in lengths:
            firsts = itertools.accumulate((sum(tower[name]) for tower in towers), initial=0)
            entries = [
                (number, first + start, rows)
                for first, tower in zip(firsts, towers, strict=False)
                for number, (start, rows) in enumerate(zip(_starts(tower[name]), tower[name], strict=True))
            ]
            pieces = [torch.arange(at, at + rows, device="cpu") for _, at, rows in sorted(entries)]
            found[name] = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device="cpu")
        return found

    def __deepcopy__(self, memo: object) -> GatherStates:
        return self


def _rows(entry: Any) -> int:
    return len(entry) if isinstance(entry, Tensor) and entry.dim() else 1


def _starts(lengths: list[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))[:-1]


def _unpacked(announcement: Announcement, device: torch.device) -> dict[str, list[Tensor]]:
    """Returns the lists of a tower, from the dtypes, shapes and bytes of its announcement."""
    body, lists = memoryview(announcement.body), dict[str, list[Tensor]]()
    for name, entries in announcement.details.items():
        lists[name] = []
        for dtype, shape in entries:
            kind = _dtype(dtype)
            size = math.prod(shape) * kind.itemsize
            flat = torch.frombuffer(bytearray(body[:size]), dtype=kind) if size else torch.empty(0, device="cpu")
            lists[name].append(flat.to(kind).view(shape).to(device))
            body = body[size:]
    return lists


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _bytes(tensor: Tensor) -> bytes:
    return as_bytes(tensor.detach().cpu().contiguous()).numpy().tobytes()


def _is_nothing(described: list[Any]) -> bool:
    shape: list[int] = described[1]
    return shape == [0]
