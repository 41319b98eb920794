"""Where a tower is in its training, in memory that others can read when the tower itself can no longer speak.

The record is a small file in the private directory of whoever started the towers, mapped into the tower: what was
written stays when the tower is killed. Without a starter of ours it is memory of the tower's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import pathlib
import struct
import time

_BYTES = 256
_SIGN = struct.Struct("=qd")  # process id, last sign of life
_PLACE = struct.Struct("=qq??d64s")  # run, step, whether it runs, whether it evaluates, since when, phase
_CALL = struct.Struct("=96s")
_PLACE_AT = 16
_CALL_AT = 128
_SAVING_AT = 224


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tower is.

    Attributes:
        run: how many runs have begun, which counts alike on all towers.
        step: the training step that runs, else the last one; the number that a checkpoint has.
        running: whether the last run goes on.
        evaluates: whether the run is none of training.
        phase: what the tower does there; empty where it is in the script's own code.
        since: when it began with that, in ``time.monotonic()`` seconds of its host.
        call: the collective that it is in, if that has a name.
    """

    run: int = 0
    step: int = 0
    running: bool = False
    evaluates: bool = False
    phase: str = ""
    since: float = 0.0
    call: str = ""

    @property
    def is_between_runs(self) -> bool:
        """Whether no run goes on, and there was one."""
        return self.run > 0 and not self.running

    @property
    def when(self) -> str:
        """Where that is in the training."""
        if self.running and not self.evaluates:
            return f"in step {self.step}"
        when = f"after step {self.step}" if self.step else "before its first step"
        return f"in an evaluation {when}" if self.running else when

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.when, self.phase, self.call and f"at {self.call}")))


class Record:
    """One tower's record, as the tower writes it or as another process reads it.

    Args:
        path: its file; None keeps it in this process.
        create: make the file anew, as the tower does when it starts.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, create: bool = False) -> None:
        self._path = pathlib.Path(path) if path else None
        self._memory: mmap.mmap | bytearray = bytearray(_BYTES)
        if self._path is not None:
            # Never made shorter: an earlier strategy of this process may have it mapped.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            try:
                if create:
                    os.ftruncate(descriptor, _BYTES)
                self._memory = mmap.mmap(descriptor, _BYTES)
            finally:
                os.close(descriptor)
            if create:
                self.enter(0, 0, False, False, b"")
                self.call(b"")
                self.save(False)
        if create or path is None:
            self.give_sign()

    def enter(self, run: int, step: int, running: bool, evaluates: bool, phase: bytes) -> None:
        """The tower is in another phase now."""
        _PLACE.pack_into(self._memory, _PLACE_AT, run, step, running, evaluates, time.monotonic(), phase)

    def call(self, name: bytes) -> None:
        """The tower is in a collective of this name; empty: in none."""
        _CALL.pack_into(self._memory, _CALL_AT, name)

    def save(self, saving: bool) -> None:
        """The tower is writing a checkpoint, or no longer."""
        self._memory[_SAVING_AT] = saving

    @property
    def saves(self) -> bool:
        """Whether the tower is writing a checkpoint."""
        return self._memory[_SAVING_AT] != 0

    def give_sign(self) -> None:
        """The tower lives."""
        _SIGN.pack_into(self._memory, 0, os.getpid(), time.monotonic())

    @property
    def sign(self) -> float:
        """When the tower has given the last sign of life, in ``time.monotonic()`` seconds of its host."""
        return float(_SIGN.unpack_from(self._memory)[1])

    def read(self) -> Place:
        """Where the tower is, or was when it ended."""
        run, step, running, evaluates, since, phase = _PLACE.unpack_from(self._memory, _PLACE_AT)
        (call,) = _CALL.unpack_from(self._memory, _CALL_AT)
        return Place(run, step, running, evaluates, _text(phase), since, _text(call))

    def beside(self, tower: int) -> Record | None:
        """The record of another tower that has the same starter, if it has."""
        if self._path is None:
            return None
        return find(self._path.parent, tower)


def path_in(directory: os.PathLike[str] | str, tower: int) -> pathlib.Path:
    """Where the record of ``tower`` lies in its starter's directory."""
    return pathlib.Path(directory) / f"whereabouts{tower}"


def find(directory: os.PathLike[str] | str, tower: int) -> Record | None:
    """The record of ``tower``, if it has one in this directory."""
    with contextlib.suppress(OSError, ValueError):
        return Record(path_in(directory, tower))
    return None


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")
