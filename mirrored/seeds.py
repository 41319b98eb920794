"""Random numbers: one seed for everything, and streams that do not disturb each other."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from towers.collectives.communicator import Communicator


def mix(*parts: object) -> int:
    """A seed of 63 bits made from several values; equal on all machines and in all runs."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators (those of all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_cpu(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generator, as data loading uses them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_on(device: torch.device, seed: int) -> None:
    """As :func:`seed_cpu`, and the generator of ``device``.

    Unlike ``torch.manual_seed``, which notes a stack trace for each kind of device that has not been used yet (0.6 ms).
    """
    seed_cpu(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


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


def share(comm: Communicator) -> None:
    """Give all towers the state of tower 0's generators, so that they draw alike; tower 0's goes on as it was."""
    mine = json.dumps(state(comm.device), default=torch.Tensor.tolist) if comm.index == 0 else ""
    chief = comm.all_gather_bytes(mine.encode())[0]
    if comm.index > 0:
        set_state(json.loads(chief), comm.device)


class TowerStreams:
    """The random numbers of one tower of a strategy: equal on all while data and model are made, then its own.

    Args:
        comm: the towers.
        seed: seeds everything; None leaves tower 0's generators as they are, and gives the others their state.
        stay_equal: whether they stay equal for good, as with virtual towers, which have streams of their own.
    """

    def __init__(self, comm: Communicator, seed: int | None, *, stay_equal: bool) -> None:
        self._device, self._index = comm.device, comm.index
        self._seed = seed
        self._restored: int | None = None
        self._parted = stay_equal or (comm.size == 1 and seed is None)
        if seed is not None:
            seed_all(seed)
        elif comm.size > 1:
            share(comm)

    @property
    def seed(self) -> int:
        """What streams depend on that are named by a key: the seed that a run began with, also where none was given."""
        if self._restored is not None:
            return self._restored
        return self._seed if self._seed is not None else torch.initial_seed()

    @seed.setter
    def seed(self, value: int) -> None:
        self._restored = value

    def begin_run(self) -> None:
        """From the first run on every tower has its own: dropout must differ. Without a seed tower 0 goes on."""
        if not self._parted:
            if self._seed is not None or self._index > 0:
                begun = self._seed if self._seed is not None else torch.initial_seed()
                seed_all(mix(begun, "tower", self._index))
            self._parted = True

    def part(self, key: object) -> None:
        """Give every tower streams of its own that depend on the seed, ``key`` and its index."""
        seed_all(mix(self.seed, key, "tower", self._index))
        self._parted = True

    def state_dict(self) -> dict[str, Any]:
        """Where this tower's random numbers stand: its generators, and whether they are its own yet."""
        return {"parted": self._parted, "generators": state(self._device)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, on this tower.

        Raises:
            ValueError, TypeError, KeyError, RuntimeError: it is no such state.
        """
        set_state(saved["generators"], self._device)
        self._parted = bool(saved["parted"])


def _cpu_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_cpu_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


@contextlib.contextmanager
def undisturbed(device: torch.device | None = None) -> Iterator[None]:
    """Inside, generators may be seeded and used; afterwards they go on as if nothing had happened.

    Args:
        device: this one's generator, too, beside those of the CPU.
    """
    state = _cpu_state()
    on_gpu = torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
    try:
        yield
    finally:
        _set_cpu_state(state)
        if device is not None and on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)


class Stream:
    """A random stream of its own for code that uses the global CPU generators.

    Inside ``with stream:`` the generators continue where the stream's last block ended; outside they know
    nothing of it.
    """

    def __init__(self, seed: int) -> None:
        with undisturbed():
            seed_cpu(seed)
            self._state = _cpu_state()

    def __enter__(self) -> None:
        self._outside = _cpu_state()
        _set_cpu_state(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = _cpu_state()
        _set_cpu_state(self._outside)
