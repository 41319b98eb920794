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
        before: its value before the step.
    """

    def __init__(self, name: str, module: nn.Module, key: str, tensor: Tensor) -> None:
        self.name = name
        self._module = weakref.ref(module)
        self.key = key
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
    def home(self) -> dict[str, Tensor | None]:
        """Where it is registered; where its module is gone, it still is."""
        module = self._module()
        return module._buffers if module is not None else {self.key: self.tensor}

    @property
    def now(self) -> Tensor:
        """What is registered now; the forward may have put another tensor there.

        Raises:
            MirrorError: it is of another shape or dtype.
        """
        found = self.home.get(self.key)
        if found is None or found.shape != self.tensor.shape or found.dtype != self.tensor.dtype:
            raise MirrorError(
                f"buffer {self.name} was {self.tensor.dtype} of shape {tuple(self.tensor.shape)}, and the forward of a "
                "virtual tower made something else of it: all virtual towers of a step start from the same buffers"
            )
        return found

    @property
    def was_written(self) -> bool:
        """Whether it has another version than before, or another tensor is registered."""
        return self.home.get(self.key) is not self.tensor or self.tensor._version != self._version

    def begin(self) -> None:
        """A step begins: keep the value, unless it is still the one that was kept last."""
        if self.tensor._version != self._version:
            self.before = self.tensor.detach().clone()
            self._version = self.tensor._version

    def set(self, value: Tensor) -> None:
        """Give the registered tensor a value, and see that it is the one that was there before the step."""
        self.home[self.key] = self.tensor
        self.tensor.copy_(value)
        self._version = -1 if value is not self.before else self.tensor._version


class Pack:
    """Small buffers that are read and written as one tensor: a model has dozens, and every virtual tower looks at all.

    Args:
        buffers: floating-point or complex ones, or integer ones of one dtype.

    Attributes:
        before: their values before the step, one after the other; as real numbers of 32 bits or more, or as integers.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self._own = [buffer.tensor for buffer in buffers]
        self._keys = [buffer.key for buffer in buffers]
        self._homes = [buffer.home for buffer in buffers]
        self._places: list[int] = []
        self.before = self.read()
        self._pieces = self.pieces(self.before)

    def begin(self) -> None:
        """A step begins: keep the values."""
        self._homes = [buffer.home for buffer in self.buffers]
        self.before.copy_(self.read())

    def read(self) -> Tensor:
        """The values now.

        Raises:
            MirrorError: the forward has put a tensor of another shape or dtype in the place of one.
        """
        self._look()
        rows = self._flat
        if len(rows) < len(self._own) or not self._are_in_place():
            rows = [_real(buffer.now).reshape(-1) for buffer in self.buffers]
        values = torch.cat(rows)
        return _wide(values) if values.is_floating_point() else values

    def write(self, values: Tensor) -> None:
        """Give all of them values."""
        self._look()
        if not self._are_in_place():
            for buffer in self.buffers:
                buffer.home[buffer.key] = buffer.tensor
        pieces = self._pieces if values is self.before else self.pieces(values)
        torch._foreach_copy_(self._tensors, pieces)

    def pieces(self, values: Tensor) -> list[Tensor]:
        """Each buffer's part of such a tensor, in its shape."""
        rows = values.split([tensor.numel() for tensor in self._tensors])
        return [row.view(tensor.shape) for row, tensor in zip(rows, self._tensors, strict=True)]

    def _look(self) -> None:
        """Have the tensors at hand, as real numbers, in the memory they have now: ``buffer.data = …`` moves them."""
        places = list(map(Tensor.data_ptr, self._own))
        if places != self._places:
            self._places = places
            self._tensors = [_real(tensor.detach()) for tensor in self._own]
            self._flat = [tensor.view(-1) for tensor in self._tensors if tensor.is_contiguous()]

    def _are_in_place(self) -> bool:
        """Whether the tensors that were registered before the step still are."""
        return all(map(operator.is_, map(dict.get, self._homes, self._keys), self._own))


