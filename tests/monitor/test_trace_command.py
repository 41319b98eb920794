"""``mirrored trace``: the steps that are asked for, of a script that is started in one way or another."""

from __future__ import annotations

import os
import pathlib

import pytest

from mirrored import cli
from tests.monitor.test_traces import by_tower, named
from tests.support.programs import run_command
from tests.verification.template import Script

pytestmark = pytest.mark.extended

SCRIPT = Script(
    before="import sys",
    strategy="mirrored.{strategy}",
    examples=24,
    train="strategy.distribute_dataset(data, 3)",
    epochs="int(sys.argv[1])",
    run="strategy.run(train_step, args=batch)",
    end='strategy.print("the end")',
)
STRATEGIES = {
    "of the script": ("MirroredStrategy(devices=['cpu:0', 'cpu:1'])", [], []),
    "of the command": ("MirroredStrategy()", [], ["--towers", "2"]),
    "TF_CONFIG": ("MultiWorkerMirroredStrategy()", ["cluster", "-m", "mirrored"], []),
}


def script(folder: pathlib.Path, strategy: str) -> str:
    (folder / "train.py").write_text(SCRIPT.text().replace("{strategy}", strategy))
    return str(folder / "train.py")


@pytest.mark.parametrize("way", STRATEGIES)
def test_the_steps_are_traced_on_both_towers_and_end_the_script(way: str, tmp_path: pathlib.Path) -> None:
    strategy, before, options = STRATEGIES[way]
    words = ["mirrored", *before, "trace", *options, script(tmp_path, strategy), "2", "--steps", "3:5"]
    ended = run_command([*words, "--output", "out.json"], cwd=str(tmp_path), code=0)
    assert "trace of steps 3 to 4" in ended.stdout
    assert "slowest: tower" in ended.stdout
    assert "the end" not in ended.stdout
    events = by_tower(tmp_path / "out.json")
    assert list(events) == [0, 1]
    for tower, found in events.items():
        assert [name.split(" (")[0] for name in named(found)] == [f"tower {tower}"]
        steps = [event["name"] for event in found if event["name"].startswith("mirrored::step")]
        assert steps == ["mirrored::step 3", "mirrored::step 4"]


@pytest.mark.row(77)
def test_steps_that_never_come_are_told(tmp_path: pathlib.Path) -> None:
    path = script(tmp_path, "MirroredStrategy(devices=['cpu:0', 'cpu:1'])")
    ended = run_command(["mirrored", "trace", path, "1", "--steps=9:12"], cwd=str(tmp_path), code=0)
    assert "the end" in ended.stdout
    said = "mirrored trace: the script ended after 8 training steps, so steps 9 to 11 have not been traced"
    assert ended.stderr.count(said) == 1
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.row(77)
@pytest.mark.parametrize("output", ["train.py/trace.json", "."])
def test_a_file_that_cannot_be_written_is_the_only_error(output: str, tmp_path: pathlib.Path) -> None:
    path = script(tmp_path, "MirroredStrategy(devices=['cpu:0'])")
    words = ["mirrored", "trace", "--steps", "3:5", "--output", output, path, "1"]
    errors = run_command(words, cwd=str(tmp_path), code=1).stderr
    assert "ValueError: " in errors
    assert "in _explain" not in errors


@pytest.mark.row(77)
@pytest.mark.parametrize("steps", ["13:10", "10", "1:3", "10:x", ":", "-3:5"])
def test_wrong_steps_are_refused(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", __file__, f"--steps={steps}"])
    assert ended.value.code == 2
    assert f"--steps is {steps}, but must be START:STOP" in capsys.readouterr().err
