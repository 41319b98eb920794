"""Snapshots in the memory of agents. Restarted towers resume from them, even if the checkpoint on the disk is older.

[Note: snapshots in memory] The agent of a host opens a few files that have no name in any file system (``memfd``), and
creates links to them in its private folder. A snapshot is a checkpoint in that folder, except that its tensors are
stored in one of these files. So it outlives the towers, and its memory is freed when the agent ends for any reason. The
format, the checksums and the choice of the towers that write are those of checkpoints. The newest snapshot is kept. The
previous one is removed after the newest is complete.

If an agent has lost its snapshot or has an older one, its towers receive the newest by broadcast, from the first tower
that has it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

import torch

from mirrored.checkpoint.codec import Malformed
from mirrored.checkpoint.errors import CheckpointError
from mirrored.checkpoint.folder import Disk, Folder
from mirrored.checkpoint.manifest import NAME, TENSORS, StoredCheckpoint, load, name_of
from mirrored.checkpoint.saver import Saver
from mirrored.checkpoint.tracked import Tracked
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import announce, announce_with_body
from towers.system.messages import digest_of, get_logger
from towers.topology import JOB_TOKEN, MEMORY

log = get_logger("mirrored")

_PIECE = 2**23  # bytes per broadcast
_WITHOUT_EFFECT = "memory_every_steps is without effect, checkpoints are on the disk only"


class Snapshots:
    """The newest snapshot of the tracked objects in the agents' memory. All towers must make the same calls.

    Args:
        folder: a folder in the memory of this tower's agent.
        job: identifies the job.
        every: the number of steps between snapshots.

    Raises:
        CheckpointError: on all towers: an agent's folder is not writable.
    """

    def __init__(self, strategy: Strategy, folder: Folder, tracked: Sequence[Tracked], job: str, every: int) -> None:
        self._strategy, self._comm, self._every = strategy, strategy.communicator, every
        self._job, self._folder, self._warned = job, folder, False
        self._saver = Saver(strategy, folder, tracked, {"job": job})

    def save(self, step: int, *, wait: bool) -> None:
        """Takes a snapshot after a step, if one is due. A snapshot that cannot be kept is a warning.

        Of sharded models, it takes none.

        Args:
            wait: whether to return only when the snapshot is written, instead of when the state is copied.

        Raises:
            TypeError, ValueError, MirrorError, DisagreementError: see ``CheckpointManager.save``.
        """
        if step % self._every:
            return
        if any(self._strategy.engine.recorder.sharded_models()):
            if not self._warned:
                self._warn(f"{_WITHOUT_EFFECT}: a model is sharded, and an agent has only the parts of its own towers")
            self._warned = True
            return
        with self._strategy.health.during(f"taking snapshot {name_of(step)}"), self._warning():
            self._saver.save(name_of(step), step, wait=wait)

    def newest(self) -> pathlib.Path | None:
        """Returns the newest intact snapshot of this job, after copying it to all agents, or None if there is none."""
        with self._warning():
            self._saver.wait()
        intact, problems = [], []
        for step in self._folder.steps() if self._saver.writes else ():
            path = self._folder.path / name_of(step)
            try:
                with contextlib.closing(StoredCheckpoint(path, in_memory=True)) as stored:
                    if stored.manifest.get("job") != self._job:
                        raise CheckpointError(f"{path} is a snapshot of another job")
                intact.append(step)
            except CheckpointError as error:
                problems.append(str(error))
        self._report(problems)
        towers = announce(self._comm, "looks for snapshots", [self._saver.writes, intact])
        newest = max((step for _, steps in towers for step in steps), default=None)
        if newest is None:
            return None
        if any(writes and newest not in steps for writes, steps in towers):
            source = next(tower for tower, (_, steps) in enumerate(towers) if newest in steps)
            if not self._fetch(newest, source, lacks=self._saver.writes and newest not in intact):
                return None
        return self._folder.path / name_of(newest)

    def _fetch(self, step: int, source: int, lacks: bool) -> bool:
        """Copies a snapshot from tower ``source`` if this tower ``lacks`` it. Returns whether all towers have it."""
        path, is_source = self._folder.path / name_of(step), self._comm.index == source
        manifest, problems = (path / NAME).read_bytes() if is_source else b"", []
        sent = load(announce_with_body(self._comm, "sends a snapshot", body=manifest)[source].body)
        pieces = self._broadcast(path / TENSORS if is_source else None, sent["files"][TENSORS]["bytes"], source)
        try:
            if lacks:
                if path.exists():  # it is damaged
                    self._folder.disk.remove(path)
                self._folder.write(path.name, sent, pieces)
                if load((path / NAME).read_bytes())["files"] != sent["files"]:
                    raise Malformed("it has another checksum than the one that was sent")
        except (OSError, ValueError, MemoryError) as error:
            problems.append(f"{path} cannot be taken from tower {source}: {error}")
        for _ in pieces:  # also the pieces that this tower does not need are collectives
            pass
        return not self._report(problems)

    def _broadcast(self, path: pathlib.Path | None, size: int, source: int) -> Iterator[memoryview]:
        """Yields the contents of tower ``source``'s file (``size`` bytes) in pieces. Each piece is a collective."""
        file = None if path is None else torch.from_file(str(path), size=size, dtype=torch.uint8, device="cpu")
        for start in range(0, size, _PIECE):
            length = min(_PIECE, size - start)
            piece = torch.empty(length, dtype=torch.uint8, device="cpu") if file is None else file[start:][:length]
            sent = piece.to(self._comm.device)
            self._comm.broadcast(sent, source)
            yield sent.cpu().numpy().data

    def _report(self, problems: Sequence[str]) -> bool:
        """Logs a warning for each problem of any tower's snapshots. Returns whether there are problems."""
        towers = announce(self._comm, "checks snapshots", problems)
        for tower, texts in enumerate(towers):
            for text in texts:
                self._warn(f"tower {tower}: {text}; it is not used")
        return any(towers)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:  # on all towers
            self._warn(f"no snapshot is kept in memory: {error}")

    def _warn(self, text: str) -> None:
        if self._comm.index == 0:
            log.warning("%s", text)


