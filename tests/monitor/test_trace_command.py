"""``mirrored trace``: the steps that are asked for, of a script that is started in one way or another."""

from __future__ import annotations

import importlib.util
import os
import pathlib

import pytest

from mirrored import cli
from tests.monitor.test_traces import by_tower, named
from tests.support.programs import run_command, run_program
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
    options = [*options, "--steps", "3:5", "--output", "out.json"]
    words = ["mirrored", *before, "trace", *options, script(tmp_path, strategy), "2"]
    ended = run_command(words, cwd=str(tmp_path), code=0)
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
    ended = run_command(["mirrored", "trace", "--steps=9:12", path, "1"], cwd=str(tmp_path), code=0)
    assert "the end" in ended.stdout
    said = "mirrored trace: the script ended after 8 training steps, so steps 9 to 11 have not been traced"
    assert ended.stderr.count(said) == 1
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.row(77)
@pytest.mark.parametrize("output", ["train.py/trace.json", "."])
def test_a_file_that_cannot_be_written_is_the_only_error(output: str, tmp_path: pathlib.Path) -> None:
    path = script(tmp_path, "MirroredStrategy(devices=['cpu:0'])")
    variables = {"MIRRORED_TRACE": f"3:5:{tmp_path / output}"}
    errors = run_program([path, "1"], env=variables, cwd=str(tmp_path), code=1).stderr
    assert "ValueError: " in errors
    assert "in _explain" not in errors


@pytest.mark.parametrize("output", ["", "folder", "file/trace.json"])
def test_a_file_that_cannot_be_written_is_refused_at_once(
    output: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", f"--output={tmp_path / output}", __file__])
    assert ended.value.code == 2
    assert "but no file can be written there" in capsys.readouterr().err


@pytest.mark.row(77)
@pytest.mark.parametrize("steps", ["13:10", "10", "1:3", "10:x", ":", "-3:5"])
def test_wrong_steps_are_refused(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", f"--steps={steps}", __file__])
    assert ended.value.code == 2
    assert f"--steps is {steps}, but must be START:STOP" in capsys.readouterr().err


KERAS = """\
import mirrored.keras  # isort: split

import keras
import numpy as np

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((12, 4), "float32")
told = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: print("batch", batch))
model.fit(x, x[:, :1], batch_size=6, epochs=4, validation_data=(x, x[:, :1]), callbacks=[told], verbose=0)
"""

LIGHTNING = """\
import lightning as L
import torch
from torch.utils.data import DataLoader

from mirrored.lightning import MirroredLightningStrategy


class Model(L.LightningModule):
    automatic_optimization = {automatic}

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch, index):
        return self.layer(batch).square().mean()

    def on_train_batch_end(self, *args):
        print("batch", self.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


plain = {{"enable_checkpointing": False, "enable_model_summary": False, "logger": False, "enable_progress_bar": False}}
trainer = L.Trainer(strategy=MirroredLightningStrategy(), max_epochs=4, accumulate_grad_batches={batches}, **plain)
data = DataLoader(torch.ones(24, 4), 12 // {batches})
trainer.fit(Model(), data, data)
"""

RUNS = """\
import torch
import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    models = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
checkpoints = mirrored.CheckpointManager(strategy, "folder", {"model": models[0]})


def train(number):
    models[number](torch.ones(2, 4)).sum().backward()
    optimizers[number].step()


for batch in range(8):
    strategy.run(train, args=(0,))
    if batch > 0:
        strategy.run(train, args=(1,))
    checkpoints.step()
    print("batch", batch)
"""

LOOPS = {
    "Keras": (KERAS, 3),
    "Lightning": (LIGHTNING.format(automatic=True, batches=1), 3),
    "Lightning, accumulating": (LIGHTNING.format(automatic=True, batches=2), 7),
    "Lightning, manual optimization": (LIGHTNING.format(automatic=False, batches=1), 3),
    "two runs in a step": (RUNS, 3),
}


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_counts_the_same_steps(loop: str, towers: int, tmp_path: pathlib.Path) -> None:
    """Evaluations are none, a step of a library is one, and so are the runs between two calls of a manager."""
    script, batches = LOOPS[loop]
    if script is not RUNS and importlib.util.find_spec(loop.partition(",")[0].lower()) is None:
        pytest.skip("scripts/test --extras has it")
    (tmp_path / "train.py").write_text(script)
    words = ["mirrored", "trace", "--towers", str(towers), "--steps", "3:5", "--output", "out.json", "train.py"]
    ended = run_command(words, cwd=str(tmp_path), code=0)
    assert "trace of steps 3 to 4" in ended.stdout
    assert ended.stdout.count("batch") == batches  # of the chief; the script ends at the end of step 4
    for found in by_tower(tmp_path / "out.json").values():
        steps = [event["name"] for event in found if event["name"].startswith("mirrored::step")]
        assert steps == ["mirrored::step 3", "mirrored::step 4"]
