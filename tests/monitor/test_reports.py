"""What a monitor reports beside time, where reports go, and mistakes in its use."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import select
import struct
import termios
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrored
from mirrored.monitor.report import PARTS, Report
from tests.support.jobs import WAYS, Settings, all_raise, text_of, towers
from tests.support.programs import run_program
from tests.support.waiting import HANG
from tests.verification.template import Script

MORE: dict[str, Settings] = {
    **WAYS,
    "central": {"central": True},
    "local": {"synchronize": mirrored.LocalSGD(every=2)},
}


class Training:
    """A small model of a strategy, and steps on five examples, whose shares are uneven."""

    def __init__(self, strategy: mirrored.Strategy) -> None:
        self.strategy = strategy
        torch.manual_seed(0)
        with strategy.scope():
            self.model = nn.Linear(4, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)
        generator = torch.Generator().manual_seed(0)
        self.data = strategy.distribute_dataset(torch.randn(20, 4, generator=generator), 5)
        self.norms: list[float] = []

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        if self.strategy.virtual_towers is None:
            loss = mirrored.compute_average_loss(self.model(x).square().mean(1))
            loss.backward()
        else:
            loss = self.strategy.backward(lambda part: self.model(part).square().mean(1), x)
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        self.norms.append(float(torch.cat(gradients).norm()))
        self.optimizer.step()
        return loss.detach()


def reports_and_losses(
    strategy: mirrored.Strategy, **settings: Any
) -> tuple[list[Report | None], list[float], list[float]]:
    """Of two epochs with a report after every third step: reports, global losses and gradients' norms."""
    training = Training(strategy)
    losses, reports = [], []
    virtual = strategy.virtual_towers is not None
    with mirrored.Monitor(strategy, every=3, loss="mean" if virtual else "sum", **settings) as monitor:
        for _ in range(2):
            for batch in training.data:
                loss = strategy.run(training.step, args=(batch,))
                losses.append(float(loss if virtual else strategy.reduce("sum", loss)))
                reports.append(monitor.step(loss))
    reports.append(monitor.report)
    return reports, losses, training.norms


def watched(strategy: mirrored.Strategy) -> Any:
    return reports_and_losses(strategy, show=False, gradient_norm=strategy.engine.local is None)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("way", MORE)
def test_every_strategy_is_followed(way: str, count: int) -> None:
    for reports, losses, norms in towers(watched, count=count, settings=MORE[way]):
        made = [report for report in reports if report is not None]
        assert [report.step for report in made] == [3, 6, 8]  # the last one when it is closed
        for report, of in zip(made, [losses[:3], losses[3:6], losses[6:]], strict=True):
            assert report.loss == pytest.approx(sum(of) / len(of))
            assert report.learning_rate == 0.125
            assert report.examples_per_second == pytest.approx(5 / report.step_ms * 1e3)
            assert sum(report.parts_ms.values()) == pytest.approx(report.step_ms)
            assert 0 < report.memory_bytes <= report.memory_peak_bytes
            if way != "local" and report.step != 8:
                assert report.gradient_norm == pytest.approx(norms[report.step - 1], rel=1e-5)
        assert [report.steps for report in made] == [2, 3, 2]  # the first step is not timed
        assert all((report.slowest_tower is None) == (count == 1) for report in made)


def operations(strategy: mirrored.Strategy, flops: Any) -> Report | None:
    training = Training(strategy)
    monitor = mirrored.Monitor(strategy, every=3, show=False, flops=flops, peak_flops=1e12)
    for batch in training.data:
        monitor.step(strategy.run(training.step, args=(batch,)))
    return monitor.report


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("flops", [True, 80])
def test_operations_are_counted_once_or_given(flops: Any, count: int) -> None:
    """Of five examples: 2 x 4 in the forward, as many for the weight's gradient."""
    for report in towers(operations, flops, count=count):
        assert report.steps == (1 if flops is True else 2)
        assert report.flops_per_second == pytest.approx(80 / report.step_ms * 1e3)
        assert report.mfu == pytest.approx(report.flops_per_second / 1e12 / count)


class Kept:
    """A tracker, or a writer of summaries, that keeps what it is given."""

    def __init__(self) -> None:
        self.numbers: dict[int, dict[str, float]] = {}

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.numbers[step] = numbers

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.numbers.setdefault(step, {})[name] = value


