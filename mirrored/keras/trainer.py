"""Keras' trainer under a strategy: ``fit``, ``evaluate``, ``predict`` and their kind for one batch.

Keras' own loops run on every tower; what is replaced is the function for one step. It gets this tower's share of the
batch (:mod:`mirrored.keras.data`) and calls Keras' function inside ``strategy.run``; afterwards the towers settle what
the step has changed.

[Note: logs are reduced when they are read] What a step returns is this tower's. At the end of an epoch, and of
``evaluate``, it is reduced over the towers. In between that is done where somebody reads it: a callback that follows
batches (in every batch), and the progress bar (about a hundred times in an epoch). All towers know alike who reads.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from mirrored.context import current_frame, strategy_with_towers
from mirrored.data.shares import Share
from mirrored.keras import callbacks as tower_callbacks
from mirrored.keras import data, steps
from mirrored.keras.keras_private import CallbackList, TorchTrainer, Trainer
from mirrored.keras.metrics import Metrics
from mirrored.keras.patching import around
from mirrored.keras.saving import note_strategy, strategy_of
from mirrored.keras.statistics import StepVariables
from mirrored.strategy.base import Strategy
from towers.errors import MirrorError

_UPDATES_OF_THE_BAR = 100


class Training:
    """A model under a strategy: what its steps leave to be settled among the towers.

    Attributes:
        reads_every: after how many batches somebody reads the logs; 0: nobody does before the end of the epoch.
    """

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self._model = weakref.proxy(model)
        self.strategy = strategy
        self.several = strategy.num_replicas_in_sync > 1
        self.metrics = Metrics(self._model, strategy.communicator)
        self._variables = StepVariables(self._model, strategy.communicator)
        self.reads_every = 0
        self._read: dict[str, Any] = {}
        self._steps = 0
        self._newest: tuple[dict[str, Any], Share] | None = None

    @contextlib.contextmanager
    def loop(self, reads_every: int) -> Iterator[None]:
        """Inside, batches are read and run; a loop may be within another one's callbacks."""
        outer = self.reads_every, self._steps, self._read
        self.reads_every, self._steps, self._read = reads_every, 0, {}
        active, data.active = data.active, self.strategy
        self._variables.look()
        try:
            yield
        finally:
            data.active = active
            self.reads_every, self._steps, self._read = outer

    def run(self, function: Callable[[Any], Any], batch: Any, trains: bool) -> tuple[Any, Share]:
        """Run a step on this tower's share of a batch; returns what ``function`` does, and the share."""
        batch, share = data.share_of(self.strategy, batch)
        self.metrics.begin()
        kept = [] if share.local else self.metrics.state()
        if trains:
            self._variables.begin()
        with steps.running(steps.Step(self.strategy, share)):
            result = self.strategy.run(function, args=([batch],))
        for tensor, value in kept:
            tensor.copy_(value)
        self.metrics.count(share)
        if trains:
            self._variables.settle(share)
        return result, share

    def step(self, function: Callable[[Any], Any], batch: Any, trains: bool) -> Any:
        """The logs of a training or test step: of all towers, if somebody reads them now; else those that were."""
        logs, share = self.run(function, batch, trains)
        if not isinstance(logs, dict):
            return logs
        self._steps += 1
        self._newest = logs, share
        if self.reads_every and (self._steps % self.reads_every == 0 or not self._read):
            self._read = self.reduce()
        return self._read or logs

    def reduce(self) -> dict[str, Any]:
        """The newest logs, of all towers; see :meth:`Metrics.reduce`."""
        if self._newest is None:
            return {}
        (logs, share), self._newest = self._newest, None
        self._read = self.metrics.reduce(logs, share)
        return self._read


_trainings: weakref.WeakKeyDictionary[Any, Training] = weakref.WeakKeyDictionary()


def _training_of(model: Any) -> Training | None:
    """A model's training under its strategy; None where it has none."""
    strategy = strategy_of(model)
    if strategy is None:
        return None
    training = _trainings.get(model)
    if training is None or training.strategy is not strategy:
        training = _trainings[model] = Training(model, strategy)
    return training


def _checked_training_of(model: Any, call: str) -> Training | None:
    """As :func:`_training_of`, for a method that trains.

    Raises:
        MirrorError: there are towers, and the model is not theirs.
        RuntimeError: inside ``strategy.run``; or with virtual towers.
    """
    training = _training_of(model)
    if training is None:
        if strategy_with_towers() is not None:
            raise MirrorError(
                f"model.{call} of a model that was made outside of strategy.scope(): every tower would train one of "
                "its own. Make and compile the model inside 'with strategy.scope():', or call strategy.mirror(model)"
            )
        return None
    frame = current_frame()
    if frame is not None and frame.replica is not None:
        raise RuntimeError(f"model.{call} was called inside strategy.run: call it outside, it runs its steps itself")
    if training.strategy.virtual_towers is not None:
        raise RuntimeError(
            f"model.{call} cannot be cut into virtual towers: Keras' train_step makes one loss of all examples that it "
            "is given, and steps its optimizer in the same call. Leave virtual_towers out, or train the model by a "
            "function of your own with strategy.backward"
        )
    return training


