"""A folder of checkpoints, each complete or absent, its lock, and the choice of the tower that writes there.

::

    results/run/
        step-00000100/    manifest.json, tensors.safetensors; of sharded models, also shards-00000.safetensors, …
        step-00000120/
        best/             a named checkpoint
        latest            a text file: the name of the newest checkpoint, for people and other programs
        .lock             the lock of the process that writes here
        .ended            a note of the run: it has ended, and after which step
        .stop             a note of the run's evaluator: the run must end early, and why
        .saving-…         a checkpoint that is being written, or that a killed process left
        .evaluation.…     such files of an evaluator

A checkpoint is written under another name, flushed to the disk, and renamed. ``latest`` is replaced in the same way.

[Note: the newest checkpoint] The newest checkpoint is found by listing the folder, not by reading ``latest``. That file
is replaced after the rename, so a kill between the two would hide a complete checkpoint. A run that restored an earlier
step renames later checkpoints to ``replaced-…``. Otherwise, the next restart would restore them.

[Note: files of others] A user may keep other files in the folder, and name a checkpoint like one of them. A save
therefore replaces and removes only empty folders and folders that contain a file of a checkpoint and no other file, and
``latest`` only if it contains the name of a checkpoint. Hidden files in a checkpoint, such as those of a network file
system, are removed with it. An evaluator marks a checkpoint that it keeps with a hidden file, ``.evaluation``. The run
does not replace a marked checkpoint, and an evaluator replaces only those with its own mark.

[Note: which tower writes] Hosts may share the folder (a network file system), or each have their own folder under the
same path. The towers find this out with probe files: every tower creates one, then checks which probes are in its own
folder. The lowest-numbered tower among these writes there. So hosts that share the folder write one copy, hosts with
their own disks write one copy each, and no configuration is needed.

[Note: the lock of a process] Only one process at a time writes into a folder, with any number of managers. The kernel
releases a POSIX lock when its process ends, for any reason. (A ``flock`` would be kept by data loader processes whose
parent was killed.) A POSIX lock is also released when the process closes any descriptor of the file. So a process opens
the lock file once, and all holders share one :class:`FolderLock`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import queue
import secrets
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mirrored.checkpoint.errors import CheckpointError
from mirrored.checkpoint.manifest import LATEST, NAME, TENSORS, Manifest, dump, name_of, step_of
from mirrored.checkpoint.tensors import is_shard_file
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.system.messages import get_logger
from towers.system.timeouts import Deadline, clock

if TYPE_CHECKING:
    from mirrored.checkpoint.shards import Shards

log = get_logger("mirrored")

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_EVALUATION = ".evaluation"
"""The start of the marks of evaluators; see [Note: files of others]."""
_SAVING, _REMOVING, _REPLACING, _PROBE = "saving-", "removing-", "replacing-", "probe-"
ENDED, STOP = ".ended", ".stop"
"""The names of notes between a run and its evaluator."""


class Disk:
    """The system calls that write checkpoints. Tests replace them to simulate failures. All errors are ``OSError``."""

    def create(self, path: pathlib.Path) -> int:
        """Opens a new file for writing. It must not exist.

        Only its owner can read it. The umask may remove more permissions.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def mkdir(self, path: pathlib.Path) -> None:
        os.mkdir(path, FOLDER_MODE)

    def rename(self, old: pathlib.Path, new: pathlib.Path) -> None:
        os.rename(old, new)

    def unlink(self, path: pathlib.Path) -> None:
        os.unlink(path)

    def rmdir(self, path: pathlib.Path) -> None:
        os.rmdir(path)

    def write_file(self, path: pathlib.Path, pieces: Iterable[memoryview]) -> tuple[int, str]:
        """Writes a new file, flushes it to the disk, and returns its size in bytes and its SHA-256.

        A thread computes the checksum in parallel with writing.
        """
        size, checksum = 0, hashlib.sha256()
        to_hash: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()

        def hash_pieces() -> None:
            for piece in iter(to_hash.get, None):
                checksum.update(piece)

        with contextlib.ExitStack() as stack:
            descriptor = self.create(path)
            stack.callback(os.close, descriptor)
            # An executor accepts no work after the main thread has ended, but the last checkpoint may still be written
            # then.
            hashing = threading.Thread(target=hash_pieces, name="mirrored-checksum", daemon=True)
            hashing.start()
            stack.callback(hashing.join)
            stack.callback(to_hash.put, None)
            for piece in pieces:
                to_hash.put(piece)
                size += len(piece)
                while piece:
                    piece = piece[self.write(descriptor, piece) :]
            self.fsync(descriptor)
        return size, checksum.hexdigest()

    def sync_folder(self, path: pathlib.Path) -> None:
        """Flushes the entries of a folder to the disk: files that were created in it or renamed into it."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace_file(self, path: pathlib.Path, text: str) -> None:
        """Replaces the contents of a small file atomically: readers see either the old or the new contents."""
        beside = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            self.unlink(beside)
        self.write_file(beside, [memoryview(text.encode())])
        self.rename(beside, path)
        self.sync_folder(path.parent)

    def remove(self, path: pathlib.Path) -> None:
        """Removes a file, a link, or a folder with its contents. It does not follow links in the folder."""
        if path.is_dir() and not path.is_symlink():
            for entry in path.iterdir():
                self.remove(entry)
            self.rmdir(path)
        else:
            self.unlink(path)


class Folder:
    """Writes, lists and removes the checkpoints of one folder.

    Args:
        path: the folder; :meth:`elect_writer` creates it.
        disk: the system calls.
        keep: the number of newest steps to keep.
        writer: a part of the names of unfinished files, so that other writers leave them alone. Empty for the run.
    """

    def __init__(self, path: pathlib.Path, disk: Disk, keep: int = 2, writer: str = "") -> None:
        self.path = path
        self.disk = disk
        self.keep = keep
        self._prefix = f".{writer}." if writer else "."
        self._mark = f".{writer}" if writer else None

    def elect_writer(self, comm: Communicator) -> int:
        """Returns the tower that writes into this tower's folder, and creates the folder if needed.

        All towers must call it.

        Raises:
            CheckpointError: on all towers: one of them cannot create the folder or write to it.
        """
        token = secrets.token_hex(8)  # see [Note: which tower writes]
        probe = self._unfinished(_PROBE, token)
        problem = ""
        try:
            if not self.path.is_dir():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):  # another tower was faster, or the next call fails
                    self.disk.mkdir(self.path)
                    self.disk.sync_folder(self.path.parent)
            os.close(self.disk.create(probe))
        except OSError as error:
            problem = f"{self.path} cannot be written to: {error.strerror}"
        try:
            towers = announce(comm, "makes a CheckpointManager", [token, problem])
            for tower, (_, error_text) in enumerate(towers):
                if error_text:
                    raise CheckpointError(f"tower {tower}: {error_text}")
            writer = next(i for i, (other, _) in enumerate(towers) if self._unfinished(_PROBE, other).exists())
            comm.barrier()  # all towers have looked for the probes
            return writer
        finally:
            with contextlib.suppress(OSError):
                self.disk.unlink(probe)

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint here, in ascending order, without checking the checkpoints.

        See [Note: the newest checkpoint].
        """
        with contextlib.suppress(OSError):
            steps = (step_of(entry.name) for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False))
            return sorted(step for step in steps if step is not None)
        return []

    def write(self, name: str, manifest: Manifest, pieces: Iterable[memoryview], shards: Shards | None = None) -> None:
        """Writes a checkpoint, then removes the oldest steps beyond ``keep``.

        Checkpoints of later steps are renamed to ``replaced-…``; see [Note: the newest checkpoint].

        Args:
            shards: sharded tensors, which all towers write.

        Raises:
            OSError, ValueError: a file could not be written, or other files of the user have that name. Earlier
                checkpoints are unchanged.
        """

        def write_files(temporary: pathlib.Path) -> None:
            self.disk.mkdir(temporary)
            size, checksum = self.disk.write_file(temporary / TENSORS, pieces)
            files = {TENSORS: {"bytes": size, "sha256": checksum}}
            if shards is not None:
                files |= shards.write(temporary, coordinates=True)
            self.disk.write_file(temporary / NAME, [memoryview(dump({**manifest, "files": files}))])
            self.disk.sync_folder(temporary)

        try:
            self._put(name, write_files)
        except Exception as error:
            if shards is not None:
                shards.give_up(error)
            raise

    def keep_as(self, name: str, source: pathlib.Path) -> None:
        """Keeps a checkpoint under a second name, which is never pruned. It replaces the one that it kept before.

        Raises:
            OSError: the checkpoint could not be linked, or a checkpoint of the run or other files of the user have that
                name. The previous checkpoint of that name is unchanged.
        """

        def link(temporary: pathlib.Path) -> None:
            link_files(source, temporary)
            if self._mark is not None:
                (temporary / self._mark).touch()

        self._put(name, link)

    def _unfinished(self, kind: str, name: str) -> pathlib.Path:
        return self.path / f"{self._prefix}{kind}{name}"

    def _put(self, name: str, make: Callable[[pathlib.Path], None]) -> None:
        place = self.path / name
        temporary = self._unfinished(_SAVING, f"{name}-{os.getpid()}")
        self.check_replaceable(name)
        try:
            make(temporary)
            self._move_in(temporary, place)
        except BaseException:
            with contextlib.suppress(OSError):
                self.disk.remove(temporary)
            raise
        self.disk.sync_folder(self.path)
        try:
            self._tidy(name)
        except OSError as error:
            log.warning(
                "%s is saved; writing %s or removing the files that it replaces failed: %s",
                place,
                LATEST,
                error.strerror,
            )

    def check_replaceable(self, name: str) -> None:
        """Checks that a checkpoint may have this name; see [Note: files of others].

        Raises:
            FileExistsError: another file or folder has it, or a checkpoint of another writer.
        """
        place = self.path / name
        if not os.path.lexists(place):
            return
        if not is_checkpoint(place):
            found = "is not a checkpoint"
        elif self._mark is None and (marks := [*place.glob(f"{_EVALUATION}*")]):
            found = f"was kept by an evaluator ({marks[0].name[1:]})"
        elif self._mark is not None and any(place.iterdir()) and not (place / self._mark).exists():
            found = f"was not kept by this evaluator ({self._mark[1:]})"
        else:
            return
        raise FileExistsError(errno.EEXIST, f"{place} {found}: move it away, or choose another name")

    def note(self, name: str) -> str | None:
        """Returns the text of a note, or None if there is none."""
        with contextlib.suppress(OSError):
            return (self.path / name).read_text(errors="replace")
        return None

    def leave_note(self, name: str, text: str | None) -> None:
        """Replaces a note; ``text=None`` removes it. A disk error is logged as a warning."""
        try:
            (self.path / name).unlink(missing_ok=True)
            if text is not None:
                self.disk.write_file(self.path / name, [memoryview(text.encode())])
        except OSError as error:
            log.warning("%s could not be written or removed: %s", self.path / name, error.strerror)

    def _move_in(self, temporary: pathlib.Path, place: pathlib.Path) -> None:
        if not os.path.lexists(place):
            self.disk.rename(temporary, place)
            return
        self.check_replaceable(place.name)
        before = self._unfinished(_REPLACING, place.name)
        if before.exists():  # an earlier save could not remove it
            self.disk.remove(before)
        self.disk.rename(place, before)
        try:
            self.disk.rename(temporary, place)
        except OSError:
            self.disk.rename(before, place)
            raise

    def _tidy(self, name: str) -> None:
        """Writes ``latest``, and removes checkpoints beyond ``keep``."""
        if (before := self._unfinished(_REPLACING, name)).exists():
            self.disk.remove(before)
        if (step := step_of(name)) is None:
            return
        if is_ours := self._may_write_latest():
            self.disk.replace_file(self.path / LATEST, f"{name}\n")
        for later in self._own_steps():
            if later > step:
                self._rename_replaced(self.path / name_of(later))
        for old in self._own_steps()[: -self.keep]:
            self._remove_whole(self.path / name_of(old))
        if not is_ours:
            raise FileExistsError(errno.EEXIST, f"{LATEST} was not written by a run")

    def _may_write_latest(self) -> bool:
        latest = self.path / LATEST
        if not os.path.lexists(latest):
            return True
        text = self.note(LATEST) if latest.is_file() and not latest.is_symlink() else None
        return text is not None and (not text or step_of(text.strip()) is not None)

    def _own_steps(self) -> list[int]:
        return [step for step in self.steps() if is_checkpoint(self.path / name_of(step))]

    def _rename_replaced(self, place: pathlib.Path) -> None:
        aside = self.path / f"replaced-{place.name}"
        if os.path.lexists(aside):
            self.check_replaceable(aside.name)
            self._remove_whole(aside)
        self.disk.rename(place, aside)
        log.warning("%s is of a later step than this run has reached: it was renamed to %s", place, aside.name)

    def _remove_whole(self, place: pathlib.Path) -> None:
        """Renames a checkpoint, then removes it, so that no reader sees a partly removed checkpoint."""
        away = self._unfinished(_REMOVING, f"{place.name}-{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            self.disk.remove(away)
        self.disk.rename(place, away)
        self.disk.remove(away)

    def clean(self) -> None:
        """Cleans up after a process that was killed while writing.

        It removes the process's unfinished files, and restores checkpoints that the process was replacing.
        """
        with contextlib.suppress(OSError):
            for entry in self.path.iterdir():
                unfinished = entry.name.removeprefix(self._prefix) if entry.name.startswith(self._prefix) else ""
                place = self.path / unfinished.removeprefix(_REPLACING)
                if unfinished.startswith(_REPLACING) and not place.exists():
                    self.disk.rename(entry, place)
                elif unfinished.startswith((_SAVING, _REMOVING, _REPLACING, _PROBE)):
                    if entry.is_dir():
                        log.info("%s was left by a run that ended while it saved; it is removed", entry)
                    self.disk.remove(entry)


def find_checkpoint(path: pathlib.Path) -> pathlib.Path:
    """Returns the checkpoint that a path names: its folder, or a file in it, or a run's folder or its ``latest``."""
    if path.name in (NAME, TENSORS) or is_shard_file(path.name):
        return path.parent
    if path.name == LATEST or ((path / LATEST).exists() and not (path / NAME).exists()):
        folder = path.parent if path.name == LATEST else path
        if steps := Folder(folder, Disk()).steps():
            return folder / name_of(steps[-1])
    return path


def is_checkpoint(place: pathlib.Path) -> bool:
    """Returns whether a save may replace a folder; see [Note: files of others]. A checkpoint may be damaged."""
    if place.is_symlink() or not place.is_dir():
        return False
    names = {entry.name for entry in place.iterdir()}
    visible = {name for name in names if not name.startswith(".")}
    return not names or (bool(visible) and all(name in (NAME, TENSORS) or is_shard_file(name) for name in visible))


def link_files(source: pathlib.Path, target: pathlib.Path) -> None:
    """Creates the folder ``target`` with the files of a checkpoint, as hard links if possible, otherwise as copies.

    If another checkpoint takes the name ``source`` meanwhile, the files may be a mixture of both. Their checksums
    detect it.

    Raises:
        OSError: the checkpoint was removed, before or during the call; or ``target`` exists or cannot be written.
    """

    def link(file: str, place: str) -> None:
        try:
            os.link(file, place, follow_symlinks=False)
        except OSError:  # another file system, or one that does not support links
            shutil.copyfile(file, place, follow_symlinks=False)

    shutil.copytree(source, target, symlinks=True, copy_function=link)


class FolderLock:
    """The lock file of a folder. This process holds the lock until it ends, or until this object is collected.

    Attributes:
        writers: the writers of this process that have trained or saved here, the newest last.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.writers: list[weakref.ref[Any]] = []
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(self, os.close, descriptor)


_locks: weakref.WeakValueDictionary[tuple[int, int, int], FolderLock] = weakref.WeakValueDictionary()
"""The locks of this process, by process id (a forked child holds none), device and inode."""

# Without it, two threads that find no lock would both take one, and the first that releases its lock would release the
# other's.
_taking = threading.Lock()


def take_lock(path: pathlib.Path, patience: float = 0.0) -> tuple[FolderLock, bool]:
    """Returns this process's lock on a file, and whether the lock is new. The file is created if it does not exist.

    Args:
        patience: seconds to wait for another process that holds the lock.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be opened.
    """
    deadline = Deadline(patience)
    while True:
        try:
            with _taking:  # see [Note: the lock of a process]; another thread may have taken the lock
                if path.exists() and (lock := _locks.get(_key(path))) is not None:
                    return lock, False
                lock = _locks[_key(path)] = FolderLock(path)
                return lock, True
        except BlockingIOError:
            if deadline.has_passed():
                raise
            clock.sleep(0.1)


def _key(path: pathlib.Path) -> tuple[int, int, int]:
    status = os.lstat(path)
    return os.getpid(), status.st_dev, status.st_ino
