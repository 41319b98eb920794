"""Facts about tensors (layout in memory, names in messages, whether they are finite), and copies without waiting."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from towers.system import tree as trees
from towers.system.torch_private import references, storage_holders

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def view_like(tensor: Tensor, buffer: Tensor) -> Tensor:
    """Returns the start of ``buffer`` in the shape of ``tensor``, with its strides if they are dense.

    Args:
        buffer: flat, of the tensor's dtype; for complex numbers, pairs of real ones.
    """
    if tensor.is_complex():
        flat = torch.view_as_complex(buffer[: 2 * tensor.numel()].view(-1, 2))
    else:
        flat = buffer[: tensor.numel()]
    if tensor.is_contiguous() or not is_dense(tensor):
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


grad_dtype: Callable[[Any], torch.dtype | None] = operator.attrgetter(
    "grad_dtype" if hasattr(Tensor, "grad_dtype") else "dtype"
)
"""Returns a parameter's ``grad_dtype``, which is mostly its :func:`gradient_dtype`, and runs no code in Python."""


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's gradient: its ``grad_dtype`` if it has one, otherwise its own dtype."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor's elements fill their memory without gaps or overlaps (channels-last, transposed …)."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Returns whether a value is torch's ``DTensor``, such as a sharded parameter. Its module is slow to import."""
    return hasattr(value, "to_local")


def own_part(tensor: Tensor) -> Tensor:
    """Returns the part of a ``DTensor`` that this tower has, and any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Returns a ``DTensor`` as a whole, for which all towers must call it, and any other tensor itself."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def part_of(value: Tensor, place: DTensor) -> DTensor:
    """Returns a whole tensor, which is equal on all towers, in the layout of ``place``. Nothing is communicated."""
    from torch.distributed.tensor import distribute_tensor  # it is slow to import

    return distribute_tensor(value.to(place.device), place.device_mesh, place.placements, src_data_rank=None)


def in_layout_of(place: object, value: Any) -> Any:
    """Returns :func:`part_of` a whole tensor if ``place`` is a ``DTensor`` of its shape, and any other value itself."""
    if not is_dtensor(place) or not isinstance(value, Tensor) or is_dtensor(value) or value.shape != place.shape:
        return value
    return part_of(value, place)


def whole_leaves(state: Any, *, keep: bool) -> Any:
    """Returns a nested state with whole tensors in place of ``DTensor``. All towers must call it.

    Args:
        keep: whether this tower keeps these, on the CPU. Otherwise, they are empty.
    """

    def gathered(leaf: Any) -> Any:
        if not is_dtensor(leaf):
            return leaf
        tensor = whole(leaf)
        return tensor.cpu() if keep else torch.empty(0, device="cpu")

    return trees.map_leaves(gathered, state) if any(map(is_dtensor, trees.leaves(state))) else state


def state_in_parts(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of an optimizer of whole parameters, for the parts of them on this tower."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = {
        index: {name: in_layout_of(parameters[index], value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": parts}


def contiguous(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy if it is not contiguous or is a lazily conjugated or negated view."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def copy_back(dense: Tensor, tensor: Tensor) -> None:
    """Gives ``tensor`` the values of ``dense``, unless they are the same memory (:func:`contiguous`)."""
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)


ALONE = storage_holders(torch.zeros(1, device="cpu"))
"""The result of :func:`towers.system.torch_private.storage_holders` for a tensor that does not share its memory."""


def _references_of_a_parameter() -> int:
    parameter, gradients = torch.nn.Parameter(torch.zeros(1, device="cpu")), [torch.zeros(1, device="cpu")]
    before = references(gradients)
    parameter.grad = gradients[0]
    return references(gradients) - before


REFERENCES_OF_A_PARAMETER = _references_of_a_parameter()
"""By how much :func:`towers.system.torch_private.references` increases when a tensor becomes a parameter's gradient."""


@dataclass(frozen=True)
class Named:
    """A parameter or buffer with its name in messages.

    Attributes:
        name: path below its outermost module, with that module first: ``"Net.conv1.weight"``.
        kind: "parameter" or "buffer".
        trainable: whether it required a gradient when it was compared. It may have been frozen or unfrozen since.
        sparse: whether its gradients are sparse tensors.
    """

    name: str
    tensor: Tensor
    kind: str
    trainable: bool = False
    sparse: bool = False

    def describe(self) -> list[object]:
        """Returns the properties that must be equal on all towers."""
        tensor = self.tensor
        layout = "sparse gradients" if self.sparse else f"strides {tensor.stride()}"
        gradients = gradient_dtype(tensor)
        dtype = str(tensor.dtype) if gradients == tensor.dtype else f"{tensor.dtype} with gradients of {gradients}"
        return [self.name, list(tensor.shape), dtype, self.kind, self.trainable, layout]


