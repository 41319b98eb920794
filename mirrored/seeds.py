"""Random numbers: one seed for everything, and streams that do not affect each other.

[Note: two streams] A tower draws from one stream outside ``run``, which is equal on all towers, and from another stream
inside, which is its own. With a single stream, a ``random_split`` after the first ``run`` would differ between towers,
and training examples would silently leak into validation. Without a seed, the stream outside is tower 0's, and the
streams inside depend on its seed. In ``merge_call``, numbers are drawn from the stream outside. With virtual towers,
the stream inside starts equal on all towers. It is a separate stream nevertheless, because noise for the share's
examples advances it differently on each tower. One tower with a seed has both streams, so that draws outside do not
depend on the number of towers. ``run`` switches the generators at its start and at its end, in 33 µs together ([Note:
NumPy's generator] in :mod:`mirrored.generators`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from mirrored import generators
from towers.collectives.communicator import Communicator
from towers.system import accelerator

_CPU = torch.device("cpu")


def mix(*parts: object) -> int:
    """Returns a seed of 63 bits made from several values, equal on all machines and in all runs."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_all(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators (those of all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_cpu(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's CPU generator, which data loading uses."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_on(device: torch.device, seed: int) -> None:
    """Seeds the generator of ``device`` in addition to those of :func:`seed_cpu`.

    ``torch.manual_seed`` would record a stack trace for each kind of device that has not been used yet (0.6 ms).
    """
    seed_cpu(seed)
    if device.type != "cpu":
        accelerator.manual_seed(seed, device)


def follow_chief(comm: Communicator) -> None:
    """Sets all towers' generators to the state of tower 0's, so that all towers draw the same numbers."""
    state = json.dumps(generators.state(comm.device), default=torch.Tensor.tolist) if comm.index == 0 else ""
    chief = comm.all_gather_bytes(state.encode())[0]
    if comm.index > 0:
        generators.put(generators.read(json.loads(chief), comm.device), comm.device)


class TowerStreams:
    """The random numbers of one tower of a strategy: one stream outside ``run`` and another one inside.

    See [Note: two streams]. The stream outside is equal on all towers at every time, because draws inside ``run`` do
    not affect it: towers split data, create models and choose examples identically. The stream inside is each tower's
    own.

    One tower without a seed has one stream, which is never switched.

    Args:
        comm: the towers.
        seed: seeds everything. None leaves tower 0's generators unchanged, and gives the others their state.
        virtual: whether there are virtual towers.
        compared: whether this run is compared with one on another number of towers.
    """

    def __init__(self, comm: Communicator, seed: int | None, *, virtual: bool, compared: bool = False) -> None:
        self._device = comm.device
        self._virtual = virtual
        self._name: tuple[object, ...] = ("towers",) if virtual else ("tower", comm.index)
        self._seed = seed
        self._restored: int | None = None
        self._two = comm.size > 1 or seed is not None or virtual or compared
        self._inside = False
        self._other: generators.Place | None = None  # the state of the unused stream; None: it has not started
        self._key: tuple[object, ...] = ()
        self._seed_outside = 0  # the seed of the stream outside, while the one inside is in use
        if seed is not None:
            seed_all(seed)
        elif comm.size > 1:
            follow_chief(comm)

    @property
    def seed(self) -> int:
        """The seed with which a run started, even if none was given. Streams that are named by a key depend on it."""
        if self._restored is not None:
            return self._restored
        if self._seed is not None:
            return self._seed
        return self._seed_outside if self._inside else torch.initial_seed()

    @seed.setter
    def seed(self, value: int) -> None:
        self._restored = value

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context of ``run``: numbers are drawn from the stream inside."""
        return _In(self, True) if self._two else _UNCHANGED

    def outside(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context of code within ``run`` that must draw identically on all towers."""
        return _In(self, False) if self._two else _UNCHANGED

    def switch(self, inside: bool) -> bool:
        """Switches to one of the two streams, and returns whether numbers were drawn from the stream inside before."""
        before = self._inside
        if before is not inside:
            current, other = generators.take(self._device), self._other
            if inside:
                self._seed_outside = torch.initial_seed()
            if other is None:  # the stream inside, which starts here
                base = self._seed if self._seed is not None else self._seed_outside
                seed_on(self._device, mix(base, *self._key, *self._name))
            else:
                generators.put(other, self._device)
                if current.device is None:  # while a graph is captured, both keep their state
                    current = current._replace(device=other.device)
            self._other, self._inside = current, inside
        return before

    def restart(self, key: object) -> None:
        """Restarts this tower's stream from seed, ``key`` and the tower's index. With virtual towers: does nothing."""
        if not self._virtual:
            before = self.switch(False)
            self._other, self._key = None, (key,)
            self.switch(before)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of this tower's streams. The stream inside is None if there was no run."""
        before = self.switch(False)
        state: dict[str, Any] = {"outside": generators.state(self._device), "inside": None}
        if self._other is not None:
            self.switch(True)
            state["inside"] = generators.state(self._device)
        self.switch(before)
        return state

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continues from the state of :meth:`state_dict`, on this tower.

        Raises:
            ValueError, TypeError, KeyError, RuntimeError, OverflowError: ``saved`` is not such a state. Nothing has
                changed.
        """
        outside = generators.read(saved["outside"], self._device)
        inside = generators.read(saved["inside"], self._device) if saved["inside"] is not None else None
        before = self.switch(False)
        try:
            generators.put(outside, self._device)
            self._other = None
            if inside is not None and self._two:
                with undisturbed(self._device):
                    generators.put(inside, self._device)
                    self._other = generators.take(self._device)
        finally:
            self.switch(before)


class _In:
    """The context in which numbers are drawn from one of a tower's two streams."""

    __slots__ = ("_before", "_inside", "_streams")

    def __init__(self, streams: TowerStreams, inside: bool) -> None:
        self._streams, self._inside = streams, inside

    def __enter__(self) -> None:
        self._before = self._streams.switch(self._inside)

    def __exit__(self, *_: object) -> None:
        self._streams.switch(self._before)


_UNCHANGED = contextlib.nullcontext()


@contextlib.contextmanager
def undisturbed(device: torch.device = _CPU) -> Iterator[None]:
    """Restores the generators after the context, in which they may be seeded and used.

    Args:
        device: its generator is restored as well as those of the CPU.
    """
    before = generators.take(device)
    try:
        yield
    finally:
        generators.put(before, device)


class Stream:
    """A separate random stream for code that uses the global CPU generators.

    Inside ``with stream:`` the generators continue where the stream's last block ended. Outside, they are not affected.
    """

    def __init__(self, seed: int) -> None:
        with undisturbed():
            seed_cpu(seed)
            self._place = generators.take(_CPU)

    def __enter__(self) -> None:
        self._outside = generators.take(_CPU)
        generators.put(self._place, _CPU)

    def __exit__(self, *_: object) -> None:
        self._place = generators.take(_CPU)
        generators.put(self._outside, _CPU)
