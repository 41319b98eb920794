"""Towers of one host that reduce in memory they share, without a socket between them.

Every tower has a segment with an inbox of semaphores (one for each other tower), a table that says where its windows
are, and a staging area. A *window* is a piece of memory that a tower computes in and the others can reach, such as a
gradient bucket. Summing windows takes two meetings and no copy::

    meet                           all have filled their windows
    sum the own part of all        tower i reduces the i-th part over all windows, always from tower 0 to the last,
                                   and writes it into all of them, in pieces that fit the cache
    meet                           all parts are done

Everything else goes through the staging areas. They have two halves, which take turns, so that one meeting for each
piece is enough: who writes a half again has met everybody since, so everybody has read it.

What a tower writes before a meeting the others see after it: :mod:`towers.collectives.semaphores` says why.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from towers import machine
from towers.collectives import semaphores
from towers.collectives.arithmetic import reduce_into
from towers.collectives.communicator import Communicator, Deferred, Pending, as_bytes
from towers.collectives.peers import Peers
from towers.collectives.segment import ALIGNMENT, Segment, aligned
from towers.errors import PeerLostError, waited_in_vain

SEVERAL_HOSTS = "the towers run on several hosts"

_HALF = 2**20  # bytes of one half of a staging area
_ALONE = 2**15  # bytes up to which every tower reduces all for itself, which saves a meeting
_PIECE = 2**18  # bytes of a window that are reduced at a time: as many as two towers' fit into a core's cache
_WINDOWS = 4096
_ENTRY = 3  # integers of a window's entry: how often it was made anew, its file, its size in bytes
_TOKEN = 16  # bytes
_SPINS = 200
_NAP = 0.1  # seconds between two looks whether the others live


class _Layout:
    """Where things lie in a tower's segment, in bytes."""

    def __init__(self, towers: int) -> None:
        self.inbox = 0
        self.token = semaphores.BYTES * towers
        self.table = self.token + aligned(_TOKEN)
        self.staging = aligned(self.table + 8 * _ENTRY * _WINDOWS)
        self.total = self.staging + 2 * _HALF


class _Window:
    """What all towers reduce under one key.

    Attributes:
        segment: this tower's own memory for it.
        tensors: every tower's memory for it, as far as it is known here, and which ``versions`` of it that is.
        pieces: of the part that this tower reduces, every tower's, piece by piece.
    """

    def __init__(self, key: int, numel: int, dtype: torch.dtype, towers: int) -> None:
        self.key, self.numel, self.dtype = key, numel, dtype
        self.segment: Segment | None = None
        self.tensors: list[Tensor] = [torch.empty(0)] * towers
        self.versions = [0] * towers
        self.pieces: list[list[Tensor]] = []


