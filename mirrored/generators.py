"""The states of the global random generators: Python's, NumPy's, torch's CPU generator and an accelerator's.

``take`` and ``put`` are for this process and take microseconds. ``state`` and ``read`` are for files and other
processes. ``put`` also accepts a result of ``read``.

[Note: NumPy's generator] ``np.random.get_state`` and ``set_state`` take 33 and 35 µs, because they copy 624 words one
by one through Python objects. A run of a strategy would call both at its start and at its end, which takes 170 µs
instead of 33. ``np.random.set_bit_generator`` takes 0.3 µs, but drops the second normal number of a pair, which NumPy
stores separately. The words of an MT19937 are plain memory whose address NumPy publishes
(``BitGenerator.ctypes.state_address``). Copying it takes 0.2 µs. ``RandomState.get_state`` and ``set_state`` read and
set the normal number after they have requested the words from ``_bit_generator``. A substitute object under that name
therefore skips the slow part. NumPy's own functions do everything for other bit generators, and if the memory does not
contain the state that NumPy reports.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from towers.system import accelerator

_NUMPY: Any = np.random.mtrand._rand  # type: ignore[attr-defined]  # the functions of np.random are its methods
_WORDS = 624


class _NumPyPlace(NamedTuple):
    """The state of NumPy's generator.

    Attributes:
        bits: its bit generator, which a script may replace. None: the current one.
        words: the memory of the bit generator's state, or None if it cannot be used.
        rest: the state without the words; if ``words`` is None, the whole state in NumPy's form.
    """

    bits: Any
    words: bytes | None
    rest: Any


class Place(NamedTuple):
    """The states of all generators.

    Attributes:
        device: the state of the accelerator's generator. None on a CPU, while a CUDA graph is captured, and if there is
            none to set.
    """

    python: Any
    numpy: _NumPyPlace
    cpu: Tensor
    device: Tensor | None


def take(device: torch.device) -> Place:
    """Returns the current states of the generators: those of the CPU and, if ``device`` is an accelerator, its own."""
    device_state = accelerator.get_rng_state(device) if _can_use(device) else None
    return Place(random.getstate(), _take_numpy(), torch.default_generator.get_state(), device_state)


def put(place: Place, device: torch.device) -> None:
    """Sets the generators to a result of :func:`take` or :func:`read`."""
    random.setstate(place.python)
    _put_numpy(place.numpy)
    torch.default_generator.set_state(place.cpu)
    if place.device is not None and _can_use(device):
        accelerator.set_rng_state(place.device, device)


def _can_use(device: torch.device) -> bool:
    # A captured graph uses the generator's state at the time of the replay. torch refuses access during the capture.
    return device.type != "cpu" and not accelerator.is_capturing(device)


@functools.lru_cache(maxsize=2)
def _memory(bits: Any) -> memoryview | None:
    """Returns the memory of a bit generator's state, or None if it is not 624 words and a position."""
    if type(bits) is not np.random.MT19937:
        return None
    memory = (ctypes.c_uint32 * (_WORDS + 1)).from_address(bits.ctypes.state_address)
    state = bits.state["state"]
    return memoryview(memory).cast("B") if list(memory) == [*state["key"], state["pos"]] else None


def _take_numpy() -> _NumPyPlace:
    bits = _NUMPY._bit_generator
    memory = _memory(bits)
    if memory is None:
        return _NumPyPlace(bits, None, np.random.get_state(legacy=False))
    _NUMPY._bit_generator = types.SimpleNamespace(state={"bit_generator": "MT19937", "state": None})
    try:
        rest = _NUMPY.get_state(legacy=False)
    finally:
        _NUMPY._bit_generator = bits
    return _NumPyPlace(bits, bytes(memory), rest)


def _put_numpy(place: _NumPyPlace) -> None:
    if place.bits is not None and _NUMPY._bit_generator is not place.bits:
        np.random.set_bit_generator(place.bits)  # type: ignore[attr-defined]
    if place.words is None:
        np.random.set_state(place.rest)
        return
    memory = _memory(place.bits)
    assert memory is not None
    memory[:] = place.words
    _NUMPY._bit_generator = types.SimpleNamespace()
    try:
        _NUMPY.set_state(place.rest)
    finally:
        _NUMPY._bit_generator = place.bits


