"""Buffers while the virtual towers of a step run one after the other.

Every virtual tower starts from the buffers as they were before the step. Afterwards a floating-point buffer that some
have changed is the mean of what it became on those that had examples (batch norm's running statistics), and an integer
one is what those that changed it made of it, which must be the same (batch norm's counter).
"""

from __future__ import annotations

import hashlib
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from towers.errors import MirrorError

_SMALL_BYTES = 2**14
"""Buffers up to this size are looked at whether or not they say that they were written to: batch norm updates its
running statistics without a new version. Larger ones (masks, tables) are believed."""


class Buffer:
    """One buffer: the module and the key it is registered under, and its value before the step.

    Attributes:
        name: what messages call it; the same on all towers.
        before: its value before the step; for small floating-point ones it lies elsewhere.
    """

    def __init__(self, name: str, module: nn.Module, key: str, tensor: Tensor) -> None:
        self.name = name
        self._module = weakref.ref(module)
        self._key = key
        self.tensor = tensor
        self.before = torch.empty(0)
        self._version = -1

    @property
    def is_integer(self) -> bool:
        return not self.tensor.is_floating_point() and not self.tensor.is_complex()

    @property
    def is_small(self) -> bool:
        """Whether it is compared by value; not where its elements share memory, so that it cannot be written whole."""
        layout = zip(self.tensor.stride(), self.tensor.shape, strict=True)
        return self.tensor.nbytes <= _SMALL_BYTES and not any(stride == 0 and size > 1 for stride, size in layout)

    @property
    def _registered(self) -> Tensor | None:
        module = self._module()
        return module._buffers.get(self._key) if module is not None else self.tensor

    @property
    def now(self) -> Tensor:
        """What is registered now; the forward may have put another tensor there.

        Raises:
            MirrorError: it is of another shape or dtype.
        """
        found = self._registered
        if found is None or found.shape != self.tensor.shape or found.dtype != self.tensor.dtype:
            raise MirrorError(
                f"buffer {self.name} was {self.tensor.dtype} of shape {tuple(self.tensor.shape)}, and the forward of a "
                "virtual tower made something else of it: all virtual towers of a step start from the same buffers"
            )
        return found

    @property
    def was_written(self) -> bool:
        if self._registered is not self.tensor or self.tensor._version != self._version:
            return True
        on_cpu = self.tensor.device.type == "cpu"
        return self.is_integer and self.is_small and on_cpu and not torch.equal(self.tensor, self.before)

    def begin(self) -> None:
        """A step begins: keep the value, unless it is still the one that was kept last."""
        if self.tensor._version != self._version or self.is_small:
            self.before = self.tensor.detach().clone()
            self._version = self.tensor._version

    def set(self, value: Tensor) -> None:
        """Give the registered tensor a value, and see that it is the one that was there before the step."""
        if (module := self._module()) is not None:
            module._buffers[self._key] = self.tensor
        self.tensor.copy_(value)
        self._version = -1 if value is not self.before else self.tensor._version


