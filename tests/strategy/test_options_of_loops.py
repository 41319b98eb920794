"""Each option of a strategy in each loop: honoured, or refused by name, as ``docs/reference/options.md`` says."""

from __future__ import annotations

import mirrored.keras  # isort: split

import functools
import importlib.util
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mirrored
from mirrored.evaluation import EvalSpec, TrainSpec
from tests.support.jobs import launch, text_of
from towers.errors import MirrorError

pytestmark = pytest.mark.extended

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS, BATCH = 6, 4

OPTIONS: dict[str, Callable[[], mirrored.Strategy]] = {
    "": lambda: mirrored.MirroredStrategy(seed=0, mirror_check_interval=None),
    "shard_optimizer": lambda: mirrored.MirroredStrategy(seed=0, shard_optimizer=True),
    "CentralStorageStrategy": lambda: mirrored.CentralStorageStrategy(seed=0),
    "virtual_towers": lambda: mirrored.MirroredStrategy(seed=0, virtual_towers=2),
    "synchronize": lambda: mirrored.MirroredStrategy(seed=0, synchronize=mirrored.LocalSGD(every=2)),
    "compression": lambda: _communicating(compression=mirrored.PowerSGD(rank=1, start_step=1)),
    "wire_dtype": lambda: _communicating(implementation="gloo", wire_dtype="bfloat16"),
    "nonfinite_gradients": lambda: mirrored.MirroredStrategy(seed=0, nonfinite_gradients="raise"),
    "mirror_check_interval": lambda: mirrored.MirroredStrategy(seed=0, mirror_check_interval=1),
}


def _communicating(**options: Any) -> mirrored.Strategy:
    return mirrored.MirroredStrategy(seed=0, communication=mirrored.CommunicationOptions(**options))


class Training:
    """The data, and what a loop does at its steps.

    Args:
        folder: where checkpoints are saved.
        spoil: "a value" makes an input NaN, "a weight" changes a parameter on tower 1 after the second step.

    Attributes:
        seen: the first weight after each step, on this tower.
        state: reads the optimizer's state.
    """

    def __init__(self, folder: str, spoil: str) -> None:
        self.folder = folder
        self.x = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(0))
        self.y = self.x[:, :2] * 2
        if spoil == "a value":
            self.x[13] = torch.nan
        self._spoils = spoil == "a weight"
        self.seen: list[float] = []
        self.state: Callable[[], object] = dict

    def stepped(self, strategy: mirrored.Strategy, weight: Tensor) -> None:
        self.seen.append(float(weight.detach().flatten()[0]))
        if self._spoils and len(self.seen) == 2 and strategy.topology.index == 1:
            with torch.no_grad():
                weight += 1


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))


def _step_of(strategy: mirrored.Strategy, training: Training) -> tuple[nn.Module, Any, Callable[..., None]]:
    model = strategy.mirror(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training.state = lambda: optimizer.state[model[0].weight]

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return (model(x) - y).square().mean(1)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        if strategy.virtual_towers is None:
            mirrored.compute_average_loss(losses(x, y)).backward()
        else:
            strategy.backward(losses, x, y)
        optimizer.step()

    return model, optimizer, step


def custom_loop(strategy: mirrored.Strategy, training: Training) -> None:
    model, _, step = _step_of(strategy, training)
    for batch in strategy.distribute_dataset((training.x, training.y), BATCH):
        strategy.run(step, args=batch)
        training.stepped(strategy, model[0].weight)  # type: ignore[index]


def train_and_evaluate(strategy: mirrored.Strategy, training: Training) -> None:
    model, optimizer, step = _step_of(strategy, training)
    strategy.events.end_step.append(lambda: training.stepped(strategy, model[0].weight))  # type: ignore[index]
    data = strategy.distribute_dataset((training.x, training.y), BATCH)
    evaluation = EvalSpec(strategy, training.folder, {"model": model}, lambda: {"one": 1})
    mirrored.train_and_evaluate(TrainSpec(step, data, STEPS, {"optimizer": optimizer}), evaluation)


def fit(strategy: mirrored.Strategy, training: Training) -> None:
    with strategy.scope():
        made = [keras.initializers.GlorotUniform(seed) for seed in (1, 2)]
        layers = [keras.layers.Dense(16, kernel_initializer=made[0]), keras.layers.Dense(2, kernel_initializer=made[1])]
        model = keras.Sequential([keras.layers.Input((8,)), *layers])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    weight = model.layers[0].kernel.value
    told = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: training.stepped(strategy, weight))
    x, y = training.x.numpy(), training.y.numpy()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[told])


