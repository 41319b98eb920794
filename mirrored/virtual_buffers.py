"""Buffers while the virtual towers of a step run one after the other.

Every virtual tower starts from the buffers as they were before the step. Afterwards a floating-point buffer has changed
by the mean of what the virtual towers that had examples changed it by (batch norm's running statistics), and an integer
one is what virtual tower 0 made of it, which must be what all made of it (batch norm's counter).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from towers.errors import MirrorError

_SMALL_BYTES = 2**20
"""Floating-point buffers up to this size are looked at whether or not they say that they were written to: batch norm
updates its running statistics without a new version. Larger ones (masks, tables) are believed."""


class Buffer:
    """One buffer: the module and the key it is registered under, and its value before the step.

    Attributes:
        name: what messages call it.
        before: its value before the step; for small floating-point ones it lies elsewhere.
    """

    def __init__(self, name: str, module: nn.Module, key: str, tensor: Tensor) -> None:
        self.name, self._module, self._key = name, module, key
        self.tensor = tensor
        self.before = torch.empty(0)
        self._version = -1

    @property
    def is_integer(self) -> bool:
        return not self.tensor.is_floating_point() and not self.tensor.is_complex()

    @property
    def now(self) -> Tensor:
        """What is registered now; the forward may have put another tensor there.

        Raises:
            MirrorError: it is of another shape or dtype.
        """
        found = self._module._buffers.get(self._key)
        if found is None or found.shape != self.tensor.shape or found.dtype != self.tensor.dtype:
            raise MirrorError(
                f"buffer {self.name} was {self.tensor.dtype} of shape {tuple(self.tensor.shape)}, and the forward of a "
                "virtual tower made something else of it: all virtual towers of a step start from the same buffers"
            )
        return found

    @property
    def was_written(self) -> bool:
        return self.now is not self.tensor or self.tensor._version != self._version

    def begin(self) -> None:
        """A step begins: keep the value, unless it is still the one that was kept last."""
        if self.tensor._version != self._version:
            self.before = self.tensor.detach().clone()
            self._version = self.tensor._version

    def set(self, value: Tensor) -> None:
        """Give the registered tensor a value, and see that it is the one that was there before the step."""
        self._module._buffers[self._key] = self.tensor
        self.tensor.copy_(value)
        self._version = -1 if value is not self.before else self.tensor._version


class StepBuffers:
    """All buffers of some modules, in one order on all towers.

    Args:
        modules: with their names.

    Attributes:
        count: how many tensors :meth:`take` gives.
        differing: of which integer buffers this tower's virtual towers made different things in this step, by place.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        modules = list(modules)
        self._tensors = registered(module for _, module in modules)
        found = [
            Buffer(f"{name}.{key}", module, key, tensor)
            for name, module in modules
            for key, tensor in module._buffers.items()
            if tensor is not None
        ]
        self._small: dict[torch.dtype, list[Buffer]] = {}
        self._others: list[Buffer] = []
        for buffer in found:
            if buffer.is_integer or buffer.tensor.nbytes > _SMALL_BYTES:
                self._others.append(buffer)
            else:
                self._small.setdefault(_wide(buffer.tensor), []).append(buffer)
        self._before: list[Tensor] = []
        self._firsts: dict[int, Tensor] = {}
        self._doubts: dict[int, Tensor] = {}
        self.differing: list[int] = []
        self.count = len(self._small) + sum(not buffer.is_integer for buffer in self._others)

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether these are all the buffers there are."""
        return len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))

    @property
    def changed(self) -> list[int]:
        """Which of the buffers that are neither small nor floating-point this step has changed on this tower."""
        return sorted(self._firsts)

    def begin(self) -> None:
        """A step begins: remember the values.

        Raises:
            MirrorError: virtual towers on a GPU made different things of an integer buffer in the step before.
        """
        for place, doubt in self._doubts.items():
            if doubt:
                self.refuse(place)
        self._doubts = {}
        self.differing = []
        self._before = [_flat(dtype, buffers) for dtype, buffers in self._small.items()]
        self._firsts = {}
        for buffer in self._others:
            buffer.begin()

    def restore(self) -> None:
        """Give back the values from before the step."""
        for before, buffers in zip(self._before, self._small.values(), strict=True):
            _spread(before, buffers)
        for buffer in self._others:
            if buffer.was_written:
                buffer.set(buffer.before)

    def take(self) -> list[Tensor | None]:
        """After a virtual tower's forward: what it has changed the floating-point buffers by, to be added up."""
        changes: list[Tensor | None] = [
            _change(_flat(dtype, buffers), before)
            for (dtype, buffers), before in zip(self._small.items(), self._before, strict=True)
        ]
        for place, buffer in enumerate(self._others):
            written = buffer.was_written
            if not buffer.is_integer:
                changes.append(_change(_real(buffer.now), _real(buffer.before)) if written else None)
                if written:
                    self._firsts.setdefault(place, buffer.before)
            elif place not in self._firsts and written:
                self._firsts[place] = buffer.now.clone()
            elif place in self._firsts:
                self._compare(place, self._firsts[place], buffer.now)
        return changes

    def travelling(self, changes: Sequence[Tensor | None], places: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """What towers exchange: floating-point changes, which are added up, and integers, which are compared.

        Args:
            changes: the sum of what :meth:`take` gave, None for zeros.
            places: :attr:`changed`, of any tower.
        """
        like = [*self._before, *(_real(buffer.before) for buffer in self._others if not buffer.is_integer)]
        full = [torch.zeros_like(a) if b is None else b for a, b in zip(like, changes, strict=True)]
        small, large = full[: len(self._before)], iter(full[len(self._before) :])
        floats = small + [
            change
            for place, change in ((p, next(large)) for p, b in enumerate(self._others) if not b.is_integer)
            if place in places
        ]
        integers = [
            self._firsts.get(place, self._others[place].before) for place in places if self._others[place].is_integer
        ]
        return floats, integers

    def settle(self, floats: Sequence[Tensor], integers: Sequence[Tensor], places: Sequence[int], leaves: int) -> None:
        """Give the buffers the values after the step.

        Args:
            floats, integers, places: as of :meth:`travelling`, the floats added up over all towers.
            leaves: how many virtual towers had examples.
        """
        remaining = iter(floats)
        for before, buffers in zip(self._before, self._small.values(), strict=True):
            _spread(_moved(before, next(remaining), leaves), buffers)
        whole = iter(integers)
        for place in places:
            buffer = self._others[place]
            if buffer.is_integer:
                buffer.set(next(whole))
            else:
                value = _moved(_real(buffer.before), next(remaining), leaves)
                buffer.set(torch.view_as_complex(value) if buffer.tensor.is_complex() else value)

    def _compare(self, place: int, first: Tensor, other: Tensor) -> None:
        """Note whether an integer buffer is the same twice; on a GPU in the next step, so that nobody waits for it."""
        if first.device.type == "cpu":
            if not torch.equal(first, other):
                self.differing.append(place)
        else:
            doubt = (first != other).any()
            self._doubts[place] = self._doubts[place] | doubt if place in self._doubts else doubt

    def refuse(self, place: int) -> None:
        """Say that a buffer differs.

        Raises:
            MirrorError: always.
        """
        raise MirrorError(
            f"buffer {self._others[place].name}, an integer one, is not the same after all virtual towers of a step; "
            "integers cannot be averaged: let it count steps, not examples"
        )

    def compare(self, rows: Sequence[Sequence[Tensor]], places: Sequence[int]) -> None:
        """See that the towers' integers are equal.

        Args:
            rows: ``integers`` of :meth:`travelling` of every tower that had examples.

        Raises:
            MirrorError: on all towers alike (on GPUs by the next :meth:`begin`).
        """
        of_integers = [place for place in places if self._others[place].is_integer]
        for row in rows[1:]:
            for place, mine, first in zip(of_integers, row, rows[0], strict=True):
                self._compare(place, first, mine)
        if self.differing:
            self.refuse(self.differing[0])


def registered(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The buffers that some modules have."""
    return [tensor for module in modules for tensor in module._buffers.values() if tensor is not None]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype, torch.float32)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(dtype: torch.dtype, buffers: Sequence[Buffer]) -> Tensor:
    return torch.cat([_real(buffer.now).reshape(-1).to(dtype) for buffer in buffers])


def _spread(flat: Tensor, buffers: Sequence[Buffer]) -> None:
    pieces = flat.split([_real(buffer.tensor).numel() for buffer in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        real = _real(buffer.tensor)
        value = piece.view(real.shape)
        buffer.set(torch.view_as_complex(value) if buffer.tensor.is_complex() else value)


def _change(now: Tensor, before: Tensor) -> Tensor:
    """Zero where nothing changed, also where both are infinite."""
    return torch.where(now == before, torch.zeros_like(now), now - before)


def _moved(before: Tensor, total: Tensor, leaves: int) -> Tensor:
    return torch.where(total == 0, before, before + total / leaves)
