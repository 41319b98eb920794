"""A launcher's variables in a process that is not a tower, but has inherited them from one.

[Note: children of towers] A program that a tower starts (``subprocess``, a worker of a ``DataLoader``) inherits RANK,
MASTER_ADDR and so on. A strategy in it would join as that tower. A tower that joins therefore records its process id
and the values of these variables in another variable. A different process that finds this record with the same values
is a child, and its strategy is an error. If the values differ, another launcher has set them. The variables of
``mirrored`` that still have the tower's values are then removed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, MutableMapping

from towers.errors import CannotStartError
from towers.topology import AGENT, DEVICES, FEWER_WORKERS, JOB_TOKEN, MEMORY, RUN_ID, STARTED_BY, STATUS_RECORD, TOWER

_OF_THE_TOWER = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", RUN_ID),
    *("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"),
)
_OF_MIRRORED = (AGENT, DEVICES, FEWER_WORKERS, JOB_TOKEN, MEMORY, STARTED_BY, STATUS_RECORD)
_OTHERS = (
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TF_CONFIG"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"),
)


def clean_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment without the variables with which a launcher makes a process a tower.

    For a program that a tower starts, and that creates another strategy::

        subprocess.run([sys.executable, "evaluate.py"], env=mirrored.clean_environment())

    Args:
        environ: the variables. Default: those of this process.
    """
    environ = os.environ if environ is None else environ
    left_out = {TOWER, *_OF_THE_TOWER, *_OF_MIRRORED, *_OTHERS}
    return {
        name: value
        for name, value in environ.items()
        if name not in left_out and not name.startswith(("TORCHELASTIC_", "PET_"))
    }


def record(environ: MutableMapping[str, str]) -> None:
    """Records that this process is the tower that its variables describe."""
    values = {name: environ[name] for name in (*_OF_THE_TOWER, *_OF_MIRRORED) if name in environ}
    environ[TOWER] = json.dumps([os.getpid(), values])


def check(environ: MutableMapping[str, str]) -> None:
    """Checks that a process with a launcher's variables has not inherited them from a tower.

    If another launcher has set them, it removes the variables that are still the tower's.

    Raises:
        CannotStartError: it has inherited them; see [Note: children of towers].
    """
    if TOWER not in environ:
        return
    process, values = json.loads(environ[TOWER])
    if process == os.getpid():
        return
    if any(environ.get(name) != values.get(name) for name in _OF_THE_TOWER):
        for name in [TOWER, *(name for name in _OF_MIRRORED if name in values and environ.get(name) == values[name])]:
            del environ[name]
        return
    how = "start it with env=mirrored.clean_environment(), so that its strategy is a separate job"
    if multiprocessing.parent_process() is not None or "--multiprocessing-fork" in sys.orig_argv:
        how = (
            "it imports the script again (as a worker of a DataLoader does with the start method 'spawn'): create the "
            "strategy below `if __name__ == '__main__':`"
        )
    tower = values.get("RANK", values.get("SLURM_PROCID"))
    raise CannotStartError(
        f"process {os.getpid()} is a child of tower {tower} (process {process}) and has inherited its variables (RANK, "
        f"MASTER_ADDR, …), but is not a tower: {how}"
    )
