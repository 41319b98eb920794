"""Watches a folder of checkpoints.

[Note: new checkpoints are held] A run keeps only its newest checkpoints, and an evaluation may take longer than that. A
thread therefore scans the folder ten times a second, and hard-links the files of each new checkpoint into the watcher's
folder. The links stay until the checkpoint was read, even if the run prunes its own files. Hard links take no time, and
they use disk space only after that pruning. A checkpoint has its name only when it is complete, so held checkpoints are
complete, too.

[Note: an end of an earlier run] A note that the run has ended may be from an earlier run: the watched run is just
starting, and will remove it. Such a note counts only after a minute (or ``timeout_seconds``, if shorter), and only
while it still exists.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import threading
from collections import deque
from collections.abc import Iterator

from mirrored.checkpoint.errors import CheckpointError
from mirrored.checkpoint.folder import ENDED, Disk, Folder, link_files
from mirrored.checkpoint.manifest import name_of
from towers.system.messages import get_logger
from towers.system.timeouts import Deadline, clock

log = get_logger("mirrored")

PAUSE = 0.1
"""Seconds between two scans."""
_GRACE = 60.0


def checkpoints_iterator(
    folder: str | os.PathLike[str], held: str | os.PathLike[str], timeout_seconds: float = 3600.0
) -> Iterator[pathlib.Path | None]:
    """Yields every new checkpoint of a folder, the oldest first, until the run that writes there has ended.

    ::

        for path in mirrored.evaluation.checkpoints_iterator("results/run", "results/held"):
            if path is not None:  # results/held/…/step-00000100, which exists until the next iteration
                print(mirrored.load_weights(model, path))

    Every checkpoint that exists for at least a second is found, however long the caller takes. (A network file system
    may show it later.) While there is no new one, it yields None ten times a second. It ends when
    ``CheckpointManager.resume`` has recorded the end of the run, or when no new checkpoint arrived in time.

    Args:
        folder: the folder in which a CheckpointManager writes, or will write.
        held: a folder for this iterator only, which is created and at the end removed. It should be on the same file
            system; otherwise, checkpoints are copied.
        timeout_seconds: the longest wait for a new checkpoint.

    Raises:
        CheckpointError: no checkpoint at all arrived in time, or ``held`` contains files of others.
    """
    source, own = Folder(pathlib.Path(folder), Disk()), pathlib.Path(held)
    found, has_ended, closes = deque[pathlib.Path](), threading.Event(), threading.Event()
    before = source.note(ENDED)
    if own.is_dir() and not own.is_symlink() and all(entry.name.isdigit() for entry in own.iterdir()):
        shutil.rmtree(own, ignore_errors=True)  # left by a process that was killed
    try:
        own.mkdir(parents=True)
    except FileExistsError:
        raise CheckpointError(f"{own} is for a new folder of held checkpoints, but is there already") from None
    wait, grace, count = Deadline(timeout_seconds), Deadline(min(_GRACE, timeout_seconds)), 0

    def hold_new() -> None:
        """Links new checkpoints; see [Note: new checkpoints are held] and [Note: an end of an earlier run]."""
        seen, numbers, warned, is_old = set[tuple[int, int, int]](), itertools.count(), set[pathlib.Path](), True
        while not closes.is_set():
            note, misses = source.note(ENDED), False
            is_old = is_old and note == before
            for step in source.steps():
                path, place = source.path / name_of(step), own / str(next(numbers)) / name_of(step)
                try:
                    status = path.stat()
                    if (key := (step, status.st_ino, status.st_mtime_ns)) not in seen:
                        link_files(path, place)
                        seen.add(key)
                        found.append(place)
                except OSError as error:
                    shutil.rmtree(place.parent, ignore_errors=True)
                    misses = misses or path.exists()
                    if path not in warned:
                        warned.add(path)
                        log.warning("%s could not be held, and is tried again if it is still there: %s", path, error)
            if note is not None and not misses and (not is_old or grace.has_passed()):
                has_ended.set()
            else:
                has_ended.clear()
            clock.sleep(PAUSE)

    thread = threading.Thread(target=hold_new, name="mirrored-watcher", daemon=True)
    thread.start()
    try:
        while found or not wait.has_passed():
            ends = has_ended.is_set()  # every checkpoint that existed then is found by now
            if found:
                count += 1
                yield found[0]
                shutil.rmtree(found.popleft().parent)
                wait.restart()
            elif ends and count:
                if source.note(ENDED) == before:
                    log.info("the run in %s had ended before it was watched, and none has gone on since", source.path)
                return
            else:
                yield None
                clock.sleep(PAUSE)
    finally:
        closes.set()
        thread.join()
        shutil.rmtree(own)
    problem = f"no new checkpoint in {source.path} for {timeout_seconds:g} s"
    if not count:
        raise CheckpointError(f"{problem}: is it the folder of the run's CheckpointManager, as this host sees it?")
    if source.note(ENDED) is None:
        log.warning("%s: it is not watched any more, though its run has not ended", problem)
