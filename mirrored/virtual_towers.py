"""Virtual towers: the work of a step is cut in the same way, and added up in the same order, on any number of towers.

A global batch is cut into V parts, whatever the number of towers. For each part the random generators are seeded from
(seed, step, part), the buffers are those from before the step, and forward and backward run on a fixed shape.
Gradients, losses and changes of buffers are added up by one balanced binary tree over the V parts: subtrees inside a
tower first, then across towers. As the tree is the same for every number of towers, so is every bit.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirrored import seeds
from mirrored.data.shares import Cut, KnownShares, cut
from mirrored.losses import expand_weights, sum_over
from mirrored.virtual_buffers import StepBuffers, registered
from towers import Topology
from towers import tree as trees
from towers.collectives.agreement import announce
from towers.collectives.arithmetic import add_by_tree
from towers.collectives.communicator import Communicator, as_bytes
from towers.gradients import GradientAverager
from towers.subtree import Subtree


def cut_for(topology: Topology, virtual_towers: int | None) -> Cut:
    """How batches are cut on one of several towers.

    Raises:
        ValueError: that many virtual towers cannot be added up by a balanced tree, or not be shared out evenly.
    """
    if virtual_towers is None:
        return Cut(topology.size, topology.index, topology.index + 1)
    count = operator.index(virtual_towers)
    if count < 1 or count & (count - 1):
        raise ValueError(f"virtual_towers is {count}, but must be a power of two")
    if count % topology.size:
        raise ValueError(
            f"virtual_towers is {count}, which {topology.size} towers cannot share evenly; the number of towers has to "
            "be a power of two that is not larger"
        )
    own = count // topology.size
    return Cut(count, own * topology.index, own * (topology.index + 1))


class VirtualTowers:
    """The virtual towers of one strategy.

    Args:
        comm: the real towers.
        cut: how batches are cut; one part for each virtual tower.
        known: what virtual towers' parts of certain batches are.
        averager: adds up gradients over several towers.

    Attributes:
        step: counts the backwards; together with the seed it says what is random in the next one.
    """

    def __init__(self, comm: Communicator, cut: Cut, known: KnownShares, averager: GradientAverager | None) -> None:
        self._comm = comm
        self._known = known
        self._cut = cut
        self._averager = averager
        self._parameters: list[weakref.ref[Tensor]] = []
        self._modules: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._buffers: StepBuffers | None = None
        self.step = 0

    def add(self, parameters: Sequence[Tensor], modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Take part in every backward from now on.

        Args:
            parameters: gradients are added up for these, too.
            modules: with their names, all that have buffers.
        """
        self._parameters += [weakref.ref(parameter) for parameter in parameters]
        self._modules = [(name, weakref.ref(module)) for name, module in modules]
        self._buffers = None

    def backward(
        self,
        loss_fn: Callable[..., Tensor],
        batch: Sequence[Any],
        sample_weight: Tensor | float | None,
        local: int,
        total: Tensor | float,
        seed: int,
    ) -> Tensor:
        """Leave the gradient of the global mean in the parameters, and return that mean (see ``Strategy.backward``).

        Args:
            local: examples of this tower's share.
            total: what the sum of all losses is divided by.
        """
        parameters = [p for reference in self._parameters if (p := reference()) is not None]
        buffers = self._step_buffers()
        buffers.begin()
        kept = [parameter.grad for parameter in parameters]
        self.step += 1
        aside = self._averager.aside() if self._averager is not None else contextlib.nullcontext()
        subtree, leaves, dtype = Subtree(), 0, torch.float32
        try:
            with aside, seeds.undisturbed(self._comm.device):
                for part, (start, end) in enumerate(self._cut.parts_of(local), start=self._cut.first):
                    if start == end:
                        subtree.add([None] * (len(parameters) + 1 + buffers.count))
                        continue
                    _give(parameters, [None] * len(parameters))
                    if leaves:
                        buffers.restore()
                    seeds.seed_all(seeds.mix(seed, "virtual tower", self.step, part))
                    inputs, weight = self._part((tuple(batch), sample_weight), local, leaves, start, end)
                    loss = _loss(loss_fn(*inputs), weight, end - start, total)
                    loss.backward()
                    leaves, dtype = leaves + 1, loss.dtype
                    gradients = [parameter.grad for parameter in parameters]
                    subtree.add([*gradients, loss.detach().double(), *buffers.take()])
            sums = subtree.total()
            _give(parameters, sums[: len(parameters)])
            card = {"leaves": leaves, "dtype": str(dtype), "changed": buffers.changed, "differing": buffers.differing}
            said = self._tell(card)
            for differing in itertools.chain.from_iterable(other["differing"] for other in said):
                buffers.refuse(differing)
            if self._averager is not None:
                self._averager.sum_by_tree()
            mean = self._combine(buffers, sums[len(parameters) :], said)
        except BaseException:
            _give(parameters, kept)
            buffers.restore()
            raise
        _add(parameters, kept)
        return mean

    def _part(self, inputs: Any, local: int, number: int, start: int, end: int) -> Any:
        """What one virtual tower gets of the inputs of all; tensors begin where freshly made ones do."""

        def aligned(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.data_ptr() % _alignment(leaf):
                return leaf.clone()
            return leaf

        pieces = cut(inputs, start, end, of=local, instead=lambda leaf: self._known.part(leaf, number))
        return trees.map_leaves(aligned, pieces)

    @torch.no_grad()
    def total_weight(self, weight: Tensor, local: int) -> Tensor:
        """The sum of a weight of each example (or of its tokens) over all towers, in float64; 1 where it is 0."""
        if weight.dim() == 0 or weight.shape[0] != local:
            raise ValueError(f"sample_weight of shape {tuple(weight.shape)} does not fit {local} examples")
        sums = [weight[start:end].double().sum() for start, end in self._cut.parts_of(local)]
        everybodys = self._comm.all_gather(torch.stack(sums)).flatten()
        total = torch.empty_like(sums[0])
        add_by_tree(total, list(everybodys.unbind()))
        return torch.where(total == 0, torch.ones_like(total), total)

    def _step_buffers(self) -> StepBuffers:
        modules = [(name, module) for name, reference in self._modules if (module := reference()) is not None]
        if self._buffers is None or not self._buffers.holds(registered(module for _, module in modules)):
            self._buffers = StepBuffers(modules)
        return self._buffers

    def _tell(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What every tower did: how many of its virtual towers had examples, their losses' dtype, their buffers."""
        if self._comm.size == 1:
            return [mine]
        call = f"strategy.backward() number {self.step} of {self._cut.parts} virtual towers"
        return [other.details for other in announce(self._comm, call, mine)]

    @torch.no_grad()
    def _combine(self, buffers: StepBuffers, sums: Sequence[Tensor | None], said: list[dict[str, Any]]) -> Tensor:
        """Add up losses and changes of buffers over the towers; gives the buffers their new values.

        Args:
            sums: over this tower's virtual towers: of the losses (float64), then of what ``take`` gave.
            said: what :meth:`_tell` gave.
        """
        active = [tower for tower, other in enumerate(said) if other["leaves"]]
        places = sorted({place for other in said for place in other["changed"]})
        loss = sums[0] if sums[0] is not None else torch.zeros((), dtype=torch.float64, device=self._comm.device)
        floats, integers = buffers.travelling(sums[1:], places)
        rows = self._everybodys([loss, *floats, *integers])
        for column in zip(*(row[: 1 + len(floats)] for row in rows), strict=True):
            add_by_tree(column[0], column)
        mean, *floats = rows[0][: 1 + len(floats)]
        if active:
            of_active = [rows[tower][1 + len(floats) :] for tower in active]
            buffers.compare(of_active, places)
            buffers.settle(floats, of_active[0], places, sum(other["leaves"] for other in said))
        name: str = said[active[0] if active else 0]["dtype"]
        return mean.to(getattr(torch, name.removeprefix("torch.")))

    def _everybodys(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Every tower's tensors, of which all have the same kinds, by one collective."""
        if self._comm.size == 1:
            return [list(tensors)]
        packed = torch.cat([as_bytes(tensor) for tensor in tensors])
        return [
            [
                piece.clone().view(tensor.dtype).view(tensor.shape)
                for piece, tensor in zip(row.split([tensor.nbytes for tensor in tensors]), tensors, strict=True)
            ]
            for row in self._comm.all_gather(packed)
        ]


def _alignment(tensor: Tensor) -> int:
    return 64 if tensor.device.type == "cpu" else 512


def _loss(losses: Tensor, weight: Tensor | float | None, examples: int, total: Tensor | float) -> Tensor:
    """One virtual tower's part of the global mean.

    Raises:
        ValueError: not one loss for each of its examples.
    """
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else None
    if shape is None or not shape or shape[0] != examples:
        found = f"losses of shape {shape}" if shape is not None else f"a {type(losses).__name__}"
        raise ValueError(
            f"loss_fn was given {examples} examples and returned {found}: it has to return one loss per example, "
            "computed with reduction='none'"
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
def _add(parameters: Sequence[Tensor], kept: Sequence[Tensor | None]) -> None:
    """Add new gradients to those that were there before, as backward does."""
    for parameter, before in zip(parameters, kept, strict=True):
        if before is not None:
            if parameter.grad is not None:
                before.add_(parameter.grad)
            parameter.grad = before
