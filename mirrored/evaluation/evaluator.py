"""The evaluator: evaluates each new checkpoint, and keeps a table of the results; beside a training, or in turns.

::

    results/run/                 a folder of checkpoints
        step-00000120/
        best/                    or best-NAME: a checkpoint that an exporter keeps
        evaluation/              or evaluation-NAME
            metrics.jsonl        the table: one JSON object a line
            best/model.safetensors
            events.out.tfevents…   where tensorboard is installed

[Note: the table is the memory] An evaluator that was killed and is started again reads its table: what was evaluated is
not evaluated again, and the best so far stays the best. A row is written last, so that a checkpoint is exported twice
rather than never. Checkpoints are told apart by the SHA-256 of their tensors: a run that went back to an earlier step
writes others under the same names.

[Note: towers decide alike] All towers have the same rows, and metrics that are compared. So each decides by itself, and
an error is one on all of them. The chief alone watches, and writes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mirrored.checkpoint.errors import CheckpointError, TrainingStopped
from mirrored.checkpoint.folder import ENDED, FOLDER_MODE, STOP, Disk, Folder
from mirrored.checkpoint.lock import FolderLock, take_lock
from mirrored.checkpoint.manager import CheckpointManager
from mirrored.checkpoint.manifest import LATEST, TENSORS, check_name, is_step, name_of
from mirrored.checkpoint.restoring import Restorer
from mirrored.checkpoint.tracked import track
from mirrored.checkpoint.weights import save_weights
from mirrored.cluster.resolver import ClusterResolver
from mirrored.cluster.tf_config import TFConfigClusterResolver
from mirrored.data.dataset import DistributedDataset
from mirrored.evaluation.watching import checkpoints_iterator
from mirrored.interceptor import interceptor
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import agree, announce
from towers.system.log import get_logger
from towers.system.timeouts import Deadline

log = get_logger("mirrored")

TABLE, HELD = "metrics.jsonl", "held"

Row = dict[str, Any]
"""A row of the table: the metrics, ``step`` and ``sha256``."""


def is_evaluator(strategy: Strategy) -> bool:
    """Whether this process is to evaluate: it is the task ``evaluator`` of TF_CONFIG, or ``mirrored evaluate``'s.

    TF_CONFIG counts with strategies that do not read it, too, such as MirroredStrategy.
    """
    return "evaluator" in (os.environ.get("MIRRORED_TASK"), *(each.task_type for each in _resolvers(strategy)))


def _resolvers(strategy: Strategy) -> list[ClusterResolver]:
    return [each for each in (strategy.cluster_resolver, TFConfigClusterResolver()) if each is not None]


@dataclasses.dataclass(frozen=True)
class Exporter:
    """Exports weights, in place of those before: of every checkpoint, or of each that is better than all before.

    Args:
        name: of the folder with the weights. A checkpoint that was chosen by a metric is itself kept under that name,
            too, for ``CheckpointManager.restore``; an evaluation that has a name adds it ("best-NAME").
        metric: a name in what the evaluation returns; default: every checkpoint is exported.
        higher_is_better: default: lower is.
    """

    name: str
    metric: str | None = None
    higher_is_better: bool = False

    def chooses(self, rows: Sequence[Row]) -> bool:
        """Whether the last row's checkpoint is to be exported."""
        if self.metric is None:
            return True
        return _best(rows, self.metric, self.higher_is_better) is rows[-1] and not math.isnan(rows[-1][self.metric])


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stops training when a metric has not become better for so many steps, as TensorFlow's hooks do.

    ``stop_if_no_decrease_hook`` is this one; ``stop_if_no_increase_hook`` has ``higher_is_better=True``. What was
    evaluated before the step last went down does not count: the run has gone back, or begun anew.

    Args:
        metric: a name in what the evaluation returns.
        max_steps: how many steps of training without a better value.
        min_steps: evaluations of earlier steps do not count.
    """

    metric: str
    max_steps: int
    min_steps: int = 0
    higher_is_better: bool = False

    def reason(self, rows: Sequence[Row]) -> str:
        """Why training is to stop after the evaluation of the last row; empty: it goes on."""
        last = rows[-1]["step"]
        since = max((i for i in range(1, len(rows)) if rows[i]["step"] < rows[i - 1]["step"]), default=0)
        counted = [row for row in rows[since:] if self.min_steps <= row["step"] < last]
        steps = last - _best([*counted, rows[-1]], self.metric, self.higher_is_better)["step"]
        return f"{self.metric} has not become better for {steps} steps" if steps >= self.max_steps else ""


def _best(rows: Sequence[Row], metric: str, higher_is_better: bool) -> Row:
    """The first row with the best value; NaN is the worst.

    Raises:
        ValueError: the last row does not have the metric.
    """
    if metric not in rows[-1]:
        raise ValueError(f"the metric {metric!r} is asked for, but the evaluation returned only {', '.join(rows[-1])}")
    sign = 1 if higher_is_better else -1
    return max(rows, key=lambda row: ((value := sign * row.get(metric, math.nan)) == value, value))


@dataclasses.dataclass
class Evaluator:
    """Evaluates each new checkpoint of a run, beside it, until the run has ended. (TensorFlow's ``SidecarEvaluator``.)

    All towers of the evaluator make the same calls. ::

        evaluator = Evaluator(strategy, "results/run", {"model": model}, evaluate)
        if is_evaluator(strategy):
            evaluator.run()

    Args:
        strategy: that of the evaluator's own towers.
        folder: that of the run's CheckpointManager, which may not be there yet.
        models: by their names in the checkpoint, all that are evaluated.
        evaluate: returns the metrics, numbers by name, the same on all towers (see ``strategy.reduce``). It is called
            without gradients, and with the models in eval mode.
        name: of this evaluation, where a run has several.
        exporters: say of which checkpoints the weights are exported.
        stop: says when training is to stop early.
        timeout_seconds: how long it waits for a new checkpoint.
        throttle_secs: where towers train and evaluate in turns (:func:`train_and_evaluate`), how long they train
            between two evaluations at least, but for the last. An evaluator of its own evaluates each checkpoint.

    Attributes:
        rows: the table.

    Raises:
        ValueError: there is no folder, or something has no proper name.
    """

    strategy: Strategy
    folder: str | os.PathLike[str]
    models: Mapping[str, nn.Module]
    evaluate: Callable[[], Mapping[str, Any]]
    name: str = ""
    exporters: Sequence[Exporter] = ()
    stop: EarlyStopping | None = None
    timeout_seconds: float = 3600.0
    throttle_secs: float = 600.0

    def __post_init__(self) -> None:
        if not self.folder:
            raise ValueError(f"folder is {self.folder!r}, but must be that of the run's CheckpointManager")
        path = interceptor().folder(pathlib.Path(self.folder))
        self._output = path / check_name(f"evaluation-{self.name}" if self.name else "evaluation")
        self._folder = Folder(path, Disk(), writer=self._output.name)
        self._check_exporters()
        tracked = [track(name, model, self.strategy.is_mirrored) for name, model in self.models.items()]
        self._restorer = Restorer(self.strategy, self._folder, tracked, self.strategy.is_chief)
        self._lock: FolderLock | None = None
        self._board: Any = None
        self.rows: list[Row] = []

    def _check_exporters(self) -> None:
        taken = {HELD, TABLE}
        for exporter in self.exporters:
            name, kept = exporter.name, self._kept_as(exporter)
            if exporter.metric is not None or name != LATEST:
                check_name(kept)
            if name in taken or name.startswith("evaluation") or is_step(kept):
                raise ValueError(f"an exporter's name is {name!r}, which is taken in the folder: choose another")
            taken.add(name)

    def _kept_as(self, exporter: Exporter) -> str:
        return f"{exporter.name}-{self.name}" if self.name else exporter.name

    def run(self) -> list[Row]:
        """Evaluate every new checkpoint until the run has ended; returns the table.

        Raises:
            CheckpointError: no checkpoint has come in time, one does not fit the models, or another process evaluates.
            TypeError, ValueError: the evaluation returns no metrics, or not the one that is asked for.
            DisagreementError: it returns others on some tower.
        """
        self._open()
        new: Iterator[Any] = itertools.repeat(None)
        if self.strategy.is_chief:
            new = checkpoints_iterator(self._folder.path, self._output / HELD, self.timeout_seconds)
        while (path := self.of_chief(next(new, ""))) != "":
            reason = self.evaluate_one(pathlib.Path(path)) if path is not None else ""
            if reason and self.strategy.is_chief and self._folder.note(ENDED) is None:
                self._folder.leave_note(STOP, reason)
        return self.rows

    def of_chief(self, value: Any) -> Any:
        """The chief's value, on all towers; a path becomes a text."""
        return announce(self.strategy.communicator, "evaluates checkpoints", value)[0]

    def _open(self) -> None:
        """Read the table; see [Note: the table is the memory]."""
        if self.strategy.is_chief and self._lock is None:
            for path in (self._folder.path, self._output):
                path.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            try:
                self._lock, is_new = take_lock(self._output / ".lock")
            except BlockingIOError:
                text = f"another process evaluates into {self._output}; give each evaluation its own name"
                raise CheckpointError(text) from None
            if is_new:
                self._folder.clean()
            if (table := self._output / TABLE).exists():
                *lines, unfinished = table.read_bytes().split(b"\n")  # of a process that was killed
                os.truncate(table, table.stat().st_size - len(unfinished))
                self.rows = [json.loads(line) for line in lines]
            if importlib.util.find_spec("tensorboard") is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self._output))
        self.rows = self.of_chief(self.rows)

    def evaluate_one(self, path: pathlib.Path) -> str:
        """Evaluate a checkpoint, unless it is damaged or was evaluated before; all towers call it.

        Returns:
            Why training is to stop early; empty: it goes on.
        """
        self._open()
        try:
            stored = self._restorer.open(path)
        except CheckpointError as error:
            log.warning("%s; it is not evaluated", error)
            return ""
        row = {"step": stored.manifest["step"], "sha256": stored.manifest["files"][TENSORS]["sha256"]}
        if any(row.items() <= other.items() for other in self.rows):
            stored.close()
            return ""
        self._restorer.load(stored)
        modes = [(layer, layer.training) for model in self.models.values() for layer in model.modules()]
        for layer, _ in modes:
            layer.training = False
        with self.strategy.health.during(f"evaluating step {row['step']}"), torch.no_grad():
            metrics = self.evaluate()
        for layer, mode in modes:
            layer.training = mode
        values = self._agreed(f"evaluates step {row['step']}", metrics, row)
        self.rows.append(values | row)
        chosen = [exporter for exporter in self.exporters if exporter.chooses(self.rows)]
        reason = self.stop.reason(self.rows) if self.stop is not None else ""
        if self.strategy.is_chief:
            self._write(path, values, chosen)
            if reason:
                log.info("training is to stop early: %s", reason)
        return reason

    def _agreed(self, call: str, metrics: Any, row: Row) -> dict[str, float]:
        """The metrics as numbers; where they are none, or differ between towers, it is an error on all of them."""
        comm, values = self.strategy.communicator, dict[str, float]()
        for name, value in metrics.items() if isinstance(metrics, Mapping) else [("", metrics)]:
            try:
                if not isinstance(name, str) or name in ("", *row):
                    raise TypeError
                values[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                text = f"the evaluation returned {value!r} as {name!r}, but must return numbers by names, not {[*row]}"
                announce(comm, call, error=TypeError(text))
        agree(comm, call, {"the result of the evaluation, without strategy.reduce,": str(sorted(values.items()))})
        return values

    def _write(self, path: pathlib.Path, values: Mapping[str, float], chosen: Sequence[Exporter]) -> None:
        """Export the checkpoint of the last row, and write that row."""
        for exporter in chosen:
            for name, model in self.models.items():
                save_weights(model, self._output / exporter.name / f"{name}.safetensors")
            if exporter.metric is not None:
                self._folder.keep_as(self._kept_as(exporter), path)
        step = self.rows[-1]["step"]
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        with open(self._output / TABLE, "a") as table:
            table.write(f"{json.dumps(self.rows[-1])}\n")
        log.info("step %d: %s", step, ", ".join(f"{name} {value:g}" for name, value in values.items()))


EvalSpec = Evaluator
"""TensorFlow's name for what :func:`train_and_evaluate` evaluates by."""


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The training of :func:`train_and_evaluate`.

    Args:
        train_step: is called in ``strategy.run`` with each batch.
        data: what ``strategy.distribute_dataset`` returns; its epochs follow each other.
        max_steps: the step after which training has ended, those before a restart included; at least 1.
        objects: what a checkpoint holds beside the models and the data: optimizers, schedules.
    """

    train_step: Callable[..., Any]
    data: DistributedDataset
    max_steps: int
    objects: Mapping[str, Any]


def train_and_evaluate(train_spec: TrainSpec, eval_spec: EvalSpec, **options: Any) -> list[Row]:
    """Train up to a step, save checkpoints and evaluate them; started again, it goes on from the newest checkpoint.

    In a cluster with an ``evaluator`` task, that task evaluates and the others train. Else all towers train and
    evaluate in turns: where a checkpoint was saved, and at the end. (TensorFlow's ``tf.estimator.train_and_evaluate``.)

    Args:
        options: those of :class:`mirrored.CheckpointManager`: ``every_steps``, ``every_seconds``, ``keep``, ….

    Returns:
        The evaluation's table; empty where another task evaluates.

    Raises:
        CheckpointError, TypeError, ValueError: see :class:`mirrored.CheckpointManager` and :class:`Evaluator`.
    """
    strategy, data, max_steps = eval_spec.strategy, train_spec.data, train_spec.max_steps
    if max_steps < 1:
        raise ValueError(f"max_steps is {max_steps!r}, but must be at least 1")
    if is_evaluator(strategy):
        return eval_spec.run()
    objects = {**train_spec.objects, **eval_spec.models, "train": data}
    manager = CheckpointManager(strategy, eval_spec.folder, objects, **options)
    saved: list[str] = []
    strategy.events.saved.append(saved.append)
    in_turns = not any("evaluator" in each.cluster_spec() for each in _resolvers(strategy))
    pause = Deadline(0)
    with manager.resume():
        for _ in data.epochs(max_steps + 1):  # as each has a step, but perhaps what is left of one
            if manager.steps >= max_steps:
                break
            for batch in itertools.islice(data, max_steps - manager.steps):
                strategy.run(train_spec.train_step, args=batch if isinstance(batch, (tuple, list)) else (batch,))
                manager.step()
                if in_turns and saved and eval_spec.of_chief(pause.has_passed()):
                    pause = Deadline(eval_spec.throttle_secs)
                    manager.wait()
                    if eval_spec.evaluate_one(manager.folder / name_of(manager.steps)):
                        raise TrainingStopped  # which saves, too
                saved.clear()
        if not manager.steps:
            raise ValueError(f"the data of TrainSpec have no batch, but max_steps is {max_steps}")
    if in_turns:
        eval_spec.evaluate_one(manager.folder / name_of(manager.steps))
    return eval_spec.rows
