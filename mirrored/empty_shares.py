"""Towers whose share of a batch is empty: the batches that they receive, and why these do not count.

Such a tower receives a batch without examples. For models that do not support one, it receives a stand-in (elsewhere: a
dummy batch), and running statistics are restored after it. A loss without examples is an exact zero by itself
(:mod:`mirrored.losses`). This module is imported only when a tower has such a share.

[Note: one example and two] The collate function shows the form of a batch without examples. It is called with one
example and with two copies of it, and the two batches are compared. A dimension of a tensor, or the length of a list,
that has grown belongs to the examples, so it is 0 in an empty batch. Everything that is equal in both stays. Slicing a
batch of one example at 0 is not used: it left a phantom example in every list that was treated as a structure. A size
may have an offset: the offsets of sequences have one entry more than the sequences. The size for none is therefore 2 ·
one − two. The second example is a copy, since padding must not depend on another example. Numbers that have doubled are
counts.

[Note: stand-ins] ``distribute_dataset(…, stand_in=True)`` gives such a tower one example of another tower. The model
computes on it, so that all towers run the same collectives, but it does not count. Losses of ``compute_average_loss``
are an exact zero whose gradients are zeros, and metrics are not updated. Batch norms over the global batch leave out
its values, and the running statistics of other normalisation layers are restored. Everything that a script counts
itself (another loss, a statistic of a custom layer) must pass through :func:`drop_stand_in`. ``nn.SyncBatchNorm``,
which is torch's, treats a stand-in as an ordinary example.

[Note: a stand-in counts nothing, by slicing] Its loss is ``losses[:0].sum()``. Values that are not finite are left out,
and backward runs through the whole model with zeros, so that all towers run the same collectives. In synchronised batch
norm it is an empty share whose values are normalised by constants. Only running statistics are restored. Other buffers
must change on one tower as on the others: vectors of spectral norm, averages of parameters, queues that are filled from
all towers. Nothing distinguishes such buffers from statistics.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from mirrored.context import ActiveStrategy, ReplicaContext, current_replica, current_strategy
from mirrored.shares import Share
from towers.system import tree as trees
from towers.system.torch_private import NormBase

_TOO_FEW = "Expected more than 1 value per channel"
"""The start of the message of torch's BatchNorm."""


_WHOLE = (str, bytes, bool, type(None), torch.dtype, torch.device)


class _NoEmptyForm(Exception):
    """A part of a batch cannot be empty. The message is a clause that names the part."""


def empty_batch(collate: Callable[[list[Any]], Any], example: Any, tower: int) -> Any:
    """Returns the batch that ``collate`` would make of no examples; see [Note: one example and two].

    Args:
        collate: makes a batch of a list of examples; called twice.
        example: any example of the data. It is copied, since collate functions may change their arguments.
        tower: this tower's index, for messages.

    Raises:
        TypeError: a part of its batches cannot be empty, such as a packed sequence.
    """
    alone = collate([_copied(example)])
    twice = collate([_copied(example), _copied(example)])
    comparison = _Comparison()
    try:
        nothing = comparison.empty(alone, twice, "batch")
        if not comparison.has_grown:
            raise _NoEmptyForm("nothing in it grows with the number of examples")
    except _NoEmptyForm as error:
        raise TypeError(
            f"tower {tower}'s share of a batch has no examples, and the result of collate_fn cannot be made "
            f"empty: {error}. Pass stand_in=True to distribute_dataset: a tower without examples then receives a "
            "batch of one example that does not count"
        ) from None
    return nothing


def _copied(example: Any) -> Any:
    try:
        return copy.deepcopy(example)
    except Exception:  # a user's object may raise anything; most collate functions change nothing
        return example


def narrow(array: Any, dim: int, start: int, end: int) -> Any:
    """Returns entries ``start`` to ``end`` of a tensor or array along a dimension."""
    if isinstance(array, np.ndarray):
        return array[(slice(None),) * (dim % array.ndim) + (slice(start, end),)]
    if array.layout is torch.strided:
        return array.narrow(dim, start, end - start)
    return array.index_select(dim, torch.arange(start, end, device=array.device))


