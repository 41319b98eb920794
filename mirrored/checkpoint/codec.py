"""Encodes state as JSON and tensors, and decodes it. Nothing in a file can name code to run.

None, booleans, numbers, strings and lists are stored as plain JSON. Every other value is a JSON object whose first key
names its type, such as ``{"tuple": [1, 2]}`` or ``{"tensor": "model/conv.weight"}``.
"""

from __future__ import annotations

import base64
import collections
import enum
import math
import urllib.parse
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from towers.system.tensors import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda items: collections.Counter(dict(items)),
}
_SCALARS = "biuf"  # NumPy's kinds of booleans, integers and floats
_PLAIN = " !$&'()*+,:;<=>?[]^`{|}\""
_KEYS = (str, int, float, bool, tuple, type(None))
MISFITS = (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError)
"""The errors that can occur if a value is created from an untrusted manifest."""


class Encoder:
    """Converts state to JSON values, and collects its tensors by name.

    Attributes:
        tensors: by name; detached, on their devices, not copied. A tensor that is in several places is collected once.
        sharded: by name; tensors that are sharded over the towers.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.sharded: dict[str, DTensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str, *, skip_code: bool = False) -> Any:
        """Returns the JSON value of ``value``.

        Args:
            path: the position of ``value`` in the state, for the names of tensors and for messages.
            skip_code: whether functions in dicts are left out, for learning-rate schedules that contain them.

        Raises:
            TypeError: a part of ``value`` cannot be saved (a function, an object). The message contains its path.
        """

        def inner(entry: Any, key: object) -> Any:
            return self.encode(entry, f"{path}/{_step_of_path(key)}", skip_code=skip_code)

        if value is None or type(value) in (bool, int) or (isinstance(value, str) and not isinstance(value, enum.Enum)):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return {"array": self._tensor(_from_numpy(value, path), path)}
        if isinstance(value, np.generic) and value.dtype.kind in _SCALARS:
            return {"scalar": inner(value.item(), ""), "dtype": str(value.dtype)}
        if type(value) is list:
            return [inner(entry, i) for i, entry in enumerate(value)]
        if type(value) in (tuple, set, frozenset, torch.Size):
            kind = "size" if isinstance(value, torch.Size) else type(value).__name__
            entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            return {kind: [inner(entry, i) for i, entry in enumerate(entries)]}
        if type(value) is collections.deque:
            return {"deque": [inner(entry, i) for i, entry in enumerate(value)], "maxlen": value.maxlen}
        if type(value).__name__ in _MAPPINGS and isinstance(value, dict):
            return self._mapping(value, path, inner, skip_code)
        if type(value) is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if type(value) is complex:
            return {"complex": [inner(value.real, "real"), inner(value.imag, "imag")]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise TypeError(
            f"{path} is a {type(value).__name__}, which cannot be saved: checkpoints hold tensors, arrays, numbers, "
            "texts and dicts, lists, tuples and sets of them, never code; leave it out of the state_dict"
        )

    def _mapping(
        self, value: Mapping[Any, Any], path: str, inner: Callable[[Any, object], Any], skip_code: bool
    ) -> Any:
        kind = type(value).__name__
        entries = [(key, entry) for key, entry in value.items() if not (skip_code and callable(entry))]
        for key, _ in entries:
            if not isinstance(key, _KEYS):
                raise TypeError(
                    f"{path} has a {type(key).__name__} as a key, which cannot be saved; use texts or numbers"
                )
        if kind == "dict" and all(type(key) is str for key, _ in entries):
            return {"dict": {key: inner(entry, key) for key, entry in entries}}
        texts = all(isinstance(key, str) for key, _ in entries)
        steps = [key if texts or type(key) is not str else (key,) for key, _ in entries]  # 1 and "1" differ
        return {
            "items": [[inner(key, "key"), inner(entry, s)] for (key, entry), s in zip(entries, steps, strict=True)],
            "kind": kind,
        }

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise TypeError(
                f"{path} is a {value.layout} tensor on {value.device}, which cannot be saved; save a dense one"
            )
        if is_dtensor(value):
            return self._sharded(value, path)
        value = value.detach().resolve_conj().resolve_neg()
        if value.numel() and not value.data_ptr():
            raise TypeError(f"{path} is a {type(value).__name__} without memory; save the tensor that it represents")
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (path,)
        name = self._names.setdefault(key, path)
        self.tensors.setdefault(name, value)
        return {"tensor": name}

    def _sharded(self, value: DTensor, path: str) -> dict[str, Any]:
        if any(place.is_partial() for place in value.placements):
            raise TypeError(f"{path} is a sum whose parts the towers have not added yet; call its redistribute()")
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_complex() or dtype.startswith("float8"):  # torch's reader does not support them
            raise TypeError(f"{path} is a sharded tensor of {dtype}, which cannot be saved")
        self.sharded[path] = value
        return {"sharded": path, "dtype": dtype, "shape": list(value.shape)}


def sharded_in(state: Any, name: str, *, skip_code: bool = False) -> dict[str, DTensor]:
    """Returns the sharded tensors of an object's state, by their names in a checkpoint; see :meth:`Encoder.encode`."""
    encoder = Encoder()
    encoder.encode(state, name, skip_code=skip_code)
    return encoder.sharded