def keep_snapshots(
    strategy: Strategy, folder: pathlib.Path, tracked: Sequence[Tracked], every: int
) -> Snapshots | None:
    """Creates snapshots in memory, in addition to the checkpoints in ``folder``.

    If an agent does not keep snapshots, a warning is logged and the result is None. The command, the job's token and
    the folder on the disk identify the job.
    """
    comm, offered, place = strategy.communicator, os.environ.get(MEMORY), str(folder.absolute())
    local = [bool(offered), digest_of([os.environ.get(JOB_TOKEN), sys.argv, place])]
    towers = announce(comm, "keeps snapshots in memory", local)
    reason = (
        "a snapshot in memory would be lost at the end of the towers, because their agent does not restart "
        "them. Pass restarts= to the strategy, or --restarts to mirrored run (torchrun and srun keep no "
        "snapshots)"
    )
    if offered and all(is_offered for is_offered, _ in towers):
        kept = _MemoryFolder(pathlib.Path(offered, digest_of(place)), _Memory(pathlib.Path(offered)), keep=1)
        try:
            return Snapshots(strategy, kept, tracked, towers[0][1], every)  # command lines may differ: tower 0's counts
        except CheckpointError as error:  # on all towers
            reason = str(error)
    if comm.index == 0:
        log.warning("%s: %s", _WITHOUT_EFFECT, reason)
    return None


class _Memory(Disk):
    """Writes tensors into the agent's files, see [Note: snapshots in memory]. An empty file has no snapshot."""

    def __init__(self, offered: pathlib.Path) -> None:
        self._offered = offered

    def create(self, path: pathlib.Path) -> int:
        if path.name != TENSORS:
            return super().create(path)
        for link in sorted(self._offered.glob("file*")):
            descriptor = os.open(link, os.O_WRONLY | os.O_CLOEXEC)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
                if os.fstat(descriptor).st_size == 0:
                    os.symlink(link, path)
                    return descriptor
            os.close(descriptor)
        raise OSError(errno.ENOSPC, "all files of the agent are taken, by other managers of this script")

    def fsync(self, descriptor: int) -> None:
        """Does nothing, because flushing memory would not make it safer."""

    def unlink(self, path: pathlib.Path) -> None:
        if path.is_symlink():
            os.truncate(path, 0)
        super().unlink(path)


class _MemoryFolder(Folder):
    """Removes snapshots of later steps than the run's, instead of renaming them."""

    def _rename_replaced(self, place: pathlib.Path) -> None:
        self._remove_whole(place)