class _Comparison:
    """Compares a batch of one example with a batch of two.

    Attributes:
        has_grown: whether anything was larger in the batch of two.
    """

    has_grown = False

    def empty(self, single: Any, double: Any, path: str) -> Any:
        """Returns the value in an empty batch that is ``single`` in a batch of one and ``double`` in a batch of two."""
        if type(single) is not type(double):
            raise _NoEmptyForm(
                f"{path} is a {type(single).__name__} with one example, and a {type(double).__name__} with two"
            )
        if isinstance(single, PackedSequence):
            raise _NoEmptyForm(f"{path} is a PackedSequence, which cannot be empty")
        if isinstance(single, (Tensor, np.ndarray)):
            return self._array(single, double, path)
        if isinstance(single, Mapping):
            if list(single) != list(double):
                raise _NoEmptyForm(f"{path} has the keys {list(single)} with one example, and {list(double)} with two")
            return trees.with_entries(single, [self.empty(single[k], double[k], f"{path}[{k!r}]") for k in single])
        if isinstance(single, (list, tuple)):
            if len(single) != len(double):
                return single[: self._size(len(single), len(double))]
            pairs = enumerate(zip(single, double, strict=True))
            return trees.with_entries(single, [self.empty(a, b, f"{path}[{i}]") for i, (a, b) in pairs])
        if dataclasses.is_dataclass(single) and not isinstance(single, type):
            return self._dataclass(single, double, path)
        if isinstance(single, _WHOLE):
            return single
        if isinstance(single, (int, float, complex, np.generic)):
            return type(single)(0) if self._counts(np.asarray(single), np.asarray(double)) else single
        return self._object(single, double, path)

    def _size(self, single: int, double: int) -> int:
        """Returns the size for no examples, even if it has an offset: see [Note: one example and two]."""
        if double <= single:
            return single
        self.has_grown = True
        return max(0, 2 * single - double)

    def _counts(self, single: Any, double: Any) -> bool:
        """Returns whether numbers count something in the examples, such as words: two equal examples double them."""
        if single.shape != double.shape:
            return False
        if isinstance(single, Tensor):
            if single.layout is not torch.strided or single.dtype is torch.bool:
                return False
            single, double = single.detach().cpu().double().numpy(), double.detach().cpu().double().numpy()
        if single.dtype.kind not in "iuf" or not single.any():
            return False
        doubled = bool(np.allclose(double, 2.0 * single, rtol=1e-6, atol=0.0))
        self.has_grown |= doubled
        return doubled

    def _array(self, single: Any, double: Any, path: str) -> Any:
        if isinstance(single, Tensor) and single.is_nested:
            raise _NoEmptyForm(f"{path} is a nested tensor, which cannot be split")
        if single.ndim != double.ndim:
            raise _NoEmptyForm(f"{path} has {single.ndim} dimensions with one example, and {double.ndim} with two")
        grown = [d for d in range(single.ndim) if double.shape[d] > single.shape[d]]
        if not grown:
            return single * 0 if self._counts(single, double) else single
        for d in grown:
            single = narrow(single, d, 0, self._size(single.shape[d], double.shape[d]))
        return single

    def _dataclass(self, single: Any, double: Any, path: str) -> Any:
        empty = copy.copy(single)
        for field in dataclasses.fields(single):
            value = self.empty(getattr(single, field.name), getattr(double, field.name), f"{path}.{field.name}")
            object.__setattr__(empty, field.name, value)
        return empty

    def _object(self, single: Any, double: Any, path: str) -> Any:
        """Returns any other object: sliced if its length has grown, as a data frame's, unchanged if both are equal."""
        kind = type(single).__name__
        try:
            if hasattr(single, "__len__") and len(double) > len(single):
                return single[: self._size(len(single), len(double))]
            if single is double or (not isinstance(single, (set, frozenset)) and bool(single == double)):
                return single
        except Exception as error:  # a user's object may raise anything
            raise _NoEmptyForm(f"{path} is a {kind}, which cannot be split ({error})") from None
        raise _NoEmptyForm(f"{path} is a {kind}, which cannot be split")


