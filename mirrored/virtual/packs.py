"""Buffers of modules, as single tensors or, if they are small floating-point buffers, combined into one tensor.

[Note: small buffers as one tensor] Every virtual tower reads and writes all buffers. The times are for a ResNet-18. One
by one, its buffers took 2.9 ms of CPU time of a step of 50 ms with 2 virtual towers of 4 examples. With 8 virtual
towers of one example, they took 7.2 of 92 ms. So the small floating-point buffers of a dtype are read and written as
one tensor, which takes 1.1 and 2.7 ms. Doing so with integer buffers would save another 0.2 ms.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from towers.errors import MirrorError
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