def _step_of_path(key: object) -> str:
    """Returns a key as part of a tensor's name. Different keys give different parts, which never contain '/' or '@'."""
    if isinstance(key, str):
        return urllib.parse.quote(key, safe=_PLAIN, errors="surrogatepass")
    return str(key) if type(key) is int else "#" + urllib.parse.quote(repr(key), safe=_PLAIN)


def _from_numpy(value: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except (TypeError, ValueError):  # torch does not support its kind, width or byte order
        raise TypeError(f"{path} is an array of {value.dtype}, which cannot be saved; use one of numbers") from None


TensorOf = Callable[..., Tensor]
"""Returns a tensor by its name, and for a sharded one its shape and dtype."""


class Malformed(ValueError):
    """Reports a file, or a value in a file, that this software did not write."""


def decode(value: Any, tensor: TensorOf) -> Any:
    """Decodes a value of :meth:`Encoder.encode`.

    Args:
        tensor: returns a tensor by name. A "meta" tensor, without data, may replace an array. For a sharded tensor, it
            also receives the shape and dtype, as a "meta" tensor.

    Raises:
        Malformed: ``value`` is not an encoded state.
    """
    if value is None or isinstance(value, (bool, int, str, float)):
        return value
    if isinstance(value, list):
        return [decode(entry, tensor) for entry in value]
    if not isinstance(value, dict) or not value:
        raise Malformed(f"an encoded value is a {type(value).__name__}")
    kind = next(iter(value))
    read = _DECODERS.get(kind)
    if read is None:
        raise Malformed(f"an encoded value is of kind {kind!r}, which this version does not know")
    try:
        return read(value, value[kind], tensor)
    except Malformed:
        raise
    except MISFITS as error:
        raise Malformed(f"an encoded {kind} cannot be read: {error}") from None


def _sequence(content: Any, tensor: TensorOf) -> list[Any]:
    if not isinstance(content, list):
        raise Malformed(f"a sequence is a {type(content).__name__}")
    return [decode(entry, tensor) for entry in content]


def _read_dict(_: Any, content: Any, tensor: TensorOf) -> dict[str, Any]:
    return {key: decode(entry, tensor) for key, entry in content.items()}


def _read_items(value: Any, content: Any, tensor: TensorOf) -> Any:
    return _MAPPINGS[value["kind"]]([(decode(key, tensor), decode(entry, tensor)) for key, entry in content])


def _read_tensor(_: Any, content: Any, tensor: TensorOf, sharded: Tensor | None = None) -> Tensor:
    if not isinstance(content, str):
        raise Malformed(f"the name of a tensor is a {type(content).__name__}")
    return tensor(content) if sharded is None else tensor(content, sharded)


def _read_sharded(value: Any, content: Any, tensor: TensorOf) -> Tensor:
    layout = torch.empty(value["shape"], dtype=DTYPES[value["dtype"]], device="meta")
    return _read_tensor(value, content, tensor, layout)


def _read_scalar(value: Any, content: Any, tensor: TensorOf) -> Any:
    dtype = np.dtype(value["dtype"])
    if dtype.kind not in _SCALARS:  # the size of a "V" scalar is untrusted, and "O" holds any object
        raise Malformed(f"a scalar is of kind {dtype.kind!r}")
    return dtype.type(decode(content, tensor))


def _array(tensor: Tensor) -> Any:
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


_DECODERS: dict[str, Callable[[Any, Any, TensorOf], Any]] = {
    "dict": _read_dict,
    "items": _read_items,
    "tensor": _read_tensor,
    "sharded": _read_sharded,
    "array": lambda _, content, tensor: _array(decode(content, tensor)),
    "scalar": _read_scalar,
    "tuple": lambda _, content, tensor: tuple(_sequence(content, tensor)),
    "set": lambda _, content, tensor: set(_sequence(content, tensor)),
    "frozenset": lambda _, content, tensor: frozenset(_sequence(content, tensor)),
    "size": lambda _, content, tensor: torch.Size(array("q", _sequence(content, tensor))),
    "deque": lambda value, content, tensor: collections.deque(_sequence(content, tensor), value["maxlen"]),
    "float": lambda _, content, __: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content],
    "bytes": lambda _, content, __: base64.b64decode(content, validate=True),
    "complex": lambda _, content, tensor: complex(*_sequence(content, tensor)),
    "dtype": lambda _, content, __: DTYPES[content],
    "device": lambda _, content, __: torch.device(content),
}
