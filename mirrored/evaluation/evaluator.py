"""The evaluator: evaluates each new checkpoint, in parallel with a training or in turns, and keeps a table.

::

    results/run/                 a folder of checkpoints
        step-00000120/
        best/                    or best-NAME: a checkpoint that an exporter keeps
        evaluation/              or evaluation-NAME
            metrics.jsonl        the table: one JSON object per line
            best/model.safetensors
            events.out.tfevents…   if tensorboard is installed

[Note: the table is the memory] An evaluator that was killed and is started again reads its table. It does not repeat
evaluations, and the best result so far stays the best. A row is written last: a checkpoint may be exported twice, but
it is never left out. Checkpoints are identified by the SHA-256 of their tensors: a run that went back to an earlier
step writes different checkpoints under the same names.

[Note: towers decide identically] All towers have the same rows, and metrics that are compared. Each tower therefore
decides independently, and an error occurs on all of them. Only the chief watches and writes.
"""

from __future__ import annotations

import contextlib
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
from mirrored.checkpoint.folder import ENDED, FOLDER_MODE, STOP, Disk, Folder, FolderLock, take_lock
from mirrored.checkpoint.manager import CheckpointManager
from mirrored.checkpoint.manifest import LATEST, TENSORS, check_name, is_step, name_of
from mirrored.checkpoint.reading import save_weights
from mirrored.checkpoint.restoring import Restorer
from mirrored.checkpoint.tracked import track
from mirrored.cluster.tf_config import is_evaluator, resolvers_of
from mirrored.context import refuse_inside_run
from mirrored.data.dataset import DistributedDataset
from mirrored.evaluation.watching import checkpoints_iterator
from mirrored.interceptor import interceptor
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import agree, announce
from towers.mirroring import broadcast
from towers.system.messages import get_logger
from towers.system.timeouts import Deadline

log = get_logger("mirrored")

TABLE, HELD = "metrics.jsonl", "held"

Row = dict[str, Any]
"""A row of the table: the metrics, ``step`` and ``sha256``."""


