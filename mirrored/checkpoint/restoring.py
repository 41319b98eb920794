"""Checks a checkpoint on all towers before any tower changes, restores it, and undoes the changes if it still fails.

[Note: which checkpoint is restored] If hosts have their own disks, the newest step that all towers have is restored,
unless a snapshot in memory is as new (:mod:`mirrored.checkpoint.memory`). A damaged checkpoint is skipped with a
warning, and the previous one is used. If there are checkpoints but none can be used, an error is raised, instead of
starting from the beginning. On another number of towers, all towers load tower 0's state of objects that differed
between towers. The log names these objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

from mirrored.checkpoint.errors import CheckpointError, listed, raise_first
from mirrored.checkpoint.folder import Folder
from mirrored.checkpoint.manifest import StoredCheckpoint, name_of, step_of
from mirrored.checkpoint.tracked import Rollback, Tracked, TrackedModule, TrackedOptimizer
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.system.messages import get_logger

log = get_logger("mirrored")


@dataclasses.dataclass(frozen=True)
class Restored:
    """The checkpoint from which a run continues.

    Attributes:
        name: the checkpoint's name.
        step: the step after which it was saved.
        towers: the number of towers that saved it.
        left: names of objects in the checkpoint that this run does not restore.
        of_first_tower: names of objects that differed between towers, and that every tower has loaded from tower 0,
            because the number of towers has changed.
        in_memory: whether it is a snapshot, which may not be on the disk.
    """

    name: str
    step: int
    towers: int
    left: tuple[str, ...] = ()
    of_first_tower: tuple[str, ...] = ()
    in_memory: bool = False


class Restorer:
    """Restores the tracked objects of all towers from a folder. All towers must make the same calls.

    Args:
        verifies: whether this tower reads whole checkpoints to compare checksums. One tower per folder does so.
    """

    def __init__(self, strategy: Strategy, folder: Folder, tracked: Sequence[Tracked], verifies: bool) -> None:
        self._strategy = strategy
        self._comm = strategy.communicator
        self._folder = folder
        self._tracked = tracked
        self._verifies = verifies

    def restore_newest(self, snapshot: pathlib.Path | None = None) -> Restored | None:
        """Restores the newest checkpoint that is intact on all towers, and returns it, or None if no tower has any.

        Args:
            snapshot: a snapshot in memory that is known to be intact on all towers.

        Raises:
            CheckpointError: see ``CheckpointManager.resume`` and [Note: which checkpoint is restored].
        """
        towers = announce(self._comm, "looks for checkpoints", self._folder.steps())
        snapshots = [] if snapshot is None else [(step_of(snapshot.name) or 0, True, snapshot)]
        if not any(towers) and not snapshots:
            return None
        folder = self._folder.path
        common = [(step, False, folder / name_of(step)) for step in set(towers[0]).intersection(*towers[1:])]
        candidates = sorted([*common, *snapshots], reverse=True)
        newest = max((step for steps in towers for step in steps), default=0)
        if newest > max((step for step, _, _ in candidates), default=-1):
            self._warn(_why_not_newest(newest, towers))
        problem = ""
        for _, in_memory, path in candidates:
            try:
                stored = self.open(path, in_memory=in_memory)
            except CheckpointError as error:
                problem = str(error)
                self._warn(f"{problem}; the checkpoint before it is used, if there is one")
            else:
                return self._restore(stored, in_memory=in_memory)
        if not candidates:
            tower = next(tower for tower, steps in enumerate(towers) if newest in steps)
            raise CheckpointError(
                f"no checkpoint in {folder} exists for all towers (step {newest} exists for tower {tower}): copy "
                "it to the other hosts, or remove it to start from the beginning"
            )
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoints in {folder} can be used: {problem}; remove them to start "
            "from the beginning"
        )

    def restore(self, name: str) -> Restored:
        """Restores a checkpoint of this folder by its name.

        Raises:
            CheckpointError: on all towers: it is damaged, or does not fit. No object has changed.
        """
        return self._restore(self.open(self._folder.path / name))

    def open(self, path: pathlib.Path, *, in_memory: bool = False) -> StoredCheckpoint:
        """Opens the checkpoint at this path if it is intact on all towers. The caller must close it.

        Args:
            in_memory: whether it is a snapshot, which is known to be intact.

        Raises:
            CheckpointError: on all towers: it is not intact on one of them.
        """
        problem = ""
        with contextlib.ExitStack() as stack:
            try:
                stored = StoredCheckpoint(path, check=self._verifies and not in_memory, in_memory=in_memory)
                stack.callback(stored.close)
            except CheckpointError as error:
                problem = str(error)
            raise_first(self._comm, f"checks checkpoint {path.name}", problem)
            stack.pop_all()
        return stored

    def _restore(self, stored: StoredCheckpoint, *, in_memory: bool = False) -> Restored:
        """Restores a checkpoint that is known to be intact, and closes it."""
        restored = dataclasses.replace(self.load(stored), in_memory=in_memory)
        if self._comm.index == 0:
            source, remark = "snapshot " if in_memory else "", _remark(restored, self._comm.size)
            log.info("resuming from %s%s (step %d)%s", source, stored.path, restored.step, remark)
        return restored

    def load(self, stored: StoredCheckpoint) -> Restored:
        """Loads a checkpoint that is known to be intact, and closes it.

        Raises:
            CheckpointError: on all towers: it does not fit. No object has changed.
        """
        with contextlib.closing(stored), self._strategy.health.during(f"restoring checkpoint {stored.path.name}"):
            self._strategy.engine.mirror_pending()
            return _load_all(self._comm, self._tracked, stored)

    def _warn(self, text: str) -> None:
        if self._comm.index == 0:
            log.warning("%s", text)


def _why_not_newest(newest: int, towers: Sequence[Sequence[int]]) -> str:
    has, has_not = ([str(i) for i, steps in enumerate(towers) if (newest in steps) is there] for there in (True, False))
    return (
        f"the checkpoint of step {newest} is there for tower {', '.join(has)}, but not for tower {', '.join(has_not)}: "
        "the newest that all have is used"
    )


def _remark(restored: Restored, towers: int) -> str:
    remarks = []
    if restored.towers != towers:
        remarks.append(f"by {restored.towers} towers, now {towers}")
    if differed := [name for name in restored.of_first_tower if not name.startswith("mirrored.")]:
        remarks.append(f"all take tower 0's where towers differed in {listed(differed)}")
    if left := [name for name in restored.left if not name.startswith("mirrored.")]:
        remarks.append(f"without its {listed(left)}")
    return f" ({'; '.join(remarks)})" if remarks else ""


def _load_all(comm: Communicator, tracked: Sequence[Tracked], stored: StoredCheckpoint) -> Restored:
    """Loads the state of all tracked objects. All towers must call it.

    Raises:
        CheckpointError: on all towers: the state of an object does not fit on one of them. No object has changed.
    """
    manifest = stored.manifest
    same_towers = manifest["towers"] == comm.size
    tower = comm.index if same_towers else 0
    prefix = f"checkpoint {stored.path} does not fit the objects of this program; nothing was changed: "
    raise_first(comm, "checks a checkpoint", "; ".join(_problems(stored, tower, tracked)), prefix)
    loaded = {item.name for item in tracked}
    different = {name.partition("/")[0] for name in stored.of_each_tower()} if not same_towers else set()
    rollbacks: list[tuple[str, Rollback]] = []
    try:
        problem = _load(stored, tower, sorted(tracked, key=_order), rollbacks)
        raise_first(comm, "loads a checkpoint", problem, prefix)
    except BaseException:
        for name, roll_back in rollbacks:
            try:
                roll_back()
            except Exception as error:  # an object that rejected its new state may also reject its old one
                log.warning("%s could not be given the state that it had: %s: %s", name, type(error).__name__, error)
        raise
    return Restored(
        stored.path.name,
        manifest["step"],
        manifest["towers"],
        tuple(name for name in manifest["objects"] if name not in loaded),
        tuple(name for name in manifest["objects"] if name in loaded & different),
    )


def _order(item: Tracked) -> int:
    """Returns the position in the order of loading: custom objects, models and optimizers, then the strategy.

    The strategy is last because loading may draw random numbers.
    """
    return 2 if item.name.startswith("mirrored.") else int(isinstance(item, (TrackedModule, TrackedOptimizer)))


def _load(
    stored: StoredCheckpoint, tower: int, tracked: Sequence[Tracked], rollbacks: list[tuple[str, Rollback]]
) -> str:
    """Loads all objects. Returns the message of the first error, or "". It prepares all rollbacks before any change."""
    try:
        for item in tracked:
            rollbacks.append((item.name, item.rollback()))
        for item in tracked:
            places = item.places(stored.state(item.name, tower, data=False))
            item.load(stored.state(item.name, tower, places=places))
    except Exception as error:  # methods of custom objects may raise any exception
        return f"{item.name} cannot load its state: {type(error).__name__}: {error}"
    return ""


def _problems(stored: StoredCheckpoint, tower: int, tracked: Sequence[Tracked]) -> Iterator[str]:
    """Yields the objects that do not fit, as far as this is known before loading."""
    for item in tracked:
        try:
            problem = item.problem(stored.state(item.name, tower, data=False))
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:  # a comparison with an untrusted state may raise any exception
            problem = f"it cannot be compared: {type(error).__name__}: {error}"
        if problem:
            yield f"{item.name}: {problem}"
