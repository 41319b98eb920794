"""Buffers while the virtual towers of a step run one after the other.

Every virtual tower starts from the buffers as they were before the step. Afterwards a floating-point buffer that some
have changed is the mean of what it became on those that had examples (batch norm's running statistics), and an integer
one is what those that changed it made of it, which must be the same (batch norm's counter).

[Note: element by element] Means are taken element by element where any virtual tower has changed an element: what
nobody changes keeps its bits (a mean of five equal numbers need not), and a mask of infinities stays one. Batch norm's
running statistics are written without a new version of the tensor, so buffers of up to 16 KB are compared; a larger one
counts as changed when its version is another one. One tower may keep a model that others dropped: buffers that not all
towers have are left alone.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirrored.virtual.packs import Buffer, Pack, narrow, real, wide
from towers.errors import MirrorError
from towers.system.extremes import concatenated
from towers.system.host_copy import HostCopy
from towers.system.torch_private import own_buffers


class StepBuffers:
    """All buffers of some modules, in one order.

    Args:
        modules: with their names.

    Attributes:
        count: how many tensors :meth:`take` gives.
        layout: a digest of what buffers there are.
        names: the buffers' names.
        written: how many of this tower's virtual towers have changed a large floating-point buffer in this step.
        differing: names of integer buffers of which this tower's virtual towers made different things, on a CPU in this
            step, on a GPU in an earlier one.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        modules = list(modules)
        self._tensors = registered(module for _, module in modules)
        self._shapes = list(map(Tensor.size, self._tensors))
        buffers = [
            Buffer(f"{name}.{key}", module, key, tensor)
            for name, module in modules
            for key, tensor in own_buffers(module).items()
            if tensor is not None
        ]
        self._alone = [buffer for buffer in buffers if buffer.is_integer or not buffer.is_small]
        self._large = [buffer for buffer in self._alone if not buffer.is_integer]
        self._integers = {buffer.name: buffer for buffer in buffers if buffer.is_integer}
        small: dict[tuple[torch.device, torch.dtype], list[Buffer]] = {}
        for buffer in buffers:
            if buffer.is_small and not buffer.is_integer:
                small.setdefault((buffer.tensor.device, buffer.tensor.dtype), []).append(buffer)
        # In one order on all towers: a model that some tower has dropped may hold the first buffer of a dtype.
        self._small = [Pack(small[kind]) for kind in sorted(small, key=str)]
        self._firsts: dict[str, Tensor] = {}
        self._doubts: dict[str, Tensor] = {}
        self._unread: deque[tuple[list[str], HostCopy]] = deque()  # doubts of earlier steps
        self.written: dict[str, int] = {}
        self.differing: list[str] = []
        self.count = 2 * len(self._small) + len(self._large)
        described = [(b.name, str(b.tensor.dtype), tuple(b.tensor.shape)) for b in buffers]
        self.layout = hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()
        self.names = [buffer.name for buffer in buffers]

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether these are all the buffers there are, in their shapes."""
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return same and list(map(Tensor.size, tensors)) == self._shapes

    @property
    def counted(self) -> list[str]:
        """Names of the integer buffers that this step has changed on this tower."""
        return list(self._firsts)

    @torch.no_grad()
    def begin(self) -> None:
        """A step begins: remember the values."""
        if self._doubts:
            values = concatenated([doubt.view(1) for doubt in self._doubts.values()])
            self._unread.append((list(self._doubts), HostCopy(values)))
        self._doubts, self._firsts, self.written, self.differing = {}, {}, {}, []
        while self._unread and self._unread[0][1].has_come():
            names, copy = self._unread.popleft()
            self.differing += itertools.compress(names, copy.get().tolist())
        for pack in self._small:
            pack.begin()
        for buffer in self._alone:
            buffer.begin()

    @torch.no_grad()
    def restore(self) -> None:
        """Give back the values from before the step."""
        for pack in self._small:
            pack.write(pack.before)
        for buffer in self._alone:
            if buffer.was_written:
                buffer.set(buffer.before)

    @torch.no_grad()
    def take(self) -> list[Tensor | None]:
        """The floating-point buffers after a virtual tower's forward, to be added up.

        Small ones of a dtype as one tensor, and another one that says which of their elements have changed; of the
        large ones those that were written to. See [Note: element by element].
        """
        taken: list[Tensor | None] = []
        for pack in self._small:
            now = pack.read()
            taken += [now, (now != pack.before).to(now.dtype)]
        for buffer in self._large:
            written = buffer.was_written
            taken.append(wide(buffer.now).clone() if written else None)
            if written:
                self.written[buffer.name] = self.written.get(buffer.name, 0) + 1
        for name, buffer in self._integers.items():
            if buffer.was_written:
                value = buffer.now.clone()
                if name in self._firsts:
                    self._note_difference(name, self._firsts[name], value)
                else:
                    self._firsts[name] = value
        return taken

    def packed(
        self, sums: Sequence[Tensor | None], common: set[str], written: set[str], counted: Sequence[str]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that all towers gather: floating-point sums, and integers for :meth:`agreed`.

        Args:
            sums: the sums of what :meth:`take` gave; None for zeros.
            common: the names of buffers that all towers have.
            written, counted: those of large and integer ones that any tower has changed.
        """
        like = [t for pack in self._small for t in (pack.before, pack.before)]
        like += [wide(buffer.before) for buffer in self._large]
        full = [torch.zeros_like(a) if b is None else b for a, b in zip(like, sums, strict=True)]
        floats = []
        for number, pack in enumerate(self._small):
            chosen = _mask(pack.buffers, common)
            floats += [full[2 * number][chosen], full[2 * number + 1][chosen]]
        large = zip(self._large, full[2 * len(self._small) :], strict=True)
        floats += [total for buffer, total in large if buffer.name in written]
        return floats, [self._firsts.get(name, self._integers[name].before) for name in counted]

    def agreed(
        self, counted: Sequence[str], rows: Sequence[Sequence[Tensor]], changed: Sequence[Sequence[str]]
    ) -> dict[str, Tensor]:
        """The integers that towers have changed, by name.

        Args:
            counted: as in :meth:`packed`.
            rows: by tower, its integers.
            changed: by tower, names of those that it has changed.

        Raises:
            MirrorError: on all towers alike, where several have made different things of one. On GPUs it is among
                :attr:`differing` in a later step.
        """
        readable = all(map(_can_be_read, rows[0]))
        if readable and all(torch.equal(*pair) for row in rows[1:] for pair in zip(rows[0], row, strict=True)):
            return dict(zip(counted, rows[0], strict=True))
        agreed: dict[str, Tensor] = {}
        for row, names in zip(rows, changed, strict=True):
            for name, value in zip(counted, row, strict=True):
                if name in names:
                    self._note_difference(name, agreed.setdefault(name, value), value)
        for name in self.differing:
            self.refuse(name)
        return agreed

    def finish(
        self,
        floats: Sequence[Tensor],
        integers: Mapping[str, Tensor],
        common: set[str],
        written: Mapping[str, int],
        leaves: int,
    ) -> None:
        """Give the buffers the values after the step.

        Args:
            floats, common: as in :meth:`packed`, the floats added up over all towers.
            integers: what :meth:`agreed` returned.
            written: how many virtual towers have changed a large buffer.
            leaves: how many virtual towers had examples.
        """
        remaining = iter(floats)
        for pack in self._small:
            chosen = _mask(pack.buffers, common)
            after = pack.before.clone()
            total, changes = next(remaining), next(remaining)
            after[chosen] = torch.where(changes == 0, pack.before[chosen], total / leaves)
            pack.write(after)
        for buffer in self._large:
            if (count := written.get(buffer.name, 0)) > 0:
                total = next(remaining)
                if count < leaves:
                    total = total + wide(buffer.before) * (leaves - count)
                buffer.set(narrow(total / leaves, buffer.tensor))
        for name, value in integers.items():
            self._integers[name].set(value)

    def _note_difference(self, name: str, first: Tensor, other: Tensor) -> None:
        """Note whether an integer buffer is the same twice; on a GPU in a later step, so that nobody waits for it."""
        if _can_be_read(first):
            if not torch.equal(first, other):
                self.differing.append(name)
        else:
            doubt = (first != other).any()
            self._doubts[name] = self._doubts[name] | doubt if name in self._doubts else doubt

    def refuse(self, name: str) -> None:
        """Say that a buffer differs.

        Raises:
            MirrorError: always.
        """
        raise MirrorError(
            f"buffer {name}, an integer one, is not the same after all virtual towers of a step that changed it; "
            "integers cannot be averaged: let it count steps, not examples"
        )


def _can_be_read(tensor: Tensor) -> bool:
    """Whether looking at the values does not wait for a GPU."""
    return tensor.device.type == "cpu"


def registered(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The buffers that some modules have."""
    return [tensor for module in modules for tensor in own_buffers(module).values() if tensor is not None]


def _mask(buffers: Sequence[Buffer], common: set[str]) -> Any:
    """The elements, in the buffers' values one after the other, that belong to buffers that all towers have."""
    if all(buffer.name in common for buffer in buffers):
        return slice(None)
    flags = [torch.full((real(b.tensor).numel(),), b.name in common, device=b.tensor.device) for b in buffers]
    return torch.cat(flags)
