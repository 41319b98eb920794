"""Which towers write: one for each folder, found by trying who sees whose file.

Hosts may share the folder (a network file system) or have one each under the same path; nothing is believed about it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets

from mirrored.checkpoint.disk import Disk
from mirrored.checkpoint.errors import CheckpointError
from mirrored.checkpoint.folder import PROBE
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator


def writer_of(comm: Communicator, folder: pathlib.Path, disk: Disk) -> int:
    """The tower that writes into this tower's ``folder``, which is made where it is missing. All towers call it.

    Raises:
        CheckpointError: on all towers, when the folder cannot be made or written on one of them.
    """
    token = secrets.token_hex(8)
    mine = folder / f"{PROBE}{token}"
    problem = ""
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):  # another tower was faster; else the next line tells
                disk.mkdir(folder)
        os.close(disk.create(mine))
    except OSError as error:
        problem = f"{folder} cannot be written to: {error.strerror}"
    try:
        said = [s.details for s in announce(comm, "makes a CheckpointManager", [token, problem])]
        for tower, (_, other) in enumerate(said):
            if other:
                raise CheckpointError(f"tower {tower}: {other}")
        found = next(tower for tower, (theirs, _) in enumerate(said) if (folder / f"{PROBE}{theirs}").exists())
        comm.barrier()  # everybody has looked
        return found
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(mine)