class StepBuffers:
    """All buffers of some modules, in one order.

    Args:
        modules: with their names.

    Attributes:
        count: how many tensors :meth:`take` gives.
        layout: a digest of what buffers there are.
        names: of all buffers.
        written: how many of this tower's virtual towers have changed a large floating-point buffer in this step.
        differing: names of integer buffers of which this tower's virtual towers made different things in this step.
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
        self._large: list[Buffer] = []
        self._integers: dict[str, Buffer] = {}
        for buffer in found:
            if buffer.is_integer:
                self._integers[buffer.name] = buffer
            elif buffer.is_small:
                self._small.setdefault(_wide(buffer.tensor).dtype, []).append(buffer)
            else:
                self._large.append(buffer)
        self._before: list[Tensor] = []
        self._firsts: dict[str, Tensor] = {}
        self._doubts: dict[str, Tensor] = {}
        self.written: dict[str, int] = {}
        self.differing: list[str] = []
        self.count = 2 * len(self._small) + len(self._large)
        described = [(b.name, str(b.tensor.dtype), tuple(b.tensor.shape)) for b in found]
        self.layout = hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()
        self.names = [buffer.name for buffer in found]

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether these are all the buffers there are."""
        return len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))

    @property
    def counted(self) -> list[str]:
        """Names of the integer buffers that this step has changed on this tower."""
        return list(self._firsts)

    def begin(self) -> None:
        """A step begins: remember the values.

        Raises:
            MirrorError: virtual towers on a GPU made different things of an integer buffer in the step before.
        """
        for name, doubt in self._doubts.items():
            if doubt:
                self.refuse(name)
        self._doubts, self._firsts, self.written, self.differing = {}, {}, {}, []
        self._before = [_flat(buffers) for buffers in self._small.values()]
        for buffer in self._others():
            buffer.begin()

    def _others(self) -> list[Buffer]:
        return [*self._large, *self._integers.values()]

    def restore(self) -> None:
        """Give back the values from before the step."""
        for before, buffers in zip(self._before, self._small.values(), strict=True):
            _spread(before, buffers)
        for buffer in self._others():
            if buffer.was_written:
                buffer.set(buffer.before)

    def take(self) -> list[Tensor | None]:
        """After a virtual tower's forward, to be added up: what the floating-point buffers have become.

        Small ones of a dtype as one tensor, and another one that says which of their elements have changed; of the
        large ones those that were written to.
        """
        found: list[Tensor | None] = []
        for before, buffers in zip(self._before, self._small.values(), strict=True):
            now = _flat(buffers)
            found += [now, (now != before).to(now.dtype)]
        for buffer in self._large:
            written = buffer.was_written
            found.append(_wide(buffer.now).clone() if written else None)
            if written:
                self.written[buffer.name] = self.written.get(buffer.name, 0) + 1
        for name, buffer in self._integers.items():
            if buffer.was_written:
                if name in self._firsts:
                    self._compare(name, self._firsts[name], buffer.now)
                else:
                    self._firsts[name] = buffer.now.clone()
        return found

    def travelling(
        self, sums: Sequence[Tensor | None], kept: set[str], written: set[str], counted: Sequence[str]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What towers exchange: floating-point sums, which are added up, and integers, which are compared.

        Args:
            sums: of what :meth:`take` gave, None for zeros.
            kept: the names of buffers that all towers have.
            written, counted: those of large and integer ones that any tower has changed.
        """
        like = [t for before in self._before for t in (before, before)] + [_wide(b.before) for b in self._large]
        full = [torch.zeros_like(a) if b is None else b for a, b in zip(like, sums, strict=True)]
        floats = []
        for number, buffers in enumerate(self._small.values()):
            chosen = _mask(buffers, kept)
            floats += [full[2 * number][chosen], full[2 * number + 1][chosen]]
        large = zip(self._large, full[2 * len(self._small) :], strict=True)
        floats += [total for buffer, total in large if buffer.name in written]
        return floats, [self._firsts.get(name, self._integers[name].before) for name in counted]

    def settle(
        self,
        floats: Sequence[Tensor],
        integers: Sequence[Tensor],
        kept: set[str],
        written: Mapping[str, int],
        counted: Sequence[str],
        leaves: int,
    ) -> None:
        """Give the buffers the values after the step.

        Args:
            floats, integers, kept, counted: as of :meth:`travelling`, the floats added up over all towers.
            written: how many virtual towers have changed a large buffer.
            leaves: how many virtual towers had examples.
        """
        remaining = iter(floats)
        for before, buffers in zip(self._before, self._small.values(), strict=True):
            chosen = _mask(buffers, kept)
            after = before.clone()
            total, changes = next(remaining), next(remaining)
            after[chosen] = torch.where(changes == 0, before[chosen], total / leaves)
            _spread(after, buffers)
        for buffer in self._large:
            if (count := written.get(buffer.name, 0)) > 0:
                total = next(remaining)
                if count < leaves:
                    total = total + _wide(buffer.before) * (leaves - count)
                buffer.set(_narrow(total / leaves, buffer.tensor))
        for name, value in zip(counted, integers, strict=True):
            self._integers[name].set(value)

    def compare(self, rows: Sequence[dict[str, Tensor]]) -> None:
        """See that integers are equal where several towers have changed them.

        Args:
            rows: by tower, the integers that it has changed.

        Raises:
            MirrorError: on all towers alike (on GPUs by the next :meth:`begin`).
        """
        firsts: dict[str, Tensor] = {}
        for row in rows:
            for name, value in row.items():
                self._compare(name, firsts.setdefault(name, value), value)
        for name in self.differing:
            self.refuse(name)

    def _compare(self, name: str, first: Tensor, other: Tensor) -> None:
        """Note whether an integer buffer is the same twice; on a GPU in the next step, so that nobody waits for it."""
        if first.device.type == "cpu":
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


def registered(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The buffers that some modules have."""
    return [tensor for module in modules for tensor in module._buffers.values() if tensor is not None]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(tensor: Tensor) -> Tensor:
    """As real numbers of 32 bits or more."""
    real = _real(tensor)
    return real.to(torch.promote_types(real.dtype, torch.float32))


def _narrow(value: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(value) if like.is_complex() else value


def _flat(buffers: Sequence[Buffer]) -> Tensor:
    return torch.cat([_wide(buffer.now).reshape(-1) for buffer in buffers])


def _spread(flat: Tensor, buffers: Sequence[Buffer]) -> None:
    pieces = flat.split([_real(buffer.tensor).numel() for buffer in buffers])
    for buffer, piece in zip(buffers, pieces, strict=True):
        buffer.set(_narrow(piece.view(_real(buffer.tensor).shape), buffer.tensor))


def _mask(buffers: Sequence[Buffer], kept: set[str]) -> Any:
    """Which elements of the buffers' values, one after the other, belong to those that all towers have."""
    if all(buffer.name in kept for buffer in buffers):
        return slice(None)
    flags = [torch.full((_real(b.tensor).numel(),), b.name in kept, device=b.tensor.device) for b in buffers]
    return torch.cat(flags)
