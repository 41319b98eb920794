"""Watching a folder of checkpoints.

[Note: new checkpoints are held] A run keeps its newest checkpoints only, and an evaluation may take longer than that.
So a thread looks ten times a second, and makes hard links of each new checkpoint's files in a folder of the watcher's.
They stay until the checkpoint was read, whenever the run prunes its own. They take no time, and space on the disk only
from then on. A checkpoint has its name only when it is complete, so what is held is complete, too.

[Note: an end that was there before] A note that the run has ended may be an earlier run's: the one that is watched is
just starting, and will remove it. So such a note counts only when it has been there for a minute, and until it goes.
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
from towers.system.log import get_logger
from towers.system.timeouts import Deadline, clock

log = get_logger("mirrored")

PAUSE = 0.1
"""Seconds between two looks."""
_GRACE = 60.0


def checkpoints_iterator(
    folder: str | os.PathLike[str], held: str | os.PathLike[str], timeout_seconds: float = 3600.0
) -> Iterator[pathlib.Path | None]:
    """Yields every new checkpoint of a folder, the oldest first, until the run that writes there has ended.

    ::

        for path in mirrored.evaluation.checkpoints_iterator("results/run", "results/held"):
            if path is not None:  # results/held/…/step-00000100, there until the next one is asked for
                print(mirrored.load_weights(model, path))

    None that was there for a second is missed, however long the caller takes. (A network file system may show it
    later.) Where there is no new one yet, it yields None ten times a second. It ends when the run has ended, as
    ``CheckpointManager.resume`` writes down, or when no new one has come for too long.

    Args:
        folder: where a CheckpointManager writes, or will write.
        held: a folder for this iterator alone, best on the same file system: else it has to copy. It is emptied.
        timeout_seconds: how long it waits for a new checkpoint.

    Raises:
        CheckpointError: no checkpoint at all has come in time.
    """
    source, own = Folder(pathlib.Path(folder), Disk()), pathlib.Path(held)
    found, has_ended, closes = deque[pathlib.Path](), threading.Event(), threading.Event()
    before = source.note(ENDED)
    shutil.rmtree(own, ignore_errors=True)  # of a process that was killed
    own.mkdir(parents=True)
    wait, grace, count = Deadline(timeout_seconds), Deadline(min(_GRACE, timeout_seconds)), 0

    def hold_new() -> None:
        """See [Note: new checkpoints are held] and [Note: an end that was there before]."""
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
            ends = has_ended.is_set()  # what was there then is found by now
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