@dataclasses.dataclass(frozen=True)
class Exporter:
    """Exports the weights of every checkpoint, or of each that is better than all before, over the previous export.

    Args:
        name: the name of the folder with the weights. A checkpoint that was chosen by a metric is itself kept under
            that name, for ``CheckpointManager.restore``. An evaluation with a name adds its name ("best-NAME").
        metric: a name among the returned metrics. By default, every checkpoint is exported.
        higher_is_better: whether higher values are better. By default, lower values are.
    """

    name: str
    metric: str | None = None
    higher_is_better: bool = False

    def chooses(self, rows: Sequence[Row]) -> bool:
        """Returns whether the checkpoint of the last row must be exported."""
        if self.metric is None:
            return True
        return _best(rows, self.metric, self.higher_is_better) is rows[-1] and not math.isnan(rows[-1][self.metric])


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stops training when a metric has not improved for a number of steps, as TensorFlow's hooks do.

    ``stop_if_no_decrease_hook`` is this class; ``stop_if_no_increase_hook`` has ``higher_is_better=True``. Evaluations
    before the last decrease of the step do not count, because the run went back or was started again.

    Args:
        metric: a name among the returned metrics.
        max_steps: the number of training steps without a better value after which training stops.
        min_steps: evaluations of earlier steps do not count.

    Raises:
        ValueError: a number is negative or not whole, or ``max_steps`` is 0.
    """

    metric: str
    max_steps: int
    min_steps: int = 0
    higher_is_better: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("max_steps", self.max_steps, 1), ("min_steps", self.min_steps, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"EarlyStopping: {name} is {value!r}, but must be a whole number from {least}")

    def reason(self, rows: Sequence[Row]) -> str:
        """Returns why training must stop after the evaluation of the last row. Empty: it continues."""
        last = rows[-1]["step"]
        since = max((i for i in range(1, len(rows)) if rows[i]["step"] < rows[i - 1]["step"]), default=0)
        counted = [row for row in rows[since:] if self.min_steps <= row["step"] < last]
        steps = last - _best([*counted, rows[-1]], self.metric, self.higher_is_better)["step"]
        return f"{self.metric} has not become better for {steps} steps" if steps >= self.max_steps else ""


def _read_table(table: pathlib.Path) -> list[Row]:
    """Returns the rows of a table, without the unfinished line of a process that was killed, which is cut off.

    Raises:
        CheckpointError: the file is not such a table.
    """
    *lines, unfinished = table.read_bytes().split(b"\n")
    with contextlib.suppress(ValueError, AttributeError):
        rows = [json.loads(line) for line in lines]
        is_row = unfinished.startswith(b'{"') and not unfinished.endswith(b"}")
        if all({"step", "sha256"} <= row.keys() for row in rows) and (is_row or not unfinished):
            os.truncate(table, table.stat().st_size - len(unfinished))
            return rows
    raise CheckpointError(f"{table} is not the table of an evaluation: move it away, or give the evaluation a name")


def _best(rows: Sequence[Row], metric: str, higher_is_better: bool) -> Row:
    """Returns the first row with the best value. NaN is the worst value.

    Raises:
        ValueError: the last row does not have the metric.
    """
    if metric not in rows[-1]:
        raise ValueError(f"the metric {metric!r} is asked for, but the evaluation returned only {', '.join(rows[-1])}")
    sign = 1 if higher_is_better else -1
    return max(rows, key=lambda row: ((value := sign * row.get(metric, math.nan)) == value, value))


@dataclasses.dataclass
class Evaluator:
    """Evaluates each new checkpoint of a run, in parallel with it, until it ends. (TensorFlow's ``SidecarEvaluator``.)

    All towers of the evaluator must make the same calls. ::

        evaluator = Evaluator(strategy, "results/run", {"model": model}, evaluate)
        if is_evaluator(strategy):
            evaluator.run()

    Args:
        strategy: the strategy of the evaluator's own towers.
        folder: the folder of the run's CheckpointManager, which may not exist yet.
        models: all models that are evaluated, by their names in the checkpoint.
        evaluate: returns the metrics as numbers by name, the same on all towers (see ``strategy.reduce``). It is called
            without gradients, and with the models in eval mode.
        name: the name of this evaluation, if a run has several.
        exporters: decide for which checkpoints the weights are exported.
        stop: decides when training stops early.
        timeout_seconds: the longest wait for a new checkpoint.
        throttle_secs: the shortest training time in seconds between two evaluations, except before the last, if towers
            train and evaluate in turns (:func:`train_and_evaluate`). A separate evaluator evaluates each checkpoint.

    Attributes:
        rows: the table.

    Raises:
        ValueError: the folder is missing, or a name or a number is invalid.
        TypeError: an argument is of another type.
        DisagreementError: on all towers: their settings differ.
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
        self._check_types()
        path = interceptor().folder(pathlib.Path(self.folder))
        self._output = path / check_name(f"evaluation-{self.name}" if self.name else "evaluation")
        self._folder = Folder(path, Disk(), writer=self._output.name)
        self._check_exporters()
        settings = {
            "folder": os.fspath(self.folder),
            "models": sorted(map(str, self.models)),
            "name": self.name,
            "exporters": [dataclasses.asdict(exporter) for exporter in self.exporters],
            "stop": dataclasses.asdict(self.stop) if self.stop is not None else None,
            "timeout_seconds": self.timeout_seconds,
            "throttle_secs": self.throttle_secs,
        }
        agree(self.strategy.communicator, "mirrored.evaluation.Evaluator", settings)
        self._tracked = [track(name, model, self.strategy.is_mirrored) for name, model in self.models.items()]
        self._restorer = Restorer(self.strategy, self._folder, self._tracked, self.strategy.is_chief)
        self._lock: FolderLock | None = None
        self._board: Any = None
        self.rows: list[Row] = []

    def _check_types(self) -> None:
        if not callable(self.evaluate):
            raise TypeError(f"evaluate is {self.evaluate!r}, but must be a function that returns metrics by name")
        models = self.models.values() if isinstance(self.models, Mapping) else ()
        if not models or not all(isinstance(model, nn.Module) for model in models):
            raise TypeError(f"models is {self.models!r:.60}, but must be a dict of models by their names")
        if not all(isinstance(exporter, Exporter) for exporter in self.exporters):
            raise TypeError(f"exporters is {self.exporters!r:.60}, but must be a list of Exporter")
        if self.stop is not None and not isinstance(self.stop, EarlyStopping):
            raise TypeError(f"stop is {self.stop!r:.60}, but must be an EarlyStopping")
        for name in ("timeout_seconds", "throttle_secs"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(f"{name} is {value!r}, but must be a number of seconds from 0")

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
        """Evaluates every new checkpoint until the run has ended, and returns the table.

        Raises:
            CheckpointError: no checkpoint arrived in time, a checkpoint does not fit the models, or another process
                evaluates.
            TypeError, ValueError: the evaluation returns no metrics, or not the required one.
            DisagreementError: the metrics differ between towers.
        """
        refuse_inside_run("Evaluator.run()")
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
        """Returns the chief's value on all towers. A path becomes a string."""
        return announce(self.strategy.communicator, "evaluates checkpoints", value)[0]

    def _open(self) -> None:
        """Reads the table; see [Note: the table is the memory]."""
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
            self._check_kept()
            if (table := self._output / TABLE).exists():
                self.rows = _read_table(table)
            if importlib.util.find_spec("tensorboard") is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self._output))
        self.rows = self.of_chief(self.rows)

    def _check_kept(self) -> None:
        for exporter in self.exporters:
            if exporter.metric is not None:
                try:
                    self._folder.check_replaceable(self._kept_as(exporter))
                except FileExistsError as error:
                    raise CheckpointError(
                        f"the exporter {exporter.name!r} cannot keep a checkpoint: {error.strerror}"
                    ) from None

    def evaluate_one(self, path: pathlib.Path, *, keeps: bool = False) -> str:
        """Evaluates a checkpoint, unless it is damaged or was evaluated before. All towers must call it.

        The towers evaluate tower 0's model of the checkpoint, whose weights are exported, even if buffers (or, between
        synchronisations, parameters) differed between the towers that saved it. So the result depends on the checkpoint
        only, and not on the number of towers.

        Args:
            keeps: whether the models have their present values again afterwards.

        Returns:
            The reason why training must stop early. Empty: it continues.
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
        with contextlib.ExitStack() as stack:
            for one in self._tracked if keeps else ():
                stack.callback(one.rollback())
            self._restorer.load(stored)
            if self.strategy.num_replicas_in_sync > 1:
                broadcast(self.strategy.communicator, list(self._tensors()))
            return self._evaluate_loaded(path, row)

    def _tensors(self) -> Iterator[torch.Tensor]:
        found = {id(t): t for model in self.models.values() for t in (*model.parameters(), *model.buffers())}
        yield from (tensor.detach() for tensor in found.values())

    def _evaluate_loaded(self, path: pathlib.Path, row: Row) -> str:
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
        """Returns the metrics as numbers, or raises an error on all towers if they differ or are not numbers."""
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
        """Exports the checkpoint of the last row, and writes that row."""
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
"""TensorFlow's name for the evaluation of :func:`train_and_evaluate`."""


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The training of :func:`train_and_evaluate`.

    Args:
        train_step: is called in ``strategy.run`` with each batch; with parameter servers, on a worker.
        data: the result of ``strategy.distribute_dataset``. Its epochs follow each other.
        max_steps: the step after which training ends, at least 1. Steps before a restart count.
        objects: the objects of a checkpoint in addition to the models and the data: optimizers, schedules.
    """

    train_step: Callable[..., Any]
    data: DistributedDataset
    max_steps: int
    objects: Mapping[str, Any]


def _runner(strategy: Any, train_step: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that runs a training step with its arguments, or schedules it on a worker."""
    if not hasattr(strategy, "coordinator"):
        return lambda args: strategy.run(train_step, args=args)
    from mirrored.parameter_server.coordinator import ClusterCoordinator, ShortQueue  # needs Ray

    queue = ShortQueue(strategy.coordinator() or ClusterCoordinator(strategy))
    return lambda args: [*queue.schedule(strategy.run, (train_step, tuple(args)))]


