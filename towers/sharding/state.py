"""An optimizer's state in shards: split from the ordinary state, and merged into it again.

A tower keeps the state of its shards as one block of bytes, which the others on the same host can read::

    | length of the header (8 bytes) | header: JSON, an entry for each value | values |

[Note: one tower can read a sharded state] The block is in memory that all towers of the host map as soon as it was
allocated. It is written to only after a barrier that every reader has reached. So ``state_dict()`` under ``if
strategy.is_chief:`` works, even when the other towers have ended. Across hosts, it is a collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from towers.collectives.arithmetic import CHUNK_ALIGNMENT
from towers.collectives.communicator import as_bytes, from_bytes
from towers.collectives.shared_memory.regions import Regions
from towers.gradients.buckets import Slot
from towers.sharding.shards import Shard

_ROOM = 64  # bytes for growing numbers of a header

State = MutableMapping[Any, dict[str, Any]]
"""Like ``Optimizer.state``: values by name, for each parameter."""


def shard_of(state: Mapping[str, Any], shard: Shard, device: torch.device | None = None) -> dict[str, Any]:
    """Returns copies of a shard's part of a parameter's state.

    Args:
        device: the device of the copies; None: the state's.

    Raises:
        TypeError: a value is a tensor with neither the parameter's shape nor the shape ().
    """
    parameter = shard.parameter
    own: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0:
            laid_out = torch.empty_like(parameter, dtype=value.dtype, device=device).copy_(value)
            own[name] = shard.of(laid_out).clone()
        elif isinstance(value, Tensor) and value.dim() > 0:
            raise TypeError(
                f"state {name!r} of parameter {shard.slot.name} has shape {tuple(value.shape)}, not the parameter's: "
                "the optimizer does not update each element for itself and cannot be sharded"
            )
        else:
            own[name] = value.clone().to(device or value.device) if isinstance(value, Tensor) else value
    return own


def _zeros(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")


def encode(state: State, parameters: Sequence[nn.Parameter], allocate: Callable[[int], Tensor] | None = None) -> Tensor:
    """Returns the state of shards as one block.

    Args:
        parameters: the shards.
        allocate: returns a flat tensor of bytes on the CPU, at least as long as requested. From then on, the state's
            tensors are in it.

    Raises:
        TypeError: a value is neither a tensor nor a JSON value.
    """
    text, tensors, end = _describe(state, parameters)
    start = -(-(8 + len(text) + _ROOM) // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    block = _zeros(start + end) if allocate is None else allocate(start + end)
    _write_header(block, text, start)
    for number, name, value, at in tensors:
        place = block[start + at : start + at + value.nbytes]
        place.copy_(as_bytes(value))
        if allocate is not None:
            state[parameters[number]][name] = place.view(value.dtype).view(value.shape)
    return block


def _describe(
    state: State, parameters: Sequence[nn.Parameter]
) -> tuple[bytes, list[tuple[int, str, Tensor, int]], int]:
    """Returns a block's header, its tensors (number of the shard, name, value, start), and the end of the last one."""
    header: list[list[Any]] = []
    tensors: list[tuple[int, str, Tensor, int]] = []
    end = 0
    for number, parameter in enumerate(parameters):
        for name, value in state[parameter].items() if parameter in state else ():
            if isinstance(value, Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                header.append([number, name, dtype, list(value.shape), value.device == parameter.device, end])
                tensors.append((number, name, value, end))
                end += -(-value.nbytes // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
            else:
                header.append([number, name, value])
    return json.dumps(header).encode(), tensors, end


def _write_header(block: Tensor, text: bytes, start: int) -> None:
    """Fills the block before the values, so that a later header may be longer."""
    block[:8].view(torch.int64)[0] = start - 8
    block[8:start].copy_(from_bytes(text.ljust(start - 8)))


def merge(
    shards: Sequence[Sequence[Shard]],
    blocks: Sequence[Tensor | None],
    templates: Mapping[Slot, Tensor],
    device: torch.device | None = None,
) -> dict[Tensor, dict[str, Any]]:
    """Returns the whole state, by parameter: copies, on the devices of the original, or on ``device``.

    Args:
        shards, blocks: every tower's.
        templates: tensors with the shape and strides that a parameter had when it was divided.
    """
    whole: dict[Tensor, dict[str, Any]] = {}
    for row, block in zip(shards, blocks, strict=True):
        for number, name, value, on_device in _values(block) if block is not None else ():
            shard = row[number]
            if shard.slot.parameter() is None:  # its optimizer and its model have dropped it
                continue
            state = whole.setdefault(shard.parameter, {})
            place = device or shard.parameter.device
            if isinstance(value, Tensor) and value.dim() > 0:
                if name not in state:
                    template = templates[shard.slot]
                    state[name] = torch.empty_like(template, dtype=value.dtype, device=place)
                shard.of(state[name]).copy_(value)
            elif isinstance(value, Tensor):
                state[name] = value.clone().to(place if on_device else value.device)
            else:
                state[name] = value
    return whole


def _values(block: Tensor) -> Iterator[tuple[int, str, Any, bool]]:
    """Yields a block's values: number of the shard, name, value (or view), whether on its parameter's device."""
    length = int(block[:8].view(torch.int64)[0])
    start = -(-(8 + length) // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
    for number, name, value, *where in json.loads(block[8 : 8 + length].numpy().tobytes()):
        if not where:
            yield number, name, value, False
            continue
        dtype, (shape, on_device, at) = getattr(torch, value), where
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        yield number, name, block[start + at : start + at + nbytes].view(dtype).view(shape), on_device


class ReadableState:
    """Keeps the state of one optimizer's shards where other towers can read it, even after this tower has ended.

    See [Note: one tower can read a sharded state].

    Args:
        key: the key of its memory.
    """

    def __init__(self, regions: Regions, key: int) -> None:
        self._regions = regions
        self._key = key
        self._block = _zeros(0)
        self._parameters: Sequence[nn.Parameter] | None = None  # the shards of the block
        self._blocks: list[Tensor | None] = []

    def keep(self, state: State, parameters: Sequence[nn.Parameter]) -> None:
        """Moves the state of this tower's shards into its block, unless all of it is there already.

        Args:
            parameters: the shards, in the same sequence as before if they are the same.
        """
        first = self._block.data_ptr()
        inside = range(first, first + self._block.nbytes)
        values = (value for entries in state.values() for value in entries.values())
        same, self._parameters = parameters is self._parameters, parameters
        if same and all(isinstance(value, Tensor) and value.data_ptr() in inside for value in values):
            return
        text, tensors, _ = _describe(state, parameters)
        start = 8 + int(self._block[:8].view(torch.int64)[0]) if self._block.numel() else 0
        if len(text) <= start - 8 and all(value.data_ptr() == first + start + at for _, _, value, at in tensors):
            _write_header(self._block, text, start)  # numbers have changed, such as those of SparseAdam's steps
        else:
            self._block = encode(state, parameters, self._allocate)

    def _allocate(self, nbytes: int) -> Tensor:
        block = self._regions.allocate(self._key, nbytes, torch.uint8)
        return _zeros(nbytes) if block is None else block

    def map_peers(self) -> None:
        """Maps the blocks of all towers. All towers call it after a barrier."""
        self._blocks = self._regions.map_blocks(self._key)
        if self._regions.newly_mapped:
            self._regions.barrier.wait()
            self._regions.close_files()

    def blocks(self) -> list[Tensor | None] | None:
        """Returns every tower's block, of shape (bytes,), or None if a block is not available.

        A tower without state has None as its block.
        """
        return None if any(block is not None and not block.numel() for block in self._blocks) else self._blocks