def extremes(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the largest magnitude in each tensor: NaN if it contains NaN, otherwise infinity if it contains one.

    Args:
        tensors: real, complex (their parts count), sparse or integer tensors, on one device or several.

    Returns:
        float64, shape ``(len(tensors),)``, on a GPU if any tensor is on one; 0 for an empty tensor.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    ends = concatenated([end.view(1) for tensor in tensors for end in _ends(tensor)]).double()
    return torch.maximum(-ends[::2], ends[1::2])


def _ends(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the least and the greatest element; both are NaN if there is a NaN."""
    dense = tensor._values() if tensor.is_sparse else tensor
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    if not real.numel():
        zero = torch.zeros((), device=tensor.device)
        return zero, zero
    if real.dtype.itemsize == 1:
        real = real.float()  # torch does not compare numbers of eight bits
    low, high = torch.aminmax(real)
    return low, high


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates flat tensors, on a GPU if any is on one: a copy to the host would be read before it has arrived."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors])


def what_is_not_finite(names: Sequence[str], highest: Tensor) -> dict[str, str]:
    """Returns those of ``names`` whose extreme is not finite, with "nan" or "inf"."""
    values = zip(names, highest.tolist(), strict=True)
    return {name: "nan" if math.isnan(value) else "inf" for name, value in values if not math.isfinite(value)}


class HostCopy:
    """A copy of ``tensor`` on the host, which may still be in progress; or ``tensor`` itself if it is on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._arrived: torch.Event | None = None
        self._copy = tensor
        if tensor.device.type != "cpu":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.Event(tensor.device)
            self._arrived.record(
                torch.accelerator.current_stream(tensor.device)
            )  # may be on another device than the current one

    def has_come(self) -> bool:
        """Returns whether :meth:`get` would return without waiting."""
        if self._arrived is not None and self._arrived.query():
            self._arrived = None
        return self._arrived is None

    def get(self) -> Tensor:
        """Returns the copy, and waits for it if it has not arrived yet."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._copy


class CopyFromDevices:
    """Copies bytes of devices into ordinary memory, through two pinned buffers.

    While the host empties one buffer, the devices fill the other one. So the host waits once for each buffer, and not
    for each tensor, and little memory is pinned.

    Args:
        nbytes: the size of a buffer; 32 MiB if it is more.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = min(max(nbytes, 1), 2**25)
        self._filling: list[tuple[Tensor, Tensor]] = []  # parts of a buffer, and their places in memory
        self._full: tuple[torch.Event, list[tuple[Tensor, Tensor]]] | None = None
        self._buffers: list[Tensor] = []
        self._used, self._device = 0, torch.device("cpu")

    def add(self, data: Tensor, target: Tensor) -> None:
        """Starts to copy ``data``, bytes of a device, to ``target``. :meth:`finish` completes all copies."""
        if not self._buffers:
            self._buffers = [torch.empty(self._nbytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in "ab"]
        for source, place in zip(data.split(self._nbytes), target.split(self._nbytes), strict=True):
            if self._filling and (self._used + len(source) > self._nbytes or source.device != self._device):
                self._swap()
            self._device = source.device
            part = self._buffers[0][self._used : self._used + len(source)]
            self._used += len(source)
            part.copy_(source, non_blocking=True)
            self._filling.append((part, place))

    def _swap(self) -> None:
        filled = torch.Event(self._device)
        filled.record(torch.accelerator.current_stream(self._device))
        before, self._full = self._full, (filled, self._filling)
        self._filling, self._used = [], 0
        self._buffers.reverse()
        self._empty(before)

    @staticmethod
    def _empty(full: tuple[torch.Event, list[tuple[Tensor, Tensor]]] | None) -> None:
        if full is not None:
            filled, parts = full
            filled.synchronize()
            for part, place in parts:
                place.copy_(part)

    def finish(self) -> None:
        """Returns when everything is copied."""
        if self._filling:
            self._swap()
        self._empty(self._full)
        self._full = None


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns ``tensor`` on ``device``. The host does not wait for the device that it sends the tensor to."""
    if device.type != "cpu" and tensor.device.type == "cpu":
        return pinned(tensor).to(device, non_blocking=True)
    return tensor.to(device)


def pinned(tensor: Tensor) -> Tensor:
    """Returns a strided CPU tensor in memory from which a device copies by itself, even if its elements overlap."""
    return tensor if tensor.is_pinned() else torch.empty_like(tensor, pin_memory=True).copy_(tensor)
