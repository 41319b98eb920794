"""Virtual towers: a step is split, and its results are added up, identically on any number of towers.

A global batch is split into V parts, for any number of towers. For each part, the random generators are seeded from
(seed, step, part), the buffers have their values from before the step, and forward and backward run on a fixed shape.
Gradients, losses and buffers are added up in one balanced binary tree over the V parts: first the subtrees inside a
tower, then across towers. The tree is the same for every number of towers, so the bits are, too.

[Note: gradients are added when all parts are computed] Gradients are not added up while the last part's backward runs,
because the tree needs complete leaves. On CPUs, this costs nothing. On GPUs, communication does not overlap with the
last part.

[Note: parts are copies] Kernels may sum in another order if alignment or strides differ, and a part is a slice on one
tower and a whole tensor on another. So each virtual tower receives copies. Batches are split only if it is unambiguous
which tensors are per-example. Otherwise, the number of towers would decide whether a tensor of four class weights is
treated as a batch of four. The result of a ``collate_fn`` may be padded, packed or indexed, which splitting would
break. So it is collated separately for every part.

[Note: towers draw identically] Outside ``strategy.backward``, all towers draw the same random numbers, instead of each
tower's own. The script's random choices there (noise on parameters, randomly skipped layers) must not depend on the
number of towers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored import seeds
from mirrored.context import ReplicaContext
from mirrored.empty_shares import is_stand_in
from mirrored.losses import expand_weights, global_count, sum_over
from mirrored.shares import Distribution, is_array
from mirrored.virtual.buffers import StepBuffers, registered
from towers.collectives.agreement import announce
from towers.collectives.arithmetic import add_by_tree
from towers.collectives.communicator import as_bytes
from towers.gradients.averager import GradientAverager
from towers.gradients.reductions import Subtree, TreeSum
from towers.gradients.sparse import add_sparse
from towers.health.status import with_batch
from towers.system import tree as trees
from towers.system.messages import get_logger
from towers.system.profiling import range_
from towers.system.tensors import Named, on_device

log = get_logger("mirrored")


class Cutter:
    """Splits batches if it is unambiguous which values are per-example; see [Note: parts are copies].

    The first of these cases that fits applies: the value belongs to a batch whose parts were collated separately; it is
    an array with an entry per example, a structure of such values, or a list of examples; otherwise, all parts receive
    it.

    Args:
        distribution: how batches are split.
    """

    def __init__(self, distribution: Distribution) -> None:
        self._cut = distribution.cut
        self._known = distribution.known
        self._pieces = distribution.pieces

    def part(self, value: Any, local: int, index: int, derived: bool = False) -> Any:
        """Returns the part of a step's argument for one of this tower's virtual towers.

        Args:
            local: the number of this tower's examples in the step.
            index: the index of the virtual tower on this tower, from 0.
            derived: whether tensors computed from the batch's tensors are accepted even if parts were collated
                separately.

        Raises:
            ValueError: a tensor, array or list has another number of entries; or see ``derived``.
        """
        for pieces in self._pieces.values():
            if (piece := pieces.get(id(value))) is not None:
                return piece[1][index]
        if is_array(value):
            return self._entries(value, local, index, derived) if len(value.shape) else value
        if isinstance(value, Mapping) or (_is_structure(value) and not _holds_examples(value, local)):
            return trees.with_entries(value, [self.part(entry, local, index) for entry in trees.entries(value)])
        return self._entries(value, local, index) if isinstance(value, (list, tuple)) else value

    def _entries(self, value: Any, local: int, index: int, derived: bool = True) -> Any:
        """Returns the entries of an array or list that belong to a virtual tower's examples."""
        share = self._known.get(value)
        entries = len(value)
        if entries != (share.local if share is not None else local):
            raise ValueError(
                f"strategy.backward was given {_described(value)}, but this tower's share has {local} examples, "
                "so it cannot be split into virtual towers; let loss_fn take values without an entry for each "
                "example from outside"
            )
        if share is None and self._pieces and not derived:
            raise ValueError(
                f"strategy.backward was given {_described(value)}, which is not one of the batch's own: with a "
                "collate_fn, every virtual tower collates its own examples, so that padding and random choices "
                "do not depend on the number of towers. Give the batch's own tensors to strategy.backward, and "
                "change them in loss_fn"
            )
        start, end = self._cut.parts_of(entries)[index]
        return value[start:end]