def takes_statistics_of_all_towers(module: nn.Module) -> bool:
    """Returns whether a layer's running statistics are those of the global batch."""
    return isinstance(module, nn.SyncBatchNorm) or getattr(module, "takes_statistics_of_all_towers", False)


@contextlib.contextmanager
def statistics_kept(
    roots: Callable[[], Iterator[tuple[str, nn.Module]]], before_step: list[Callable[[Optimizer], object]]
) -> Iterator[None]:
    """Restores the running statistics of normalisation layers after a stand-in passes through them.

    Layers whose statistics all towers compute together are left alone. So are other buffers, because nothing shows
    whether they depend on the examples (statistics) or on the steps (vectors of spectral norm, averages of parameters).

    Args:
        roots: returns the names and modules that contain the layers.
        before_step: listeners that are called when an optimizer is about to step, since the script may copy the model
            then.
    """
    kept = [
        (tensor, tensor.clone())
        for _, root in roots()
        for module in root.modules()
        if isinstance(module, NormBase) and not takes_statistics_of_all_towers(module)
        for tensor in (module.running_mean, module.running_var)
        if tensor is not None and not is_lazy(tensor)
    ]

    @torch.no_grad()
    def put_back(optimizer: Optimizer | None = None) -> None:
        for tensor, value in kept:
            tensor.data.copy_(value)  # without a new version, because backward may still follow

    before_step.append(put_back)
    try:
        yield
    finally:
        before_step.remove(put_back)
        put_back()


def drop_stand_in(*values: Any, dim: int = 0, batch: Any = None) -> Any:
    """Returns the values without the entries of a stand-in, for quantities that a script counts itself.

    On a tower whose batch is a stand-in (``distribute_dataset(…, stand_in=True)``), the returned values have no
    entries. On all others they are unchanged. Call it before the values are summed or gathered, for example as
    ``logits, y = mirrored.drop_stand_in(logits, y)``.

    Args:
        values: tensors and arrays, which are sliced along ``dim``; lists, which are emptied; tuples and dicts of these.
        dim: the dimension of the examples.
        batch: an object of the distributed batch from which the values were computed. It is necessary if a step has
            several.

    Returns:
        The value, or a tuple of the values if there are several.

    Raises:
        TypeError: a value has no entries, such as a sum.
        ValueError: the step has several batches, and it is ambiguous to which of them the values belong.
    """
    if not values:
        raise TypeError("drop_stand_in was given no value")
    strategy = current_strategy()
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        dropped = tuple(_without_entries(value, dim) for value in values)
        if is_stand_in(strategy, values, _entries(values, dim), "the first value", batch):
            values = dropped
    return values if len(values) > 1 else values[0]


def _without_entries(value: Any, dim: int) -> Any:
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        return narrow(value, dim, 0, 0)
    if isinstance(value, (Mapping, tuple)):
        return trees.with_entries(value, [_without_entries(entry, dim) for entry in trees.entries(value)])
    if isinstance(value, list):
        return []
    if value is None or isinstance(value, str):
        return value
    kind = "a single number" if isinstance(value, (Tensor, np.ndarray, int, float)) else f"a {type(value).__name__}"
    raise TypeError(
        f"drop_stand_in was given {kind}, which has no entries: give it tensors, arrays or lists with an entry for "
        "each example, before they are added up"
    )


def _entries(values: Any, dim: int) -> int | None:
    """Returns the number of entries of the first tensor, array or list."""
    for leaf in values:
        if isinstance(leaf, (Tensor, np.ndarray)):
            return int(leaf.shape[dim]) if leaf.ndim else None
        if isinstance(leaf, list):
            return len(leaf)
        if isinstance(leaf, (tuple, Mapping)) and (inner := _entries(trees.entries(leaf), dim)) is not None:
            return inner
    return None