def state(device: torch.device) -> dict[str, Any]:
    """Returns the states of the generators of Python, NumPy, torch and an accelerator: numbers, strings and tensors."""
    version, internal, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(internal, device="cpu"), gauss],
        "numpy": [str(numpy[0]), torch.from_numpy(numpy[1].astype(np.int64)), *numpy[2:]],
        "torch": torch.get_rng_state(),
        "device": [device.type, accelerator.get_rng_state(device)] if device.type != "cpu" else None,
    }


def read(state: Mapping[str, Any], device: torch.device) -> Place:
    """Returns the states in a result of :func:`state`, if every field of it is valid. Lists may replace tensors.

    The libraries do not check positions, and would read foreign memory with wrong ones. The state of an accelerator is
    ignored on another kind of device.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError, OverflowError: ``state`` is not such a state.
    """
    version, internal, gauss = state["python"]
    kind, key, position, has_gauss, numpy_gauss = state["numpy"]
    *words, index = _whole_numbers(internal, _WORDS + 1, 2**32)
    _check(version == 3, f"Python's version is {version!r}")
    _check(index <= _WORDS, f"Python's position is {index}")
    _check(gauss is None or type(gauss) is float, "Python's next normal number is none")
    _check(kind == "MT19937", f"NumPy's generator is {kind!r}")
    _check(type(position) is int and 0 <= position <= _WORDS, f"NumPy's position is {position!r}")
    _check(type(has_gauss) is int and has_gauss in (0, 1), f"NumPy's has_gauss is {has_gauss!r}")
    _check(type(numpy_gauss) is float, "NumPy's next normal number is none")
    key = np.asarray(_whole_numbers(key, _WORDS, 2**32), dtype=np.uint32)
    cpu, own = _bytes(state["torch"], torch.default_generator.get_state()), None
    _check_torch(bytes(cpu.numpy()))
    if (theirs := state.get("device")) is not None and theirs[0] == device.type != "cpu":
        own = _bytes(theirs[1], accelerator.get_rng_state(device))
        if device.type == "cuda":
            _check(
                int.from_bytes(bytes(own.numpy()[8:16]), "little") % 4 == 0, ("the GPU's offset is not a multiple of 4")
            )
    numpy = _NumPyPlace(None, None, (kind, key, position, has_gauss, numpy_gauss))
    return Place((version, (*words, index), gauss), numpy, cpu, own)


def _check(fits: bool, otherwise: str) -> None:
    if not fits:
        raise ValueError(f"no state of random generators: {otherwise}")


def _whole_numbers(value: Any, count: int, limit: int) -> list[int]:
    """Returns the numbers, if they are ``count`` whole numbers from 0 and below ``limit``."""
    numbers = torch.as_tensor(value, device="cpu")
    whole = not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
    _check(whole and numbers.shape == (count,), f"{count} whole numbers are {numbers.dtype} of {tuple(numbers.shape)}")
    values: list[int] = numbers.tolist()
    _check(min(values) >= 0 and max(values) < limit, f"a number is not between 0 and {limit - 1}")
    return values


def _bytes(value: Any, like: Tensor) -> Tensor:
    return torch.tensor(_whole_numbers(value, like.numel(), 256), dtype=torch.uint8, device="cpu")


def _check_torch(state: bytes) -> None:
    """Checks that the next word of torch's generator is one of its 624. ``CPUGeneratorImpl::set_state`` checks less.

    [Note: torch's generator] Its bytes are a seed, the number of words left before all are generated again, whether it
    was seeded, the next word, 624 words, and two normal numbers with their flags. Word k is next if 625 - k words are
    left; just after seeding, word 0 is next and 1 is left. If the installed torch's own generator does not have this
    form, the check is skipped.
    """
    if len(state) == _TORCH_BYTES and _stands_well(bytes(torch.default_generator.get_state().numpy())):
        _check(_stands_well(state), "torch's position, or one of its flags, is none")


_TORCH_BYTES = 5056


def _stands_well(state: bytes) -> bool:
    left, seeded, following = struct.unpack_from("<iiQ", state, 8)
    normal, normal32 = struct.unpack_from("<i4x4xB", state, _TORCH_BYTES - 16)
    fits = left + following == _WORDS + 1 and 1 <= left <= _WORDS
    return seeded == 1 and (fits or (left, following) == (1, 0)) and {normal, normal32} <= {0, 1}