def train_and_evaluate(train_spec: TrainSpec, eval_spec: EvalSpec, **options: Any) -> list[Row]:
    """Trains up to a step, saves checkpoints and evaluates them. If it is run again, it resumes from the newest one.

    In a cluster with an ``evaluator`` task, that task evaluates and the others train. Otherwise, all towers train and
    evaluate in turns: after a checkpoint was saved, and at the end. (TensorFlow's ``tf.estimator.train_and_evaluate``.)

    Args:
        options: options of :class:`mirrored.CheckpointManager`: ``every_steps``, ``every_seconds``, ``keep``, ….

    Returns:
        The evaluation's table. Empty if another task evaluates.

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
    in_turns = not any("evaluator" in each.cluster_spec() for each in resolvers_of(strategy))
    pause, every = Deadline(0), options.get("every_steps")
    run = _runner(strategy, train_spec.train_step)
    with manager.resume() as restored:
        if (
            in_turns
            and restored is not None
            and not restored.in_memory
            and eval_spec.evaluate_one(manager.folder / restored.name, keeps=True)  # it may have been interrupted
        ):
            raise TrainingStopped
        for _ in data.epochs(max_steps + 1):  # each has a step, except perhaps the rest of an interrupted epoch
            if manager.steps >= max_steps:
                break
            for batch in itertools.islice(data, max_steps - manager.steps):
                run(batch if isinstance(batch, (tuple, list)) else (batch,))
                if every and (manager.steps + 1) % every == 0:
                    strategy.synchronize()  # with local steps: what is saved next is evaluated
                manager.step()
                if in_turns and saved and eval_spec.of_chief(pause.has_passed()):
                    pause = Deadline(eval_spec.throttle_secs)
                    manager.wait()
                    if eval_spec.evaluate_one(manager.folder / name_of(manager.steps), keeps=True):
                        raise TrainingStopped  # this also saves
                saved.clear()
        if not manager.steps:
            raise ValueError(f"the data of TrainSpec have no batch, but max_steps is {max_steps}")
        strategy.synchronize()
    if in_turns:
        eval_spec.evaluate_one(manager.folder / name_of(manager.steps))
    return eval_spec.rows