def is_stand_in(strategy: ActiveStrategy, values: Any, entries: int | None, what: str, batch: Any = None) -> bool:
    """Returns whether values that were computed in a step are a stand-in's.

    Args:
        values: if they contain an object of a distributed batch, that batch decides. Otherwise, the batches in the
            arguments of ``run`` decide. Without these, the batch whose loop is running decides.
        entries: the number of entries of the values, which decides between several batches.
        what: the name of the values in messages.
        batch: an object of the distributed batch of the values, if the script names it; ``()`` if they belong to none.

    Raises:
        ValueError: it is ambiguous.
    """
    known = strategy.known_shares
    if not known.has_stand_in:
        return False
    replica = current_replica()
    if batch is not None:
        certain = shares = known.named(batch)
    else:
        certain = known.of(values) or (known.of(replica.arguments) if replica is not None else [])
        shares = certain or known.at_hand(None)
    kinds = {share.stand_in for share in shares}
    if len(kinds) < 2 and (certain or True not in kinds):
        return True in kinds
    kinds = {share.stand_in for share in shares if share.entries == entries}
    if len(kinds) != 1:
        raise ValueError(
            f"tower {strategy.topology.index} has only a stand-in in a batch of this step, and it is unknown "
            f"whether {what}, of {entries} entries, was computed from it: pass the batch to strategy.run in its "
            "args, or pass batch=x, with a tensor x of the batch"
        )
    return kinds.pop()


def loss_is_of_stand_in(entries: int, values: Any, counted: bool, replica: ReplicaContext, batch: Any) -> bool:
    """Returns whether losses, which were computed from some values, are a stand-in's.

    Args:
        counted: whether the number of losses enters the divisor. Otherwise, if a batch of the step may be a stand-in on
            some tower, the losses must have as many entries as one of the step's batches.

    Raises:
        ValueError: it is ambiguous.
    """
    shares = replica.strategy.known_shares.at_hand(replica.arguments) if batch is None and not counted else []
    if any(share.may_stand_in for share in shares) and all(share.entries != entries for share in shares):
        sizes = " and ".join(str(share.entries) for share in shares)
        raise ValueError(
            f"the loss has {entries} entries on tower {replica.replica_id_in_sync_group}, and its distributed "
            f"batch has {sizes}. A batch can be a stand-in (stand_in=True), which must not count, so name the "
            "batch of the loss: batch=x, with a tensor x of the batch, or batch=() if the loss belongs to no "
            "distributed batch"
        )
    return is_stand_in(replica.strategy, values, entries, "the loss", batch)


def explain_share(error: Exception, tower: int, shares: list[Share]) -> None:
    """Adds to a built-in exception's message that a small share may be the cause, and the remedy.

    These are a share without examples, and one example in a BatchNorm. Exceptions of other classes are unchanged,
    because a program may depend on their messages.
    """
    if type(error).__module__ != "builtins":
        return
    if any(share.total and not share.entries for share in shares):
        hint = (
            f"(tower {tower}'s share of this batch has no examples. If the model cannot take an empty batch, give "
            "distribute_dataset or distribute_datasets_from_function stand_in=True: a tower without examples then gets "
            "one that counts nothing)"
        )
    elif type(error) is ValueError and _TOO_FEW in str(error) and any(share.entries == 1 for share in shares):
        hint = (
            f"(tower {tower}'s share of this batch has one example. With sync_batch_norm=True in strategy.scope or "
            "strategy.mirror, BatchNorm normalises over the global batch; drop_last=True leaves out a short last batch)"
        )
    else:
        return
    if not error.args:
        error.args = (hint,)
    elif len(error.args) == 1 and str(error) == error.args[0] and hint not in str(error):
        error.args = (f"{error.args[0]}\n{hint}",)
