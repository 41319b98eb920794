"""Handling of buffers while the virtual towers of a step run one after another.

Every virtual tower starts with the values from before the step. After the step, a floating-point buffer that some
virtual towers changed is the mean of its values on the virtual towers with examples (BatchNorm's running statistics).
An integer buffer has the value of the virtual towers that changed it, which must be equal (BatchNorm's counter).

[Note: element by element] A mean is computed only for elements that any virtual tower has changed. Unchanged elements
keep their bits (the mean of five equal numbers may have other bits), and a mask of infinities is preserved. BatchNorm's
running statistics are written without a new version of the tensor, so buffers of up to 16 KB are compared by value. A
larger buffer counts as changed if its version has changed. One tower may keep a model that others have dropped, so
buffers that not all towers have are not changed.

[Note: small buffers as one tensor] Every virtual tower reads and writes all buffers. The times are for a ResNet-18. One
by one, its buffers took 2.9 ms of CPU time of a step of 50 ms with 2 virtual towers of 4 examples. With 8 virtual
towers of one example, they took 7.2 of 92 ms. So the small floating-point buffers of a dtype are read and written as
one tensor, which takes 1.1 and 2.7 ms. Doing so with integer buffers would save another 0.2 ms.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from towers.errors import MirrorError
from towers.system.tensors import HostCopy, concatenated
from towers.system.torch_private import foreach_copy_, own_buffers

_SMALL_BYTES = 2**14
"""Buffers up to this size in bytes are compared by value, because BatchNorm updates its running statistics without a
new version. For larger buffers (masks, tables), the version is compared.
"""


class Buffer:
    """One buffer: its module, its key in the module, and its value before the step.

    Attributes:
        name: its name in messages, equal on all towers.
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
        self._by_value = self.is_integer and self.is_small and tensor.device.type == "cpu"  # never wait for a GPU

    @property
    def is_integer(self) -> bool:
        return not self.tensor.is_floating_point() and not self.tensor.is_complex()

    @property
    def is_small(self) -> bool:
        """Whether the buffer can be compared by value. It cannot be if its elements share memory.

        Such a buffer cannot be written whole.
        """
        layout = zip(self.tensor.stride(), self.tensor.shape, strict=True)
        return self.tensor.nbytes <= _SMALL_BYTES and not any(stride == 0 and size > 1 for stride, size in layout)

    @property
    def home(self) -> dict[str, Tensor | None]:
        """The dict in which the buffer is registered. The dict outlives its module."""
        module = self._module()
        return own_buffers(module) if module is not None else {self.key: self.tensor}

    @property
    def now(self) -> Tensor:
        """The tensor that is registered now. The forward may have replaced it.

        Raises:
            MirrorError: the tensor has another shape or dtype.
        """
        registered = self.home.get(self.key)
        if registered is None or not self.fits(registered):
            raise MirrorError(
                f"buffer {self.name} was {self.tensor.dtype} of shape {tuple(self._shape)}, and the forward of a "
                "virtual tower changed its dtype or shape: all virtual towers of a step start from the same "
                "buffers"
            )
        return registered

    def fits(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has the shape and dtype that the buffer had when it was found."""
        return tensor.shape == self._shape and tensor.dtype == self.tensor.dtype

    @property
    def was_written(self) -> bool:
        """Whether the tensor has another version than before, or another tensor is registered.

        For a small integer buffer on a CPU, also whether its value differs.
        """
        if self.home.get(self.key) is not self.tensor or self.tensor._version != self._version:
            return True
        return self._by_value and not (self.fits(self.tensor) and torch.equal(self.tensor, self.before))

    def begin(self) -> None:
        """Stores the value at the start of a step, unless the stored value is still current."""
        if self._by_value or self.tensor._version != self._version:
            self.before = self.tensor.detach().clone()
            self._version = self.tensor._version

    def set(self, value: Tensor) -> None:
        """Registers the tensor from before the step again, and sets its value."""
        self.home[self.key] = self.tensor
        self.tensor.copy_(value)
        self._version = -1 if value is not self.before else self.tensor._version


class Pack:
    """Small buffers that are read and written as one tensor; see [Note: small buffers as one tensor].

    Args:
        buffers: floating-point or complex buffers of one dtype, on one device.

    Attributes:
        before: the values before the step, concatenated, as real numbers of at least 32 bits.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = buffers
        self._tensors = [buffer.tensor for buffer in buffers]
        self.begin()

    def begin(self) -> None:
        """Stores the values at the start of a step."""
        self.before = self.read()
        self._pieces = self._cut(self.before)

    def read(self) -> Tensor:
        """Returns the current values.

        Raises:
            MirrorError: the forward has replaced a buffer by a tensor of another shape or dtype.
        """
        return wide(torch.cat([buffer.now.reshape(-1) for buffer in self.buffers])).reshape(-1)

    def write(self, values: Tensor) -> None:
        """Registers the tensors from before the step again, and sets their values."""
        for buffer in self.buffers:
            buffer.home[buffer.key] = buffer.tensor
        # Each call has only one dtype, because GPUs have mixed up several (pytorch issue 173383).
        foreach_copy_(self._tensors, self._pieces if values is self.before else self._cut(values))

    def _cut(self, values: Tensor) -> list[Tensor]:
        """Returns each buffer's values, in its shape."""
        if self._tensors[0].is_complex():
            values = torch.view_as_complex(values.view(-1, 2))
        rows = values.split([tensor.numel() for tensor in self._tensors])
        return [row.view(tensor.shape) for row, tensor in zip(rows, self._tensors, strict=True)]


def real(tensor: Tensor) -> Tensor:
    """Returns a view of the tensor as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def wide(tensor: Tensor) -> Tensor:
    """Returns the values as real numbers of at least 32 bits."""
    numbers = real(tensor)
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


def narrow(value: Tensor, like: Tensor) -> Tensor:
    """Reverses :func:`real` for a tensor of the kind of ``like``."""
    return torch.view_as_complex(value) if like.is_complex() else value


class StepBuffers:
    """All buffers of some modules, in a fixed order.

    Args:
        modules: the modules with their names.

    Attributes:
        count: the number of tensors that :meth:`take` returns.
        layout: a digest of the buffers' names, dtypes and shapes.
        names: the buffers' names.
        written: the number of this tower's virtual towers that have changed a large floating-point buffer in this step,
            by name.
        differing: names of integer buffers for which this tower's virtual towers computed different values: on a CPU in
            this step, on a GPU in an earlier step.
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
        # The order must be equal on all towers: a model that some tower has dropped may contain the first buffer of a
        # dtype.
        self._small = [Pack(small[kind]) for kind in sorted(small, key=str)]
        self._firsts: dict[str, Tensor] = {}
        self._doubts: dict[str, Tensor] = {}
        self._unread: deque[tuple[list[str], HostCopy]] = deque()  # differences of earlier steps
        self.written: dict[str, int] = {}
        self.differing: list[str] = []
        self.count = 2 * len(self._small) + len(self._large)
        described = [(b.name, str(b.tensor.dtype), tuple(b.tensor.shape)) for b in buffers]
        self.layout = hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()
        self.names = [buffer.name for buffer in buffers]

    def holds(self, tensors: list[Tensor]) -> bool:
        """Returns whether ``tensors`` are all the buffers, with unchanged shapes."""
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        return same and list(map(Tensor.size, tensors)) == self._shapes

    @property
    def counted(self) -> list[str]:
        """The names of the integer buffers that this step has changed on this tower."""
        return list(self._firsts)

    @torch.no_grad()
    def begin(self) -> None:
        """Stores the values at the start of a step."""
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
        """Restores the values from before the step."""
        for pack in self._small:
            pack.write(pack.before)
        for buffer in self._alone:
            if buffer.was_written:
                buffer.set(buffer.before)

    @torch.no_grad()
    def take(self) -> list[Tensor | None]:
        """Returns the floating-point buffers after a virtual tower's forward, to be added up.

        The small buffers of a dtype and device are one tensor, and a second tensor marks their changed elements. Each
        large buffer is a tensor, or None if it was not written. See [Note: element by element].
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
        """Returns the tensors that all towers gather: floating-point sums, and integers for :meth:`agreed`.

        Args:
            sums: the sums of the tensors of :meth:`take`; None for zeros.
            common: the names of buffers that all towers have.
            written, counted: the names of large and of integer buffers that any tower has changed.
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
        """Returns the integer buffers that towers have changed, by name.

        Args:
            counted: see :meth:`packed`.
            rows: for each tower, its integers.
            changed: for each tower, the names of the buffers that it has changed.

        Raises:
            MirrorError: on all towers: towers have different values of a buffer. On GPUs, the buffer is instead in
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
        """Sets the buffers to their values after the step.

        Args:
            floats, common: see :meth:`packed`; the floats are sums over all towers.
            integers: the result of :meth:`agreed`.
            written: the number of virtual towers that have changed a large buffer, by name.
            leaves: the number of virtual towers with examples.
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
        """Notes whether two values of an integer buffer differ. On a GPU, a later step reads the result."""
        if _can_be_read(first):
            if not torch.equal(first, other):
                self.differing.append(name)
        else:
            doubt = (first != other).any()
            self._doubts[name] = self._doubts[name] | doubt if name in self._doubts else doubt

    def refuse(self, name: str) -> None:
        """Raises the error for an integer buffer that differs.

        Raises:
            MirrorError: always.
        """
        raise MirrorError(
            f"buffer {name}, an integer one, is not the same after all virtual towers of a step that changed it; "
            "integers cannot be averaged: let it count steps, not examples"
        )


def _can_be_read(tensor: Tensor) -> bool:
    """Returns whether the values can be read without waiting for a GPU."""
    return tensor.device.type == "cpu"


def registered(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the buffers of some modules."""
    return [tensor for module in modules for tensor in own_buffers(module).values() if tensor is not None]


def _mask(buffers: Sequence[Buffer], common: set[str]) -> Any:
    """Selects the elements of buffers that all towers have, in the concatenated values of ``buffers``."""
    if all(buffer.name in common for buffer in buffers):
        return slice(None)
    flags = [torch.full((real(b.tensor).numel(),), b.name in common, device=b.tensor.device) for b in buffers]
    return torch.cat(flags)