class SharedMemoryCommunicator(Communicator):
    """Collectives of towers that are processes of one host; made by :func:`join`."""

    def __init__(
        self, base: Communicator, timeout: float, segments: Sequence[Segment], processes: Sequence[int]
    ) -> None:
        self.index, self.size, self.device = base.index, base.size, base.device
        self.backend = "shared memory"
        self._timeout = timeout
        self._segments = list(segments)
        self._processes = list(processes)
        self._layout = _Layout(self.size)
        others = [tower for tower in range(self.size) if tower != self.index]
        inbox = [segment.address + self._layout.inbox for segment in segments]
        self._outbox = [inbox[tower] + semaphores.BYTES * self.index for tower in others]
        self._inbox = [(tower, inbox[self.index] + semaphores.BYTES * tower) for tower in others]
        self._peers = Peers({tower: processes[tower] for tower in others})
        # With more towers than cores, whoever spins keeps from the core the one it waits for.
        self._spins = _SPINS if self.size <= machine.cores() else 0
        self._tables = [segment.integers(_ENTRY * _WINDOWS, self._layout.table) for segment in segments]
        self._half = 0
        self._staging: dict[tuple[torch.dtype, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._windows: dict[int, _Window] = {}
        self._queue: list[Tensor] = []

    # -- meeting -----------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Return when all towers have called it."""
        for address in self._outbox:
            semaphores.post(address)
        for tower, address in self._inbox:
            for _ in range(self._spins):
                if semaphores.take(address):
                    break
            else:
                self._await(tower, address)

    def _await(self, tower: int, address: int) -> None:
        deadline = time.monotonic() + self._timeout
        while not semaphores.sleep_until_taken(address, _NAP):
            lost = self._lost_peer()
            if lost is not None:
                if semaphores.take(address):  # it came before it went
                    return
                raise lost
            if time.monotonic() > deadline:
                raise waited_in_vain(self.index, self._timeout, f"tower {tower}")

    def _lost_peer(self) -> PeerLostError | None:
        gone = self._peers.gone()
        if not gone:
            return None
        names = ", ".join(f"tower {index} (process {self._processes[index]})" for index in gone)
        return PeerLostError(f"{names} ended while tower {self.index} waited for it in a collective")

    # -- windows -----------------------------------------------------------------------------------------

    def allocate(self, key: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if key >= _WINDOWS or not numel or device.type != "cpu":
            return super().allocate(key, numel, dtype, device)
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window(key, numel, dtype, self.size)
        entry = self._tables[self.index][_ENTRY * key : _ENTRY * (key + 1)]
        try:
            segment = Segment.create(numel * dtype.itemsize, reserve=True)
        except OSError:
            entry[2] = 0  # all see it, and use the staging areas for this key
            return super().allocate(key, numel, dtype, device)
        entry[0], entry[1], entry[2] = entry[0] + 1, segment.file, segment.nbytes
        window.segment, window.tensors[self.index] = segment, segment.tensor(dtype, numel)
        return segment.tensor(dtype, numel)  # not the same tensor: who counts its views is not to count ours

    def release(self, key: int) -> None:
        if self._windows.pop(key, None) is not None:
            self._tables[self.index][_ENTRY * key + 2] = 0

    def start_average(self, tensor: Tensor) -> Pending:
        self._queue.append(tensor)
        return Deferred(self.finish_started)

    def finish_started(self) -> None:
        """Do all that was started. Towers compute on the same cores as they reduce on: there is nothing to overlap."""
        queue, self._queue = self._queue, []
        if not queue:
            return
        at = {window.tensors[self.index].data_ptr(): window for window in self._windows.values()}
        windows = [at.get(tensor.data_ptr()) for tensor in queue]
        self._meet()
        within = [window if window is not None and self._reach(window) else None for window in windows]
        for window in within:
            if window is not None:
                for first, *others in window.pieces:
                    reduce_into(first, [first, *others], "sum", scale=1.0 / self.size)
                    for other in others:
                        other.copy_(first)
        self._meet()
        for tensor, window in zip(queue, within, strict=True):
            if window is None:
                self.all_reduce(tensor.mul_(1.0 / self.size))
            elif window.segment is not None:
                window.segment.withdraw()  # all have mapped it

    def _reach(self, window: _Window) -> bool:
        """Map the other towers' windows where they are new. False, on all towers, when some tower has none."""
        changed = False
        for tower, table in enumerate(self._tables):
            version, file, nbytes = table[_ENTRY * window.key : _ENTRY * (window.key + 1)]
            if nbytes < window.numel * window.dtype.itemsize:
                return False
            if version == window.versions[tower]:
                continue
            if tower != self.index:
                try:
                    segment = Segment.open(self._processes[tower], file)
                except OSError as error:
                    raise (self._lost_peer() or error) from None
                window.tensors[tower] = segment.tensor(window.dtype, window.numel)
            window.versions[tower] = version
            changed = True
        if changed:
            start, end = _part(window.numel, window.dtype.itemsize, self.size, self.index)
            step = _PIECE // window.dtype.itemsize
            columns = [tensor[start:end].split(step) for tensor in window.tensors] if start < end else []
            window.pieces = [list(piece) for piece in zip(*columns, strict=True)]
        return True

    # -- staging -----------------------------------------------------------------------------------------

    def _slots(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """Every tower's half of the staging area whose turn it is, as tensors."""
        halves = self._staging.get((dtype, numel))
        if halves is None:
            if len(self._staging) > 64:
                self._staging.clear()
            at = self._layout.staging
            first, second = (
                [segment.tensor(dtype, numel, at + half * _HALF) for segment in self._segments] for half in (0, 1)
            )
            halves = self._staging[dtype, numel] = first, second
        self._half ^= 1
        return halves[self._half]

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        if tensor.numel() == 0:
            return
        if not tensor.is_contiguous():
            dense = tensor.contiguous()
            self.all_reduce(dense, op)
            tensor.copy_(dense)
            return
        flat = tensor.detach().view(-1)
        if flat.nbytes <= _ALONE:
            slots = self._slots(flat.dtype, flat.numel())
            slots[self.index].copy_(flat)
            self._meet()
            reduce_into(flat, slots, op)
            return
        for piece in flat.split(_HALF // flat.element_size()):
            slots = self._slots(flat.dtype, piece.numel())
            slots[self.index].copy_(piece)
            self._meet()
            bounds = [_part(piece.numel(), flat.element_size(), self.size, tower) for tower in range(self.size)]
            start, end = bounds[self.index]
            parts = [slot[start:end] for slot in slots]
            total = torch.empty_like(parts[0])
            reduce_into(total, parts, op)
            parts[self.index].copy_(total)  # nobody else touches this part of any half
            self._meet()
            for slot, (start, end) in zip(slots, bounds, strict=True):
                piece[start:end].copy_(slot[start:end])

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        mine = as_bytes(tensor)
        rows = gathered.view(self.size, -1).view(torch.uint8) if tensor.numel() else gathered.view(self.size, 0)
        for start in range(0, mine.numel(), _HALF):
            piece = mine[start : start + _HALF]
            slots = self._slots(torch.uint8, piece.numel())
            slots[self.index].copy_(piece)
            self._meet()
            for row, slot in zip(rows, slots, strict=True):
                row[start : start + _HALF].copy_(slot)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        dense = tensor.detach().contiguous()
        data = as_bytes(dense)
        for piece in data.split(_HALF) if data.numel() else ():
            slot = self._slots(torch.uint8, piece.numel())[source]
            if self.index == source:
                slot.copy_(piece)
            self._meet()
            if self.index != source:
                piece.copy_(slot)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)

    def barrier(self) -> None:
        self._meet()

    def channel(self) -> Communicator:
        found = join(self, self._timeout)
        if isinstance(found, str):
            raise OSError(f"a second channel through shared memory cannot be made: {found}")
        return found

    def close(self) -> None:
        self._peers.close()
        for window in self._windows.values():
            if window.segment is not None:
                window.segment.withdraw()


def _part(numel: int, itemsize: int, towers: int, index: int) -> tuple[int, int]:
    """Where tower ``index``'s part of ``numel`` elements begins and ends; no two parts share a cache line."""
    step = max(1, ALIGNMENT // itemsize)
    size = -(-numel // (towers * step)) * step
    return min(numel, size * index), min(numel, size * (index + 1))


def join(base: Communicator, timeout: float) -> SharedMemoryCommunicator | str:
    """Share memory among all towers of ``base``, or say why they cannot; all towers get the same answer.

    That two towers run on one host is not believed but tried: beside equal boot ids, each maps the others' memory and
    looks for what they wrote there.

    Args:
        timeout: seconds that a collective may take.
    """
    layout = _Layout(base.size)
    token = secrets.token_bytes(_TOKEN)
    mine: Segment | None = None
    card: dict[str, Any] = {"process": os.getpid(), "host": machine.host_identity(), "token": token.hex()}
    try:
        if base.device.type != "cpu" or not semaphores.available():
            raise OSError("this system has no semaphores that processes can share")
        mine = Segment.create(layout.total, reserve=False)
        for tower in range(base.size):
            semaphores.create(mine.address + layout.inbox + semaphores.BYTES * tower)
        mine.tensor(torch.uint8, _TOKEN, layout.token).copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
        card["file"] = mine.file
    except OSError as error:
        card["problem"] = str(error)
    cards = [json.loads(text) for text in base.all_gather_bytes(json.dumps(card).encode())]
    problem = next(
        (f"tower {tower}: {other['problem']}" for tower, other in enumerate(cards) if "problem" in other), ""
    )
    if len({other["host"] for other in cards}) > 1:
        problem = SEVERAL_HOSTS
    segments: list[Segment] = []
    if not problem:
        try:
            segments = [mine if i == base.index else _open(other, layout) for i, other in enumerate(cards)]  # type: ignore[misc]
        except OSError as error:
            problem = f"tower {base.index}: {error}"
    verdicts = [text.decode() for text in base.all_gather_bytes(problem.encode())]
    if mine is not None:
        mine.withdraw()  # all have mapped it who could
    if any(verdicts):
        return next(filter(None, verdicts))
    return SharedMemoryCommunicator(base, timeout, segments, [other["process"] for other in cards])


def _open(card: dict[str, Any], layout: _Layout) -> Segment:
    segment = Segment.open(card["process"], card["file"])
    if segment.nbytes < layout.total or bytes(segment.tensor(torch.uint8, _TOKEN, layout.token)).hex() != card["token"]:
        raise OSError(f"the memory of process {card['process']} is not there: it runs in another container")
    return segment
