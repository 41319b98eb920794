"""Programs that a tower starts, and strategies in them."""

from __future__ import annotations

import json
import os
import pathlib
import re

import pytest

import mirrored
from mirrored.cluster import from_launcher, inherited
from tests.support.clusters import torchrun_variables
from tests.support.programs import run_command
from towers.topology import AGENT, STATUS_RECORD, TOWER

PARENT = """
import subprocess, sys
import torch
import mirrored

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(float(index))

strategy = mirrored.MirroredStrategy()
if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        loader = torch.utils.data.DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context="spawn")
        for batch in strategy.distribute_dataset(loader):
            pass
    elif strategy.is_chief:
        env = mirrored.clean_environment() if sys.argv[1] == "clean" else None
        print("code", subprocess.run([sys.executable, *sys.argv[2:]], env=env).returncode, flush=True)
    strategy.barrier()
"""
CHILD = """
import mirrored
strategy = mirrored.MirroredStrategy(devices=["cpu:0"] if {alone} else None)
strategy.print("child", strategy.reduce("sum", 1), flush=True)
"""
RUN = ["mirrored", "run", "--towers", "2"]
TORCHRUN = ["torchrun", "--nproc-per-node", "2"]


def scripts(folder: pathlib.Path, alone: bool) -> tuple[str, str]:
    for name, text in (("parent.py", PARENT), ("child.py", CHILD.format(alone=alone))):
        (folder / name).write_text(text)
    return str(folder / "parent.py"), str(folder / "child.py")


@pytest.mark.extended
@pytest.mark.parametrize("launcher", [RUN, TORCHRUN], ids=["run", "torchrun"])
@pytest.mark.parametrize(
    ("how", "words", "found"),
    [
        ("inherits", [], 1),
        ("clean", [], 0),
        ("starts a launcher", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 0),
        ("starts a launcher", ["-m", "mirrored", "run", "--towers", "2"], 0),
    ],
)
def test_a_program_that_a_tower_starts(
    launcher: list[str], how: str, words: list[str], found: int, tmp_path: pathlib.Path
) -> None:
    parent, child = scripts(tmp_path, alone=how == "clean")
    result = run_command([*launcher, parent, how, *words, child], code=0)
    assert f"code {found}" in result.stdout
    assert (f"child {2 if words else 1}\n" in result.stdout) is not bool(found)
    if found:
        assert "is a child of tower 0" in result.stderr
        assert "start it with env=mirrored.clean_environment()" in result.stderr


@pytest.mark.extended
def test_a_spawned_worker_of_a_loader_that_imports_a_strategy(tmp_path: pathlib.Path) -> None:
    parent, _ = scripts(tmp_path, alone=True)
    errors = run_command([*RUN, parent, "spawn"], code=1).stderr
    assert re.search(r"is a child of tower \d .*create the strategy below `if __name__ == '__main__':`", errors)


def test_variables_of_another_launcher_count() -> None:
    tower = {**torchrun_variables(), AGENT: "7", STATUS_RECORD: "/a"}
    inherited.record(tower)
    tower[TOWER] = json.dumps([os.getpid() + 1, json.loads(tower[TOWER])[1]])
    with pytest.raises(mirrored.CannotStartError, match="a child of tower 0"):
        from_launcher(dict(tower))
    nested = {**tower, "MASTER_PORT": "29501", STATUS_RECORD: "/b"}
    assert from_launcher(nested) is not None
    assert not {AGENT, TOWER} & nested.keys(), "they are as the tower had them"
    assert nested[STATUS_RECORD] == "/b"


def test_a_clean_environment() -> None:
    environ = {**torchrun_variables(), "PATH": "/bin", "TORCHELASTIC_RUN_ID": "1", "TF_CONFIG": "{}", AGENT: "7"}
    assert mirrored.clean_environment(environ) == {"PATH": "/bin"}
    assert mirrored.clean_environment().keys() <= os.environ.keys()