def _is_structure(value: Any) -> bool:
    """Returns whether a value is a list of fields of a batch, not of the examples of one field."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, (Mapping, list, tuple)) or is_array(item) for item in value
    )


def _holds_examples(value: Sequence[Any], count: int) -> bool:
    """Returns whether a list contains ``count`` examples, not the fields of a batch of ``count`` examples."""
    arrays = [leaf for leaf in trees.leaves(value) if is_array(leaf)]
    return len(value) == count and not any(len(array.shape) and array.shape[0] == count for array in arrays)


def _described(value: Any) -> str:
    if is_array(value):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__} of {len(value)} entries"


@dataclasses.dataclass
class _Report:
    """One tower's report to the others about its part of a step.

    Attributes:
        leaves: the number of its virtual towers that had examples.
        traced: whether a loss required a gradient.
        dtype: the losses' dtype.
        layout, written, counted, differing: see :class:`StepBuffers`.
        names: its buffers' names. They are gathered only if layouts differ, because one tower may keep a model that
            others dropped.
    """

    leaves: int
    traced: bool
    dtype: str
    layout: str
    written: dict[str, int]
    counted: list[str]
    differing: list[str]
    names: list[str] = dataclasses.field(default_factory=list)


class VirtualTowers:
    """The virtual towers of one strategy.

    Args:
        distribution: how batches are split: one part for each virtual tower.
        averager: adds up gradients over several towers; None for one tower.
        modules: returns the modules that have buffers, with their names.

    Attributes:
        step: the number of backwards. The random numbers of the next one depend on it and on the seed.
    """

    def __init__(
        self,
        distribution: Distribution,
        averager: GradientAverager | None,
        modules: Callable[[], Sequence[tuple[str, nn.Module]]],
    ) -> None:
        self._comm = comm = distribution.comm
        self._known = distribution.known
        self._cut = distribution.cut
        self._cutter = Cutter(distribution)
        self._averager = averager
        self._find_modules = modules
        self._parameters: list[weakref.ref[Tensor]] = []
        self._modules: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._buffers: StepBuffers | None = None
        self.step = 0
        self._says = comm.size > 1 and comm.index == 0

    def before_step(self, optimizer: Optimizer) -> None:
        """Warns once, on tower 0 of several, if an optimizer steps and :meth:`backward` was never called."""
        if self.step == 0 and self._says:
            self._says = False
            log.warning(
                "virtual_towers is set, but loss.backward() computed these gradients, so the bits depend on the number "
                "of towers. Replace it with loss = strategy.backward(loss_fn, *batch)"
            )

    def add(self, parameters: Sequence[Named]) -> None:
        """Adds parameters whose gradients every later backward adds up."""
        self._parameters += [weakref.ref(named.tensor) for named in parameters]
        self._modules = [(name, weakref.ref(module)) for name, module in self._find_modules()]
        self._buffers = None

    def backward(
        self,
        loss_fn: Callable[..., Tensor],
        batch: Sequence[Any],
        sample_weight: Tensor | float | None,
        denominator: Literal["examples", "weights"],
        replica: ReplicaContext,
        seed: int,
    ) -> Tensor:
        """Writes the gradient of the global mean to the parameters, and returns it (see ``Strategy.backward``)."""
        if not batch:
            raise ValueError("strategy.backward(loss_fn, *batch) was given no batch to split into virtual towers")
        local = self._known.local_examples(batch)
        if is_stand_in(replica.strategy, batch, local, "the batch"):
            local = 0
            if isinstance(sample_weight, Tensor) and sample_weight.dim():
                sample_weight = sample_weight[:0]
        total = self._total(local, sample_weight, denominator, replica)
        parameters = [p for reference in self._parameters if (p := reference()) is not None]
        buffers = self._step_buffers()
        buffers.begin()
        previous = [parameter.grad for parameter in parameters]
        self.step += 1
        unhooked = self._averager.hooks_disabled() if self._averager is not None else contextlib.nullcontext()
        try:
            with unhooked, seeds.undisturbed(self._comm.device):
                sums, report = self._compute(loss_fn, batch, sample_weight, local, total, seed, parameters, buffers)
            _give(parameters, sums[: len(parameters)])
            reports = self._gather_reports(report, buffers)
            if self._averager is not None:
                self._averager.reduce_now(TreeSum)  # see [Note: gradients are added when all parts are computed]
            mean = self._combine(buffers, sums[len(parameters) :], reports)
        except BaseException:
            _give(parameters, previous)
            buffers.restore()
            raise
        _add(parameters, previous)
        return mean

    def _compute(
        self,
        loss_fn: Callable[..., Tensor],
        batch: Sequence[Any],
        sample_weight: Tensor | float | None,
        local: int,
        total: Tensor | float,
        seed: int,
        parameters: Sequence[Tensor],
        buffers: StepBuffers,
    ) -> tuple[list[Tensor | None], _Report]:
        """Runs forward and backward of this tower's virtual towers, one after another.

        Args:
            local: the number of examples of this tower's share.
            total: the divisor of the sum of all losses.

        Returns:
            The sums of gradients, losses (float64) and the tensors of ``StepBuffers.take`` over the virtual towers; and
            a report.
        """
        subtree, leaves, traced, dtype = Subtree(), 0, False, torch.float32
        for part, (start, end) in enumerate(self._cut.parts_of(local)):
            if start == end:
                subtree.add([None] * (len(parameters) + 1 + buffers.count))
                continue
            _give(parameters, [None] * len(parameters))
            if leaves:
                buffers.restore()
            seeds.seed_on(self._comm.device, seeds.mix(seed, "virtual tower", self.step, self._cut.first + part))
            *inputs, weight = self._part(batch, sample_weight, local, part)
            with range_("mirrored::virtual-tower"):
                loss = _loss(loss_fn(*inputs), weight, end - start, total)
                if loss.requires_grad:  # a part's loss may depend on no parameter
                    loss.backward()
            leaves, traced, dtype = leaves + 1, traced or loss.requires_grad, loss.dtype
            gradients = [parameter.grad for parameter in parameters]
            subtree.add([*gradients, loss.detach().double(), *buffers.take()])
        counts = buffers.layout, buffers.written, buffers.counted, buffers.differing
        return subtree.total(), _Report(leaves, traced, str(dtype), *counts)

    def _total(
        self, local: int, weight: Tensor | float | None, denominator: str, replica: ReplicaContext
    ) -> Tensor | float:
        """Returns the divisor of the sum of all losses: the number of examples of all towers, or their total weight."""
        tensor = weight if isinstance(weight, Tensor) and weight.dim() else None
        if tensor is not None and tensor.shape[0] != local:
            raise ValueError(f"sample_weight of shape {tuple(tensor.shape)} does not fit {local} examples")
        if denominator == "examples":
            return global_count(local, replica, "the batch")
        if denominator == "weights" and tensor is not None:
            return self._total_weight(tensor, local)
        raise ValueError(f"denominator is {denominator!r}: 'examples', or 'weights' with a tensor as sample_weight")

    def _part(self, batch: Sequence[Any], weight: Any, local: int, part: int) -> list[Any]:
        """Returns one virtual tower's part of the batch, and then of the weight; see [Note: parts are copies]."""
        parts = [self._cutter.part(value, local, part) for value in batch]
        parts.append(self._cutter.part(weight, local, part, derived=True))
        copied: list[Any] = trees.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, parts)
        return copied

    @torch.no_grad()
    def _total_weight(self, weight: Tensor, local: int) -> Tensor:
        """Returns the sum of weights per example (or token) over all towers, in float64, or 1 if it is 0."""
        sums = [weight[start:end].double().sum() for start, end in self._cut.parts_of(local)]
        gathered = self._comm.all_gather(torch.stack(sums)).flatten()
        total = torch.empty_like(sums[0])
        add_by_tree(total, list(gathered.unbind()))
        return torch.where(total == 0, torch.ones_like(total), total)

    def _step_buffers(self) -> StepBuffers:
        modules = [(name, module) for name, reference in self._modules if (module := reference()) is not None]
        if self._buffers is None or not self._buffers.holds(registered(module for _, module in modules)):
            self._buffers = StepBuffers(modules)
        return self._buffers

    def _gather_reports(self, own: _Report, buffers: StepBuffers) -> list[_Report]:
        """Returns the reports of all towers.

        Raises:
            MirrorError, RuntimeError: on all towers.
        """
        reports = [own]
        if self._comm.size > 1:
            call = f"strategy.backward() number {self.step} of {self._cut.parts} virtual towers"
            call = with_batch(call, self._comm.health.place.batch)
            reports = [_Report(**details) for details in announce(self._comm, call, dataclasses.asdict(own))]
        if len({report.layout for report in reports}) > 1:
            for report, names in zip(reports, self._comm.all_gather_json(buffers.names), strict=True):
                report.names = names
        for name in itertools.chain.from_iterable(report.differing for report in reports):
            buffers.refuse(name)
        if any(report.leaves for report in reports) and not any(report.traced for report in reports):
            raise RuntimeError("no loss that loss_fn returned requires a gradient; are all parameters frozen?")
        return reports

    @torch.no_grad()
    def _combine(self, buffers: StepBuffers, sums: Sequence[Tensor | None], reports: list[_Report]) -> Tensor:
        """Adds up losses and buffers over the towers, sets the buffers, and returns the loss.

        Args:
            sums: the sums over this tower's virtual towers: of the losses (float64), then of the tensors of ``take``.
        """
        common = set.intersection(*(set(report.names or buffers.names) for report in reports))
        written: Counter[str] = Counter()
        for report in reports:
            written.update({name: count for name, count in report.written.items() if name in common})
        counted = sorted({name for report in reports for name in report.counted if name in common})
        loss = sums[0] if sums[0] is not None else torch.zeros((), dtype=torch.float64, device=self._comm.device)
        floats, integers = buffers.packed(sums[1:], common, set(written), counted)
        rows = self._gather([loss, *floats, *integers])
        for column in zip(*(row[: 1 + len(floats)] for row in rows), strict=True):
            add_by_tree(column[0], column)
        mean, *floats = rows[0][: 1 + len(floats)]
        active = [tower for tower, report in enumerate(reports) if report.leaves]
        if active:
            packed = [row[1 + len(floats) :] for row in rows]
            agreed = buffers.agreed(counted, packed, [report.counted for report in reports])
            leaves = sum(report.leaves for report in reports)
            buffers.finish(floats, agreed, common, written, leaves)
        dtype = reports[active[0] if active else 0].dtype
        return mean.to(getattr(torch, dtype.removeprefix("torch.")))

    def _gather(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Returns every tower's tensors, with one collective. Shapes and dtypes must be equal on all towers."""
        if self._comm.size == 1:
            return [list(tensors)]
        packed = torch.cat([on_device(as_bytes(tensor), self._comm.device) for tensor in tensors])
        return [
            [
                piece.clone().view(tensor.dtype).view(tensor.shape).to(tensor.device)
                for piece, tensor in zip(row.split([tensor.nbytes for tensor in tensors]), tensors, strict=True)
            ]
            for row in self._comm.all_gather(packed)
        ]


def _loss(losses: Tensor, weight: Tensor | float | None, examples: int, total: Tensor | float) -> Tensor:
    """Returns one virtual tower's part of the global mean.

    Raises:
        ValueError: there is not one loss for each of its examples.
    """
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else None
    if shape is None or not shape or shape[0] != examples:
        returned = f"losses of shape {shape}" if shape is not None else f"a {type(losses).__name__}"
        remedy = "compute the losses with reduction='none'"
        if shape:
            remedy = "drop or add examples in the dataset, not in collate_fn or loss_fn"
        raise ValueError(
            f"loss_fn was given {examples} examples and returned {returned}, but must return one loss per example: "
            f"{remedy}"
        )
    if weight is None:
        return sum_over(losses, total)
    weights = expand_weights(weight, losses)
    if isinstance(total, Tensor) and weights.shape != losses.shape:
        raise ValueError(
            f"sample_weight of shape {tuple(weights.shape)} needs the shape of the losses, {tuple(losses.shape)}, if "
            "the mean is to be over the weights"
        )
    return sum_over(losses * weights, total)


def _give(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


@torch.no_grad()
def _add(parameters: Sequence[Tensor], previous: Sequence[Tensor | None]) -> None:
    """Adds the earlier gradients to the new ones, as ``backward()`` does."""
    for parameter, before in zip(parameters, previous, strict=True):
        if before is not None:
            if parameter.grad is None:
                parameter.grad = before
            elif before.is_sparse or parameter.grad.is_sparse:
                parameter.grad = add_sparse(before, parameter.grad)
            else:
                parameter.grad = before.add_(parameter.grad)
