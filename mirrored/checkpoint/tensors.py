"""Files of tensors in the safetensors format, written in pieces and read as untrusted data.

A file (https://github.com/huggingface/safetensors) consists of the header's length in 8 bytes, the header as JSON, and
the tensors one after another. Tensors of dtypes that the format does not support are stored as bytes. The manifest
contains their dtypes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mirrored.checkpoint.codec import DTYPES, MISFITS, Malformed
from towers.collectives.communicator import as_bytes
from towers.system.tensors import CopyFromDevices, is_dense, whole

_FORMAT = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_DTYPES = {name: dtype for dtype, name in _FORMAT.items()}

_LONGEST_HEADER = 10**8  # bytes that safetensors can read
_PIECE = 2**23  # bytes that are written and hashed at a time
_SHARDS = re.compile(r"shards-[0-9]{5}\.safetensors")


def shard_file(tower: int) -> str:
    """Returns the name of the file with a tower's parts of sharded tensors."""
    return f"shards-{tower:05d}.safetensors"


def is_shard_file(name: str) -> bool:
    """Returns whether a name is one of :func:`shard_file`."""
    return _SHARDS.fullmatch(name) is not None


class FileLayout:
    """The header of a file of tensors, and the offsets of the tensors in it.

    Args:
        tensors: by name; of any dtype and strides.
        metadata: texts for the header, by name.

    Raises:
        ValueError: the names of the tensors exceed the largest header.

    Attributes:
        header: the bytes before the first tensor.
        nbytes: the size of all tensors together.
        unusual: for the manifest, by name: dtype, shape and strides that the file's header cannot express.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        # Large elements are first, so that all are aligned.
        self._tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
        self.unusual: dict[str, dict[str, Any]] = {}
        entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        end = 0
        for name, tensor in self._tensors.items():
            dtype, shape = _FORMAT.get(tensor.dtype), list(tensor.shape)
            if dtype is None:
                self.unusual[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}
                dtype, shape = "U8", [tensor.nbytes]
            if not tensor.is_contiguous() and is_dense(tensor):
                self.unusual.setdefault(name, {})["strides"] = list(tensor.stride())
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + tensor.nbytes]}
            end += tensor.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        if len(text) > _LONGEST_HEADER:
            raise ValueError(f"{len(tensors)} tensors are more than a file of safetensors can name")
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.nbytes = end

    def pieces(self, memory: Tensor | None = None) -> Iterator[memoryview]:
        """Yields the file's contents with the tensors' current values, or with the copy of them in ``memory``."""
        yield memoryview(self.header)
        tensors = self._tensors.values()
        # A sharded tensor is gathered when its piece is due, by all towers.
        for data in (as_bytes(whole(t)) for t in tensors) if memory is None else [memory[: self.nbytes]]:
            for piece in data.cpu().split(_PIECE):
                yield memoryview(piece.numpy())

    def packed(self) -> bytes:
        """Returns the file's contents. The host waits for a device once, and not for each tensor."""
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        self.copy_to(memory)
        return b"".join(self.pieces(memory))

    def copy_to(self, memory: Tensor) -> dict[str, Tensor]:
        """Copies all tensors into ``memory``, a flat tensor of bytes on the CPU, :attr:`nbytes` long.

        Returns:
            The bytes of each copy by name.
        """
        end, from_devices, copies = 0, CopyFromDevices(self.nbytes), {}
        for name, tensor in self._tensors.items():
            target = copies[name] = memory[end : end + tensor.nbytes]
            end += tensor.nbytes
            if tensor.device.type != "cpu":
                from_devices.add(as_bytes(tensor), target)
            elif tensor.dtype in _FORMAT:
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            else:
                target.copy_(as_bytes(tensor))
        from_devices.finish()
        return copies


def bytes_on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the bytes of each tensor, on the CPU. The host waits for a device once, and not for each tensor."""
    from_devices = CopyFromDevices(sum(tensor.nbytes for tensor in tensors))
    rows = []
    for tensor in tensors:
        data = as_bytes(tensor)
        row = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=data.dtype, device="cpu")
        if row is not data:
            from_devices.add(data, row)
        rows.append(row)
    from_devices.finish()
    return rows


class TensorFile:
    """The tensors of an open file, which are read one by one on demand.

    Args:
        path: a path of the open file.
        unusual: properties that the file's header cannot express (see :class:`FileLayout`).

    Raises:
        Malformed: the file is not a file of tensors.
    """

    def __init__(self, path: str, unusual: Mapping[str, Any]) -> None:
        self._unusual = unusual
        try:
            self._file = safe_open(path, framework="pt").__enter__()
            self.names = list(self._file.keys())
        except (SafetensorError, OSError, UnicodeDecodeError) as error:
            raise Malformed(f"it is not a safetensors file: {error}") from None

    def read(self, name: str) -> Tensor:
        """Returns a tensor on the CPU, in its own memory.

        Raises:
            Malformed: the tensor does not exist, or does not match the manifest.
        """
        try:
            # A copy is necessary: safetensors maps the file, which may be removed or changed.
            return restore_layout(self._file.get_tensor(name).clone(), self._unusual.get(name, {}))
        except (SafetensorError, *MISFITS) as error:
            raise Malformed(f"it contains no tensor {name!r} that can be read: {error}") from None

    def describe(self, name: str) -> Tensor:
        """Returns a tensor without data ("meta") with the shape and dtype of a tensor in the file.

        Raises:
            Malformed: see :meth:`read`.
        """
        try:
            entry = self._file.get_slice(name)
            tensor = torch.empty(entry.get_shape(), dtype=_DTYPES[entry.get_dtype()], device="meta")
            return restore_layout(tensor, self._unusual.get(name, {}))
        except (SafetensorError, *MISFITS) as error:
            raise Malformed(f"it contains no tensor {name!r} that can be read: {error}") from None

    def close(self) -> None:
        self._file.__exit__(None, None, None)


def restore_layout(tensor: Tensor, unusual: Mapping[str, Any]) -> Tensor:
    """Returns a tensor with the dtype, shape and strides in an entry of :attr:`FileLayout.unusual`.

    Raises:
        TypeError, ValueError, KeyError, RuntimeError: they do not fit.
    """
    if "dtype" in unusual:
        tensor = tensor.view(DTYPES[unusual["dtype"]]).view(unusual["shape"])
    if "strides" in unusual:
        strides = unusual["strides"]
        like = torch.empty_strided(tensor.shape, strides, device="meta")  # it interprets -1 differently
        if list(like.stride()) != strides or not is_dense(like):
            raise ValueError(f"strides {strides} do not fit shape {tuple(tensor.shape)}")
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor
