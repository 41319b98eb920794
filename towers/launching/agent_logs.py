"""Where torchrun's agent sends what the towers print."""

from __future__ import annotations

import os
import pathlib

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from towers import topology
from towers.health import status_record
from towers.health.failure import ERROR_FILE, report_in
from towers.launching import console


class TowerLogs(LogsSpecs):
    """The first tower of the machine keeps the terminal; the others are silent but for prefixed errors.

    Args:
        relay: carries the other towers' standard error.
        log_dir: a directory for files ``tower<index>.out`` and ``.err`` of the other towers; None: no files.
    """

    def __init__(self, relay: console.Relay, log_dir: str | None) -> None:
        super().__init__(log_dir=log_dir)
        self._relay = relay

    @property
    def root_log_dir(self) -> str:
        return self._root_log_dir or os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name every stream's destination, for the towers whose environments are given (by local index)."""
        folder = pathlib.Path(self._root_log_dir) if self._root_log_dir else None
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        stdouts, stderrs, error_files = {}, {}, {}
        for local, variables in envs.items():
            tower = variables["RANK"]
            variables[ERROR_FILE] = str(report_in(self._relay.directory, int(tower)))
            error_files[local] = ""  # torch would end with an error where a report is none
            variables[topology.WHEREABOUTS] = str(status_record.path_in(self._relay.directory, int(tower)))
            if local == 0:
                stdouts[local] = stderrs[local] = ""  # as they are: the terminal
                continue
            stdouts[local] = str(folder / f"tower{tower}.out") if folder else os.devnull
            stderrs[local] = self._relay.pipe(
                f"stderr{tower}",
                console.PrefixedLines(f"[tower {tower}] ", console.standard("stderr")),
                copy=folder / f"tower{tower}.err" if folder else None,
            )
        return LogsDest(stdouts=stdouts, stderrs=stderrs, error_files=error_files)
