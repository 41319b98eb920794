"""Jobs of several workers that start again, whose agents tests start, kill and start anew."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from tests.support.clusters import free_ports, start_agent, tf_configs
from tests.support.jobs import ROOT
from tests.support.patience import PATIENT_AGENTS
from tests.support.programs import Program
from towers.launching.job import Job

PROGRAM = str(ROOT / "tests" / "programs" / "restarts.py")


class Workers:
    """The workers of a cluster that run :data:`PROGRAM` with ``folder``, each with an agent.

    Args:
        towers: of each worker.
        words: more arguments of the program.
        count: how many workers there are.
        started: how many of them are started now.
        variables: of their environment.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        towers: int = 1,
        min_towers: int | None = None,
        words: Sequence[str] = (),
        count: int = 2,
        started: int = 2,
        **variables: str,
    ) -> None:
        self.folder = folder
        self._towers, self._min_towers, self._words = towers, min_towers, words
        self.addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(count))
        # Agents that are killed have nothing to say, however long others wait for it.
        self._variables = {"TOWERS": str(towers), PATIENT_AGENTS: "", **variables}
        self.agents = [self.start(index) for index in range(started)]

    def start(self, index: int, *more: str, **variables: str) -> Program:
        """Start an agent of a worker."""
        job = Job(self._towers, index, len(self.addresses), self.addresses, "TF_CONFIG", restarts=2)
        if self._min_towers is not None:
            job = dataclasses.replace(job, min_towers=self._min_towers, virtual_towers=4, rejoin_seconds=2.0)
        words = (PROGRAM, str(self.folder), *self._words, *more)
        variables = {"TF_CONFIG": tf_configs(self.addresses)[index], **self._variables, **variables}
        return start_agent(job, *words, **variables)

    def replace(self, index: int, *more: str) -> None:
        """Kill a worker's agent, and with it its towers; start another one in its place, as a scheduler does."""
        self.agents[index].kill()
        self.agents[index].communicate()
        self.agents[index] = self.start(index, *more)

    def end(self) -> list[tuple[str, str, int | None]]:
        """What each agent has printed, and its exit code."""
        return [(*agent.communicate(), agent.returncode) for agent in self.agents]