def with_outputs(strategy: mirrored.Strategy, folder: str) -> tuple[Any, Any, Any]:
    tracker, writer = Kept(), Kept()
    settings = {"jsonl": f"{folder}/deep/monitor.jsonl", "writer": writer, "trackers": [tracker.log]}
    reports, _, _ = reports_and_losses(strategy, show=False, **settings)
    return reports[2], tracker.numbers, writer.numbers


def test_the_chief_writes_reports(tmp_path: pathlib.Path) -> None:
    (report, tracked, written), (_, *others) = towers(with_outputs, str(tmp_path))
    assert others == [{}, {}]
    lines = [json.loads(line) for line in (tmp_path / "deep/monitor.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(tracked) == list(written) == [3, 6, 8]
    assert lines[0]["loss"] == tracked[3]["loss"] == written[3]["monitor/loss"] == report.loss
    assert lines[0]["parts_ms"] == report.parts_ms
    assert tracked[3]["parts/data_ms"] == written[3]["parts/data_ms"] == report.parts_ms["data"]
    assert all(isinstance(value, (int, float)) for numbers in tracked.values() for value in numbers.values())


def with_a_writer(strategy: mirrored.Strategy, folder: str) -> Any:
    with strategy.summary_writer(folder) as writer:
        reports, _, _ = reports_and_losses(strategy, show=False, writer=writer)
    return reports[2]


def test_tensorboard_has_the_numbers_of_each_report(tmp_path: pathlib.Path) -> None:
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report = towers(with_a_writer, str(tmp_path))[0]
    events = board.EventAccumulator(str(tmp_path)).Reload()
    assert {"monitor/loss", "monitor/examples_per_second", "monitor/slowest_tower"} <= set(events.Tags()["scalars"])
    assert {f"parts/{name}_ms" for name in PARTS} <= set(events.Tags()["scalars"])
    losses = [(each.step, each.value) for each in events.Scalars("monitor/loss")]
    assert [step for step, _ in losses] == [3, 6, 8]
    assert losses[0][1] == pytest.approx(report.loss)


def _bad_outputs(strategy: mirrored.Strategy, folder: str) -> list[str]:
    """The messages of all kinds of outputs that are none; each tower has the same."""
    kinds: list[tuple[type[Exception], dict[str, Any]]] = [
        (ValueError, {"jsonl": folder}),
        (ValueError, {"jsonl": f"{folder}/file/monitor.jsonl"}),
        (TypeError, {"writer": print}),
        (TypeError, {"trackers": print}),
        (TypeError, {"trackers": ["wandb"]}),
    ]
    return [text_of(kind, mirrored.Monitor, strategy, **options) for kind, options in kinds]


def test_outputs_that_cannot_be_are_an_error_on_all_towers(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    for folder, below, writer, *trackers in towers(_bad_outputs, str(tmp_path)):
        assert "of mirrored.Monitor on tower 0: [Errno 21] Is a directory" in folder
        assert "of mirrored.Monitor on tower 0: [Errno " in below
        assert "but must be a SummaryWriter" in writer
        assert all("but must be a list of functions" in text for text in trackers)


def test_examples_are_not_negative() -> None:
    with mirrored.Monitor(mirrored.OneDeviceStrategy("cpu")) as monitor, pytest.raises(ValueError, match="examples is"):
        monitor.step(examples=-5)


def test_a_loss_that_is_not_finite_is_null_in_json() -> None:
    record = Report(1, loss=float("nan"), learning_rate=0.1).record()
    assert json.loads(json.dumps(record, allow_nan=False)) == {
        "step": 1,
        "steps": 0,
        "loss": None,
        "learning_rate": 0.1,
    }


SCRIPT = Script(
    strategy='mirrored.MirroredStrategy(devices=["cpu:0", "cpu:1"])',
    examples=12,
    data="(inputs, targets)",
    train="strategy.distribute_dataset(data, 3)\nmonitor = mirrored.Monitor(strategy, every=2, total=4)",
    epochs="1",
    run="monitor.step(strategy.run(train_step, args=batch))",
)


@pytest.mark.extended
def test_a_line_is_printed_where_there_is_no_terminal(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.text())
    lines = run_program([str(tmp_path / "train.py")], code=0).stdout.splitlines()
    shown = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in shown] == ["2/4", "4/4"]
    assert all(" loss " in line and "examples per second" in line and "slowest: tower" in line for line in shown)


def test_a_terminal_shows_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    with os.fdopen(theirs, "w") as terminal, contextlib.redirect_stderr(terminal):
        with mirrored.Monitor(mirrored.OneDeviceStrategy("cpu"), every=2, total=4) as monitor:
            for loss in (1.0, 3.0, 0.0, 0.0):
                monitor.step(loss)
        terminal.flush()
        shown = ""
        while "4/4" not in shown:  # a terminal hands on what it is given piece by piece
            assert select.select([ours], [], [], HANG)[0], shown
            shown += os.read(ours, 2**16).decode()
    os.close(ours)
    assert [line.split()[1:4] for line in capsys.readouterr().out.splitlines()] == [
        ["2/4", "loss", "2"],
        ["4/4", "loss", "0"],
    ]


def resumed(strategy: mirrored.Strategy, folder: str) -> int:
    training = Training(strategy)
    monitor = mirrored.Monitor(strategy, every=100, show=False)
    manager = mirrored.CheckpointManager(strategy, folder, {"model": training.model, "monitor": monitor})
    manager.restore_newest()
    for batch in training.data:
        monitor.step(strategy.run(training.step, args=(batch,)))
    manager.save()
    steps, report = monitor.steps, monitor.report
    monitor.close()
    assert (report, monitor.report.step) == (None, steps)
    restored = mirrored.Monitor(strategy, every=100, show=False)
    restored.load_state_dict(monitor.state_dict())
    restored.close()
    assert (restored.steps, restored.report) == (steps, None)  # there is nothing new to report
    return steps


def test_a_checkpoint_keeps_the_count_of_steps(tmp_path: pathlib.Path) -> None:
    assert [towers(resumed, str(tmp_path)) for _ in range(2)] == [[4, 4], [8, 8]]


def writers(strategy: mirrored.Strategy, folder: str) -> str:
    writer = strategy.summary_writer(folder)
    with writer:
        writer.add_scalar("loss", 1.0, 3)
        writer.add_text("what", "a text")
    return type(writer).__name__


def test_the_chief_alone_writes_summaries(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("tensorboard")
    assert towers(writers, str(tmp_path)) == ["SummaryWriter", "NoWriter"]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


# -- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.row(75)
def test_a_monitor_refuses_what_it_cannot_follow() -> None:
    strategy = mirrored.OneDeviceStrategy("cpu")
    assert "takes a strategy" in text_of(TypeError, mirrored.Monitor, "cpu")
    for settings in ({"every": 0}, {"every": 1.5}, {"total": -1}, {"loss": "max"}, {"flops": -1.0}):
        assert f"{next(iter(settings))} is" in text_of(ValueError, mirrored.Monitor, strategy, **settings)
    monitor = mirrored.Monitor(strategy, show=False)
    assert "has a monitor or a trace already" in text_of(RuntimeError, mirrored.Monitor, strategy)
    assert "not a str" in text_of(TypeError, monitor.step, "0.1")
    assert "of shape (2,)" in text_of(ValueError, monitor.step, torch.ones(2))
    assert "inside strategy.run" in text_of(RuntimeError, strategy.run, monitor.step, (0.1,))
    monitor.close()
    monitor.close()
    assert "after monitor.close()" in text_of(RuntimeError, monitor.step, 0.1)
    mirrored.Monitor(strategy, show=False)  # it is dropped, so there may be another
    mirrored.Monitor(strategy, show=False).close()


def other_interval(strategy: mirrored.Strategy) -> None:
    mirrored.Monitor(strategy, every=5 + strategy.topology.index, show=False)


def a_step_of_one_tower(strategy: mirrored.Strategy) -> None:
    monitor = mirrored.Monitor(strategy, every=1, show=False)
    if strategy.is_chief:
        monitor.step()
    strategy.barrier()


@pytest.mark.row(75)
def test_towers_that_differ_are_told() -> None:
    all_raise(mirrored.DisagreementError, "mirrored.Monitor: every is 5 on tower 0, but 6 on tower 1", other_interval)
    words = r"tower 1 strategy.barrier\(\), tower 0 the monitor's report of step 1"
    all_raise(mirrored.DisagreementError, words, a_step_of_one_tower, same=True)