def lightning(strategy: mirrored.Strategy, training: Training, automatic: bool = True) -> None:
    import lightning as L

    from mirrored.lightning import MirroredLightningStrategy

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = automatic
            self.model = _model()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = (self.model(batch[0]) - batch[1]).square().mean()
            if not automatic:
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def on_train_batch_end(self, *args: object) -> None:
            training.stepped(strategy, self.model[0].weight)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    module, plain = Module(), ("progress_bar", "checkpointing", "model_summary")
    quiet = {f"enable_{name}": False for name in plain}
    trainer = L.Trainer(strategy=MirroredLightningStrategy(strategy), max_epochs=1, logger=False, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(training.x, training.y), BATCH))
    training.state = lambda: trainer.optimizers[0].state[module.model[0].weight]


LOOPS = {
    "custom loop": custom_loop,
    "`train_and_evaluate`": train_and_evaluate,
    "Keras' `fit`": fit,
    "Lightning": lightning,
    "Lightning, manual optimization": functools.partial(lightning, automatic=False),
}


def train(option: str, loop: str, spoil: str, folder: str) -> tuple[list[float], str]:
    """The first weight after each step on this tower, and why the optimizer's state cannot be read, if it cannot."""
    training = Training(folder, spoil)
    LOOPS[loop](OPTIONS[option](), training)
    try:
        training.state()
    except MirrorError as error:
        return training.seen, str(error)
    return training.seen, ""


def run(option: str, loop: str, spoil: str = "", count: int = 2) -> Any:
    """What :func:`train` returns on each tower."""
    with tempfile.TemporaryDirectory() as folder:
        return launch(train, option, loop, spoil, folder, count=count)


def table() -> dict[tuple[str, str], str]:
    """The cells of the page's table, by option and loop."""
    page = (ROOT / "docs/reference/options.md").read_text()
    section = page.partition("## Options in each loop\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    head, _, *rows = rows
    return {
        (option, loop): cell
        for row in rows
        for option in re.findall(r"`(\w+)`", row[0])
        for title, cell in zip(head[1:], row[1:], strict=True)
        for loop in LOOPS
        if loop.split(", ")[0] in title.split(", ")
    }


CELLS = table()


def test_the_table_has_every_cell() -> None:
    assert set(CELLS) == {(option, loop) for option in OPTIONS if option for loop in LOOPS}


@pytest.mark.parametrize(("option", "loop"), CELLS)
def test_an_option_is_honoured_or_refused(option: str, loop: str) -> None:
    if loop.startswith("Lightning") and importlib.util.find_spec("lightning") is None:
        pytest.skip("scripts/test --extras has it")
    if CELLS[option, loop] == "error":
        said = text_of(Exception, run, option, loop)
        assert option in said
        return
    if option in ("nonfinite_gradients", "mirror_check_interval"):
        spoil, error = ("a value", "NonFiniteGradientError") if option[0] == "n" else ("a weight", "MirrorError")
        run("", loop, spoil)  # nothing is raised
        assert error in text_of(Exception, run, option, loop, spoil)
        return
    (first, problem), (second, _) = run(option, loop)
    [(plain, _), _] = run("", loop)
    assert len(plain) == len(first) == STEPS
    if option == "synchronize":
        assert [one == other for one, other in zip(first, second, strict=True)] == [False, True] * (STEPS // 2)
        return
    assert first == second
    if option in ("shard_optimizer", "CentralStorageStrategy"):
        assert first == pytest.approx(plain, rel=1e-5)
        if loop != "Keras' `fit`":  # whose slots show the state
            assert "is sharded over the towers" in problem
    elif option == "virtual_towers":
        [(alone, _)] = run(option, loop, count=1)
        assert first == alone
    else:
        assert first != pytest.approx(plain, rel=1e-6)
        assert first == pytest.approx(plain, rel=0.02 if option == "wire_dtype" else 0.5)
