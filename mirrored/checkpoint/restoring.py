"""Taking a checkpoint on: everything is checked on all towers before anything is changed on one."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mirrored.checkpoint.capture import own_name
from mirrored.checkpoint.codec import Malformed, decode
from mirrored.checkpoint.errors import CheckpointError
from mirrored.checkpoint.folder import Opened
from mirrored.checkpoint.together import first_problem
from mirrored.checkpoint.tracked import Tracked, TrackedModule, TrackedOptimizer
from towers.collectives.communicator import Communicator


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
    _agree(comm, opened, "nothing was changed", "checks a checkpoint", *_problems(opened, reader, tracked))
    # What cannot be checked beforehand goes first, and can go back.
    first = [one for one in tracked if not isinstance(one, (TrackedModule, TrackedOptimizer))]
    others = [one for one in tracked if isinstance(one, (TrackedModule, TrackedOptimizer))]
    before: list[tuple[Tracked, Any]] = []
    failed = []
    for one in first:
        try:
            state = reader.decode(one.name, data=True)
            before.append((one, copy.deepcopy(one.state())))
            one.load(state)
        except Exception as error:  # whatever a stranger's load_state_dict raises
            failed.append(f"{one.name} cannot take it on: {type(error).__name__}: {error}")
            break
    try:
        _agree(comm, opened, "nothing was changed", "takes a checkpoint on", *failed)
    except CheckpointError:
        for one, state in reversed(before):
            with contextlib.suppress(Exception):  # the one that refused its new state may refuse its old one
                one.load(state)
        raise
    try:
        for one in others:
            one.load(reader.decode(one.name, data=True))
    except Exception as error:
        failed.append(f"{one.name} cannot take it on: {type(error).__name__}: {error}")
    _agree(comm, opened, "what is here is changed in part", "has taken a checkpoint on", *failed)
    manifest = opened.manifest
    taken = {one.name for one in tracked}
    different = {name.partition("/")[0] for name in opened.of_each_tower()} if not reader.same_towers else set()
    return Restored(
        opened.path.name,
        manifest["step"],
        manifest["towers"],
        tuple(name for name in manifest["objects"] if name not in taken),
        tuple(name for name in manifest["objects"] if name in taken & different),
    )


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


def _agree(comm: Communicator, opened: Opened, state: str, call: str, *problems: str) -> None:
    if found := first_problem(comm, call, "; ".join(problems)):
        raise CheckpointError(f"checkpoint {opened.path} does not fit what is here, {state}: {found}")