@around(Trainer, "__init__")
def _init(original: Any, model: Any) -> None:
    original(model)
    note_strategy(model)


@around(Trainer, "compile")
def _compile(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if strategy_of(model) is None:
        note_strategy(model)
    return original(model, *args, **kwargs)


@around(Trainer, "_symbolic_build")
def _symbolic_build(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    training = _training_of(model)
    if training is not None and training.several:
        knows = training.strategy.engine.recorder.knows
        if not all(knows(variable.value) for variable in model.variables):
            training.strategy.mirror(model)


@around(Trainer, "reset_metrics")
def _reset_metrics(original: Any, model: Any) -> None:
    original(model)
    training = _training_of(model)
    if training is not None and training.several:
        training.metrics.forget()


@around(Trainer, "_get_metrics_result_or_logs")
def _get_metrics_result_or_logs(original: Any, model: Any, logs: Any) -> Any:
    training = _training_of(model)
    if training is not None and training.several and data.active is training.strategy:
        logs = training.reduce() or logs
    return original(model, logs)


def _loop(name: str) -> None:
    """Let ``fit``, ``evaluate`` or ``predict`` share out its batches."""
    signature = inspect.signature(getattr(TorchTrainer, name))

    @around(TorchTrainer, name)
    def loop(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        training = _checked_training_of(model, name) if name == "fit" else _training_of(model)
        if training is None:
            return original(model, *args, **kwargs)
        strategy = training.strategy
        extra = {key: kwargs.pop(key) for key in list(kwargs) if key not in signature.parameters}
        bound = signature.bind(model, *args, **kwargs)
        bound.apply_defaults()
        given = {key: value for key, value in bound.arguments.items() if key not in ("self", "kwargs")}
        reads_every = _reads_every(given)
        if training.several:
            given["callbacks"] = tower_callbacks.for_tower(strategy, given["callbacks"], name == "fit")
            if not strategy.is_chief:
                given["verbose"] = 0
        with training.loop(reads_every), warnings.catch_warnings():
            if not strategy.is_chief:  # who says the same
                warnings.filterwarnings("ignore", category=UserWarning, module=r"(mirrored\.)?keras\b")
            return original(model, **given, **extra)


def _reads_every(given: dict[str, Any]) -> int:
    """After how many batches callbacks, or the progress bar, read the logs; 0: they do not."""
    if tower_callbacks.read_batches(given["callbacks"]):
        return 1
    if given["verbose"] not in (1, "auto") or isinstance(given["callbacks"], CallbackList):
        return 0
    count = given.get("steps_per_epoch") or given.get("steps")
    if count is None:
        examples = len(given["x"]) if hasattr(given["x"], "__len__") else 0
        count = examples // (given.get("batch_size") or 32)
    return max(1, count // _UPDATES_OF_THE_BAR)


for _name in ("fit", "evaluate", "predict"):
    _loop(_name)


def _on_batch(name: str) -> None:
    """Let ``train_on_batch`` or ``test_on_batch`` give the logs of the global batch."""

    @around(TorchTrainer, name)
    def on_batch(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        training = _checked_training_of(model, name) if name == "train_on_batch" else _training_of(model)
        if training is None or not training.several:
            return original(model, *args, **kwargs)
        with training.loop(reads_every=1):
            return original(model, *args, **kwargs)


for _name in ("train_on_batch", "test_on_batch"):
    _on_batch(_name)


def _step(kind: str) -> None:
    """Let the function that Keras makes for a step run on this tower's share."""
    attribute = f"{kind}_function"

    @around(TorchTrainer, f"make_{attribute}")
    def make(original: Any, model: Any, force: bool = False) -> None:
        original(model, force)
        training = _training_of(model)
        function = getattr(model, attribute)
        if training is not None and not isinstance(function, _StepFunction):
            setattr(model, attribute, _StepFunction(training, kind, function))


class _StepFunction:
    """A model's function for one batch."""

    def __init__(self, training: Training, kind: str, function: Callable[[Any], Any]) -> None:
        self._training = training
        self._kind = kind
        self._function = function

    def __call__(self, batches: Any) -> Any:
        training, batch = self._training, batches[0]
        if not training.several:
            return training.strategy.run(self._function, args=(batches,))
        if self._kind != "predict":
            return training.step(self._function, batch, self._kind == "train")
        outputs, share = training.run(self._function, batch, trains=False)
        if not share.local:
            outputs = keras.tree.map_structure(lambda output: output[:0], outputs)
        return training.strategy.gather(outputs)


for _kind in ("train", "test", "predict"):
    _step(_kind)
