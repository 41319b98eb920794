"""Taking a checkpoint on: all is checked on all towers before anything changes on one; what still fails goes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from mirrored.checkpoint.capture import own_name
from mirrored.checkpoint.codec import Malformed, decode
from mirrored.checkpoint.errors import CheckpointError
from mirrored.checkpoint.folder import Opened
from mirrored.checkpoint.together import first_problem
from mirrored.checkpoint.tracked import Tracked, TrackedModule, TrackedOptimizer
from mirrored.checkpoint.way_back import WayBack
from towers.collectives.communicator import Communicator
from towers.system.log import get_logger

log = get_logger("mirrored")


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a run goes on from.

    Attributes:
        name: of the checkpoint.
        step: after which it was saved.
        towers: how many there were.
        left: names of what is in the checkpoint and was not asked for.
        of_first_tower: names of what was saved for each tower, and of which every tower has taken tower 0's, because
            there were another number of towers.
    """

    name: str
    step: int
    towers: int
    left: tuple[str, ...] = ()
    of_first_tower: tuple[str, ...] = ()


class _Reader:
    """One tower's view of an opened checkpoint."""

    def __init__(self, opened: Opened, tower: int, towers: int) -> None:
        self._opened = opened
        manifest = opened.manifest
        own = manifest["own"]
        self.same_towers = manifest["towers"] == towers and len(own) == towers
        self._tower = tower if self.same_towers else 0
        self._objects = {**manifest["objects"], **(own[tower] if self.same_towers else {})}
        self._names = set(opened.tensors.names)

    def decode(self, name: str, *, data: bool) -> Any:
        """The state of an object; without ``data``, its tensors are empty shells.

        Raises:
            CheckpointError: the checkpoint is malformed.
        """

        def tensor(path: str) -> Tensor:
            mine = own_name(path, self._tower)
            found = mine if mine in self._names else path
            return self._opened.tensors.read(found) if data else self._opened.tensors.describe(found)

        try:
            return decode(self._objects[name], tensor)
        except (Malformed, RecursionError) as error:
            raise CheckpointError(f"{self._opened.path}: {name} cannot be read: {error}") from None


def restore(comm: Communicator, tracked: Sequence[Tracked], opened: Opened) -> Restored:
    """Give everything that is tracked its state of the checkpoint; all towers call it.

    Raises:
        CheckpointError: on all towers, when something does not fit on one of them; then nothing has changed.
    """
    reader = _Reader(opened, comm.index, comm.size)
    _agree(comm, opened, "checks a checkpoint", *_problems(opened, reader, tracked))
    manifest = opened.manifest
    taken = {one.name for one in tracked}
    different = {name.partition("/")[0] for name in opened.of_each_tower()} if not reader.same_towers else set()
    restored = Restored(
        opened.path.name,
        manifest["step"],
        manifest["towers"],
        tuple(name for name in manifest["objects"] if name not in taken),
        tuple(name for name in manifest["objects"] if name in taken & different),
    )
    ways_back: list[tuple[str, WayBack]] = []
    try:
        _agree(comm, opened, "takes a checkpoint on", *_take_on(reader, sorted(tracked, key=_turn), ways_back))
    except BaseException:
        for name, go_back in ways_back:
            try:
                go_back()
            except Exception as error:  # what refused its new state may refuse its old one
                log.warning("%s could not be given the state that it had: %s: %s", name, type(error).__name__, error)
        raise
    return restored


def _turn(one: Tracked) -> int:
    """When a thing is loaded: strangers' first, and our own last, since loading may draw random numbers."""
    return 2 if one.name.startswith("mirrored.") else int(isinstance(one, (TrackedModule, TrackedOptimizer)))


def _take_on(reader: _Reader, tracked: Sequence[Tracked], ways_back: list[tuple[str, WayBack]]) -> Iterator[str]:
    """Load everything, up to what cannot be; yields why. What leads back is noted before anything changes."""
    for load in (False, True):
        for one in tracked:
            try:
                if load:
                    one.load(reader.decode(one.name, data=True))
                else:
                    ways_back.append((one.name, one.way_back()))
            except Exception as error:  # whatever a stranger's methods raise
                yield f"{one.name} cannot take it on: {type(error).__name__}: {error}"
                return


def _problems(opened: Opened, reader: _Reader, tracked: Sequence[Tracked]) -> list[str]:
    found = []
    for one in tracked:
        if lacking := opened.lacks(one.name):
            found.append(lacking)
            continue
        try:
            problem = one.problem(reader.decode(one.name, data=False))
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:  # whatever comes of comparing with what a stranger has written
            problem = f"it cannot be compared: {type(error).__name__}: {error}"
        if problem:
            found.append(f"{one.name}: {problem}")
    return found


def _agree(comm: Communicator, opened: Opened, call: str, *problems: str) -> None:
    if found := first_problem(comm, call, "; ".join(problems)):
        raise CheckpointError(f"checkpoint {opened.path} does not fit what is here, nothing was changed: {found}")
