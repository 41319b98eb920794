"""The evaluator beside the workers of a cluster, each in processes of its own."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from mirrored.checkpoint.manifest import name_of
from tests.support.clusters import free_ports, start_agent
from tests.support.jobs import ROOT
from tests.support.programs import end_of, start_command, start_program
from towers.launching.job import Job

pytestmark = pytest.mark.extended

PROGRAM = str(ROOT / "tests" / "programs" / "evaluates.py")


@pytest.mark.parametrize("way", ["TF_CONFIG", "mirrored evaluate"])
def test_an_evaluator_beside_two_workers(way: str, tmp_path: pathlib.Path) -> None:
    """The workers train for ever, and prune what they save; the evaluator stops them, and ends when they have ended."""
    folder = tmp_path / "run"
    *addresses, evaluator = [f"127.0.0.1:{port}" for port in free_ports(3)]
    cluster = {"worker": addresses, "evaluator": [evaluator]}
    configs = [
        json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        for kind, index in (("worker", 0), ("worker", 1), ("evaluator", 0))
    ]
    jobs = [Job(1, index, 2, tuple(addresses), "TF_CONFIG") for index in range(2)]
    workers = [
        start_agent(job, PROGRAM, str(folder), TF_CONFIG=config) for job, config in zip(jobs, configs, strict=False)
    ]
    if way == "TF_CONFIG":
        task = start_program([PROGRAM, str(folder)], env={"TF_CONFIG": configs[2]})
    else:
        task = start_command(["mirrored", "evaluate", PROGRAM, str(folder)])
    stopped = re.findall(r"stopped after step (\d+)", "".join(end_of(worker, 0)[0] for worker in workers))
    evaluated = [int(step) for step in end_of(task, 0)[0].split("evaluated")[1].split()]
    assert len(set(stopped)) == 1
    assert evaluated == sorted(set(evaluated))
    assert evaluated[-1] == int(stopped[0]), "the last one is evaluated, too"
    assert (folder / "best").is_dir()
    assert (folder / name_of(evaluated[-1])).is_dir()
    assert len(list(folder.glob("step-*"))) == 2
