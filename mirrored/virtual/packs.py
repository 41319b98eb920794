"""Buffers of modules, one by one and, where they are small, dozens as one tensor.

[Note: small buffers as one tensor] Every virtual tower reads and writes all buffers, and one by one that took 0.9 ms
for the 60 of a ResNet. So small ones of a dtype are read and written as one tensor. Their memory stays where the model
has
it: views of it are joined and spread, and looked for anew where a script has moved it (``buffer.data = …``).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from towers.errors import MirrorError
from towers.system.torch_private import foreach_copy_, own_buffers

_SMALL_BYTES = 2**14
"""Buffers up to this size are compared whatever their version says: batch norm updates its running statistics without a
new version. For larger ones (masks, tables) the version decides."""

_COPIED_ALONE = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that copying several at once does not know on GPUs."""


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
        self._shape = tensor.shape
        self.before = torch.empty(0, device="cpu")
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
        """The dict in which it is registered; it outlives its module."""
        module = self._module()
        return own_buffers(module) if module is not None else {self.key: self.tensor}

    @property
    def now(self) -> Tensor:
        """The tensor that is registered now; the forward may have put another one there.

        Raises:
            MirrorError: it is of another shape or dtype.
        """
        registered = self.home.get(self.key)
        if registered is None or not self.fits(registered):
            raise MirrorError(
                f"buffer {self.name} was {self.tensor.dtype} of shape {tuple(self._shape)}, and the forward of a "
                "virtual tower made something else of it: all virtual towers of a step start from the same buffers"
            )
        return registered

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has the shape and dtype that the buffer had when it was found."""
        return tensor.shape == self._shape and tensor.dtype == self.tensor.dtype

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
    """Small buffers that are read and written as one tensor; see [Note: small buffers as one tensor].

    Args:
        buffers: on one device; floating-point or complex ones, or integer ones of one dtype.

    Attributes:
        before: their values before the step, one after the other; as real numbers of 32 bits or more, or as integers.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self._own = [buffer.tensor for buffer in buffers]
        self._keys = [buffer.key for buffer in buffers]
        self._homes = [buffer.home for buffer in buffers]
        self._places: list[list[Any]] = []
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
            rows = [real(buffer.now).reshape(-1) for buffer in self.buffers]
        values = torch.cat(rows)
        return wide(values) if values.is_floating_point() else values

    def write(self, values: Tensor) -> None:
        """Give all of them values."""
        self._look()
        if not self._are_in_place():
            for buffer in self.buffers:
                buffer.home[buffer.key] = buffer.tensor
        pieces = self._pieces if values is self.before else self.pieces(values)
        for dtype, indices in self._by_dtype.items():
            if dtype in _COPIED_ALONE:
                for index in indices:
                    self._tensors[index].copy_(pieces[index])
            else:  # of one dtype: GPUs have mixed up several (pytorch issue 173383)
                foreach_copy_([self._tensors[i] for i in indices], [pieces[i] for i in indices])

    def pieces(self, values: Tensor) -> list[Tensor]:
        """Each buffer's part of such a tensor, in its shape."""
        rows = values.split([tensor.numel() for tensor in self._tensors])
        return [row.view(tensor.shape) for row, tensor in zip(rows, self._tensors, strict=True)]

    def _look(self) -> None:
        """Have the tensors at hand, as real numbers, in the memory they have now: ``buffer.data = …`` moves them."""
        places = [list(map(ask, self._own)) for ask in (Tensor.data_ptr, Tensor.size, Tensor.stride)]
        if places != self._places:
            self._places = places
            self._tensors = [real(tensor.detach()) for tensor in self._own]
            fitting = zip(self._tensors, self.buffers, strict=True)
            self._flat = [tensor.view(-1) for tensor, b in fitting if b.fits(b.tensor) and tensor.is_contiguous()]
            self._by_dtype: dict[torch.dtype, list[int]] = {}
            for index, tensor in enumerate(self._tensors):
                self._by_dtype.setdefault(tensor.dtype, []).append(index)

    def _are_in_place(self) -> bool:
        """Whether the tensors that were registered before the step still are."""
        return all(map(operator.is_, map(dict.get, self._homes, self._keys), self._own))


class IntegerPack(Pack):
    """As :class:`Pack`, of integer buffers of one dtype: what was written to is asked one by one."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        super().__init__(buffers)
        for buffer, piece in zip(buffers, self._pieces, strict=True):
            buffer.before = piece
        self._on_cpu = self.before.device.type == "cpu"  # nobody waits for a GPU

    def begin(self) -> None:
        super().begin()
        self._versions = self._current_versions()
        self._last: tuple[list[bool], Tensor] | None = None

    def written(self) -> list[tuple[Buffer, Tensor]]:
        """Those that a virtual tower has written to, and a copy of what it wrote.

        They say so or, on a CPU, have another value. None when it has left all as the virtual tower before it did.

        Raises:
            MirrorError: as of :meth:`read`.
        """
        flags, values, last = self._flags(), self.read(), self._last
        self._last = flags, values
        if self._on_cpu and last is not None and last[0] == flags and torch.equal(last[1], values):
            return []
        pieces = zip(self.buffers, flags, self.pieces(values), self._pieces, strict=True)
        return [(b, now) for b, says, now, was in pieces if says or (self._on_cpu and not torch.equal(now, was))]

    def restore(self) -> None:
        """Give those that were written to the values from before the step; also what has become no such buffer."""
        flags = self._flags()
        if all(flags):
            self.write(self.before)
        else:
            for buffer, says in zip(self.buffers, flags, strict=True):
                if says or (self._on_cpu and not torch.equal(buffer.tensor, buffer.before)):
                    buffer.set(buffer.before)
        self._versions = self._current_versions()

    def set(self, values: Mapping[str, Tensor]) -> None:
        """Give some of them, by name, values."""
        values_here = [values.get(buffer.name) for buffer in self.buffers]
        pieces = [value.reshape(-1) for value in values_here if value is not None]
        if len(pieces) == len(values_here):
            self.write(torch.cat(pieces))
        else:
            for buffer, value in zip(self.buffers, values_here, strict=True):
                if value is not None:
                    buffer.set(value)

    def _current_versions(self) -> list[int]:
        return [tensor._version for tensor in self._own]

    def _flags(self) -> list[bool]:
        """For each whether it has another version than before, or is not the registered tensor any more."""
        flags = list(map(operator.ne, self._current_versions(), self._versions))
        if not self._are_in_place():
            flags = [says or b.home.get(b.key) is not b.tensor for says, b in zip(flags, self.buffers, strict=True)]
        return flags


def real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def wide(tensor: Tensor) -> Tensor:
    """As real numbers of 32 bits or more."""
    numbers = real(tensor)
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


def narrow(value: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`real`, for a tensor like ``like``."""
    return torch.view_as_complex(value) if like.is_complex() else value