class IntegerPack(Pack):
    """As :class:`Pack`, of integer buffers of one dtype: what was written to is asked one by one."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        super().__init__(buffers)
        for buffer, piece in zip(buffers, self._pieces, strict=True):
            buffer.before = piece

    def begin(self) -> None:
        super().begin()
        self._versions = self._current_versions()
        self._last: tuple[list[bool], Tensor] | None = None

    def written(self) -> list[tuple[Buffer, Tensor]]:
        """Those that a virtual tower has written to, and a copy of what it wrote.

        None when it has left all as the virtual tower before it did.

        Raises:
            MirrorError: as of :meth:`read`.
        """
        flags, values, last = self._flags(), self.read(), self._last
        self._last = flags, values
        on_cpu = values.device.type == "cpu"  # nobody waits for a GPU
        if on_cpu and last is not None and last[0] == flags and torch.equal(last[1], values):
            return []
        return self._changed(flags, values)

    def restore(self) -> None:
        """Give those that were written to the values from before the step."""
        flags = self._flags()
        if all(flags):
            self.write(self.before)
        else:
            for buffer, _ in self._changed(flags, self.read()):
                buffer.set(buffer.before)
        self._versions = self._current_versions()

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Give some of them, by name, values."""
        found = [values.get(buffer.name) for buffer in self.buffers]
        given = [value.reshape(-1) for value in found if value is not None]
        if len(given) == len(found):
            self.write(torch.cat(given))
        else:
            for buffer, value in zip(self.buffers, found, strict=True):
                if value is not None:
                    buffer.set(value)

    def _changed(self, flags: Sequence[bool], values: Tensor) -> list[tuple[Buffer, Tensor]]:
        """Those that were written to, with their values: they say so or, on a CPU, have another one."""
        on_cpu = values.device.type == "cpu"
        pieces = zip(self.buffers, flags, self.pieces(values), self._pieces, strict=True)
        return [(buffer, now) for buffer, says, now, was in pieces if says or (on_cpu and not torch.equal(now, was))]

    def _current_versions(self) -> list[int]:
        return [tensor._version for tensor in self._own]

    def _flags(self) -> list[bool]:
        """Which of them have another version than before, or are not the registered tensor any more."""
        flags = list(map(operator.ne, self._current_versions(), self._versions))
        if not self._are_in_place():
            flags = [says or b.home.get(b.key) is not b.tensor for says, b in zip(flags, self.buffers, strict=True)]
        return flags


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
        self._alone = [buffer for buffer in found if not buffer.is_small]
        self._large = [buffer for buffer in self._alone if not buffer.is_integer]
        self._integers = {buffer.name: buffer for buffer in found if buffer.is_integer}
        small: dict[torch.dtype, list[Buffer]] = {}
        for buffer in found:
            if buffer.is_small:
                dtype = buffer.tensor.dtype if buffer.is_integer else _wide(buffer.tensor).dtype
                small.setdefault(dtype, []).append(buffer)
        self._small = [Pack(buffers) for dtype, buffers in small.items() if dtype.is_floating_point]
        self._counters = [IntegerPack(buffers) for dtype, buffers in small.items() if not dtype.is_floating_point]
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
        for pack in (*self._small, *self._counters):
            pack.begin()
        for buffer in self._alone:
            buffer.begin()

    def restore(self) -> None:
        """Give back the values from before the step."""
        for pack in self._small:
            pack.write(pack.before)
        for counters in self._counters:
            counters.restore()
        for buffer in self._alone:
            if buffer.was_written:
                buffer.set(buffer.before)

    def take(self) -> list[Tensor | None]:
        """After a virtual tower's forward, to be added up: what the floating-point buffers have become.

        Small ones of a dtype as one tensor, and another one that says which of their elements have changed; of the
        large ones those that were written to.
        """
        found: list[Tensor | None] = []
        for pack in self._small:
            now = pack.read()
            found += [now, (now != pack.before).to(now.dtype)]
        for buffer in self._large:
            written = buffer.was_written
            found.append(_wide(buffer.now).clone() if written else None)
            if written:
                self.written[buffer.name] = self.written.get(buffer.name, 0) + 1
        integers = [pair for counters in self._counters for pair in counters.written()]
        integers += [(b, b.now.clone()) for b in self._alone if b.is_integer and b.was_written]
        for buffer, value in integers:
            if buffer.name in self._firsts:
                self._compare(buffer.name, self._firsts[buffer.name], value)
            else:
                self._firsts[buffer.name] = value
        return found

    def travelling(
        self, sums: Sequence[Tensor | None], kept: set[str], written: set[str], counted: Sequence[str]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What towers exchange: floating-point sums, which are added up, and integers, for :meth:`agreed`.

        Args:
            sums: of what :meth:`take` gave, None for zeros.
            kept: the names of buffers that all towers have.
            written, counted: those of large and integer ones that any tower has changed.
        """
        like = [t for pack in self._small for t in (pack.before, pack.before)]
        like += [_wide(buffer.before) for buffer in self._large]
        full = [torch.zeros_like(a) if b is None else b for a, b in zip(like, sums, strict=True)]
        floats = []
        for number, pack in enumerate(self._small):
            chosen = _mask(pack.buffers, kept)
            floats += [full[2 * number][chosen], full[2 * number + 1][chosen]]
        large = zip(self._large, full[2 * len(self._small) :], strict=True)
        floats += [total for buffer, total in large if buffer.name in written]
        own = {name: self._firsts.get(name, self._integers[name].before) for name in counted}
        return floats, [torch.cat([own[name].reshape(-1) for name in names]) for names in self._by_dtype(counted)]

    def _by_dtype(self, counted: Sequence[str]) -> list[list[str]]:
        """Names of integer buffers in the groups that travel as one tensor."""
        groups: dict[torch.dtype, list[str]] = {}
        for name in counted:
            groups.setdefault(self._integers[name].tensor.dtype, []).append(name)
        return list(groups.values())

    def _named(self, counted: Sequence[str], packed: Sequence[Tensor]) -> dict[str, Tensor]:
        """The integers that travelled as ``packed``, by name."""
        found = {}
        for names, values in zip(self._by_dtype(counted), packed, strict=True):
            likes = [self._integers[name].tensor for name in names]
            for name, like, value in zip(names, likes, values.split([like.numel() for like in likes]), strict=True):
                found[name] = value.view(like.shape)
        return found

    def agreed(
        self, counted: Sequence[str], rows: Sequence[Sequence[Tensor]], changed: Sequence[Sequence[str]]
    ) -> dict[str, Tensor]:
        """The integers that towers have changed, by name.

        Args:
            counted: as of :meth:`travelling`.
            rows: by tower, the integers that travelled.
            changed: by tower, names of those that it has changed.

        Raises:
            MirrorError: on all towers alike (on GPUs by the next :meth:`begin`), where several have made different
                things of one.
        """
        on_cpu = all(tensor.device.type == "cpu" for tensor in rows[0])
        if on_cpu and all(torch.equal(*pair) for row in rows[1:] for pair in zip(rows[0], row, strict=True)):
            return self._named(counted, rows[0])
        found: dict[str, Tensor] = {}
        for row, names in zip(rows, changed, strict=True):
            named = self._named(counted, row)
            for name in set(names).intersection(counted):
                self._compare(name, found.setdefault(name, named[name]), named[name])
        for name in self.differing:
            self.refuse(name)
        return found

    def settle(
        self,
        floats: Sequence[Tensor],
        integers: Mapping[str, Tensor],
        kept: set[str],
        written: Mapping[str, int],
        leaves: int,
    ) -> None:
        """Give the buffers the values after the step.

        Args:
            floats, kept: as of :meth:`travelling`, the floats added up over all towers.
            integers: what :meth:`agreed` returned.
            written: how many virtual towers have changed a large buffer.
            leaves: how many virtual towers had examples.
        """
        remaining = iter(floats)
        for pack in self._small:
            chosen = _mask(pack.buffers, kept)
            after = pack.before.clone()
            total, changes = next(remaining), next(remaining)
            after[chosen] = torch.where(changes == 0, pack.before[chosen], total / leaves)
            pack.write(after)
        for buffer in self._large:
            if (count := written.get(buffer.name, 0)) > 0:
                total = next(remaining)
                if count < leaves:
                    total = total + _wide(buffer.before) * (leaves - count)
                buffer.set(_narrow(total / leaves, buffer.tensor))
        for counters in self._counters:
            counters.set(integers)
        for buffer in self._alone:
            if buffer.name in integers:
                buffer.set(integers[buffer.name])

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


def _mask(buffers: Sequence[Buffer], kept: set[str]) -> Any:
    """Which elements of the buffers' values, one after the other, belong to those that all towers have."""
    if all(buffer.name in kept for buffer in buffers):
        return slice(None)
    flags = [torch.full((_real(b.tensor).numel(),), b.name in kept, device=b.tensor.device) for b in buffers]
    return torch.cat(flags)
