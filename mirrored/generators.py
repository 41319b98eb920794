"""Where the global random generators stand: Python's, NumPy's, torch's CPU generator and a GPU's.

``take`` and ``put`` are for this process and need microseconds; ``state`` and ``set_state`` are for files and other
processes.

[Note: NumPy's generator] ``np.random.get_state`` and ``set_state`` need 35 µs each, because they copy 624 words one by
one through Python objects; a run of a strategy would call both at its beginning and at its end. The words of an
MT19937 are plain memory whose address NumPy publishes (``BitGenerator.ctypes.state_address``); copying it needs 0.2 µs.
NumPy also keeps the second normal number of a pair, in another place. ``RandomState.get_state`` and ``set_state`` read
and set that number after they have asked ``_bit_generator`` for the words, so a stand-in at that name leaves the slow
part out. For other bit generators, and if the memory does not hold the state that NumPy reports, NumPy's own functions
do all.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_NUMPY: Any = np.random.mtrand._rand  # type: ignore[attr-defined]  # the functions of np.random are its methods
_WORDS = 624


class _NumPyPlace(NamedTuple):
    """Where NumPy's generator stands.

    Attributes:
        bits: its bit generator; a script may set another one.
        words: the memory of the bit generator's state, or None where it cannot be used.
        rest: what the state holds beside the words; all of it where ``words`` is None.
    """

    bits: Any
    words: bytes | None
    rest: dict[str, Any]


class Place(NamedTuple):
    """Where all generators stand.

    Attributes:
        gpu: the state of the GPU's generator; None on a CPU, and while a CUDA graph is captured.
    """

    python: Any
    numpy: _NumPyPlace
    cpu: Tensor
    gpu: Tensor | None


def take(device: torch.device) -> Place:
    """Where the generators stand now: those of the CPU and, if ``device`` is a GPU, its own."""
    gpu = torch.cuda.get_rng_state(device) if _can_use_gpu(device) else None
    return Place(random.getstate(), _take_numpy(), torch.default_generator.get_state(), gpu)


def put(place: Place, device: torch.device) -> None:
    """Let the generators go on where :func:`take` has found them."""
    random.setstate(place.python)
    _put_numpy(place.numpy)
    torch.default_generator.set_state(place.cpu)
    if place.gpu is not None and _can_use_gpu(device):
        torch.cuda.set_rng_state(place.gpu, device)


def _can_use_gpu(device: torch.device) -> bool:
    # A captured graph draws what the generator's state is when the graph is replayed; torch refuses to touch it before.
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class _NoBits:
    """Stands in for NumPy's bit generator while the rest of the state is read or set."""

    def __init__(self) -> None:
        self.state: Any = None


@functools.lru_cache(maxsize=2)
def _memory(bits: Any) -> memoryview | None:
    """The memory of a bit generator's state; None where it is not 624 words and a position."""
    if type(bits) is not np.random.MT19937:
        return None
    memory = (ctypes.c_uint32 * (_WORDS + 1)).from_address(bits.ctypes.state_address)
    state = bits.state["state"]
    return memoryview(memory).cast("B") if list(memory) == [*state["key"], state["pos"]] else None


def _take_numpy() -> _NumPyPlace:
    bits = _NUMPY._bit_generator
    memory = _memory(bits)
    if memory is None:
        return _NumPyPlace(bits, None, np.random.get_state(legacy=False))  # type: ignore[arg-type]
    stand_in = _NoBits()
    stand_in.state = {"bit_generator": "MT19937", "state": None}
    _NUMPY._bit_generator = stand_in
    try:
        rest = _NUMPY.get_state(legacy=False)
    finally:
        _NUMPY._bit_generator = bits
    return _NumPyPlace(bits, bytes(memory), rest)


def _put_numpy(place: _NumPyPlace) -> None:
    if _NUMPY._bit_generator is not place.bits:
        np.random.set_bit_generator(place.bits)  # type: ignore[attr-defined]
    if place.words is None:
        np.random.set_state(place.rest)
        return
    memory = _memory(place.bits)
    assert memory is not None
    memory[:] = place.words
    _NUMPY._bit_generator = _NoBits()
    try:
        _NUMPY.set_state(place.rest)
    finally:
        _NUMPY._bit_generator = place.bits


def state(device: torch.device) -> dict[str, Any]:
    """Where the generators of Python, NumPy, torch and a GPU ``device`` stand: numbers, texts and tensors."""
    version, internal, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(internal, device="cpu"), gauss],
        "numpy": [str(numpy[0]), torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Let the generators go on where :func:`state` was taken; lists do for tensors. A GPU's is left out on a CPU.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: it is no such state.
    """
    version, internal, gauss = state["python"]
    kind, key, *rest = state["numpy"]
    random.setstate((version, tuple(torch.as_tensor(internal, device="cpu").tolist()), gauss))
    np.random.set_state((kind, np.asarray(torch.as_tensor(key, device="cpu"), dtype=np.uint32), *rest))
    torch.set_rng_state(torch.as_tensor(state["torch"], dtype=torch.uint8, device="cpu"))
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(torch.as_tensor(state["cuda"], dtype=torch.uint8, device="cpu"), device)
