"""Hugging Face's ``Trainer`` on all towers, with the numbers of one device.

.. code-block:: python

    from mirrored.transformers import Trainer  # in place of: from transformers import Trainer

Batch sizes are those of the global batch: ``per_device_train_batch_size=64`` is 64 examples on any number of towers.
``docs/how-to/hugging-face.md`` lists the differences from one device.

[Note: each tower is a Trainer of one process] ``accelerate`` would find the launcher's variables, and wrap the model in
``DistributedDataParallel``. So they are hidden from its state. Each tower runs the loop of ``transformers`` as if
alone, over all batches, and computes its share of each. Towers other than the first have another process index, so that
they write and print nothing. All loops read the same numbers of items, losses, predictions and metrics, so they decide
in the same way.

[Note: the weight of a tower's loss] ``Trainer`` passes ``num_items_in_batch``, the number of labels of all batches of a
step, to models and loss functions. Some divide the sum of their losses by it, and the losses of the towers add up.
Others ignore it and return a mean: over examples, over labels that are not -100, or over those after the first of each
text. The towers' losses are then weighted by these numbers. In the first steps, the kind of loss is determined with
losses in evaluation mode, without gradients. If twice the number of items halves the loss, it is divided by that
number. For other losses, tower 0 repeats an example, which must not change a mean. The loss of two examples, or of a
text and a copy with fewer labels, must be the mean of their losses with the right weights.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mirrored.context import current_replica
from mirrored.data.dataset import DistributedDataset
from mirrored.shares import Share
from mirrored.strategy.base import Strategy
from mirrored.strategy.kinds import MultiWorkerMirroredStrategy
from towers.sharding.optimizer import OptimizerSharder
from towers.system import tree as trees
from towers.system.tensors import is_dtensor, state_in_parts, whole_leaves

try:
    import accelerate.state
    import transformers
    import transformers.trainer
except ModuleNotFoundError as error:
    raise ImportError(
        "mirrored.transformers needs transformers and accelerate: pip install 'transformers>=5.24,<6' accelerate"
    ) from error

__all__ = ["OnTowers", "Trainer"]

_AnyTrainer: Any = object
_trainer: Any = transformers.trainer

_OF_LAUNCHERS = (
    *("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"),
)


def _are_of_entries(labels: Any) -> bool:
    """Returns whether labels are those of the entries of texts: integers, with -100 where none counts."""
    return isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() > 1


def _labels(labels: Any, examples: int, first: int = 0) -> int:
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return examples
    return int((labels[..., first:] if labels.dim() > 1 else labels).ne(-100).sum())


_MEANS: dict[str, Callable[[Any, int], int]] = {
    "labels": _labels,
    "labels after the first": lambda labels, examples: _labels(labels, examples, 1),
    "examples": lambda labels, examples: examples,
}
"""The numbers over which a mean is taken, from the labels of a share and its number of examples."""


def _two_examples(labels: Any, examples: int) -> tuple[int, int, bool]:
    """Returns the positions of two examples, and whether their losses distinguish the possible means.

    For labels of entries, it is the text with the most labels, which must have enough of them.
    """
    if _are_of_entries(labels):
        counts = labels.ne(-100).flatten(1).sum(1)
        at = int(counts.argmax())
        return at, at, int(counts[at]) >= _ENOUGH
    if isinstance(labels, Tensor) and labels.dim() == 1 and not labels.is_floating_point():
        others = torch.nonzero(labels != labels[0])  # weights of classes show with different ones
        return 0, int(others[0]) if len(others) else 0, len(others) > 0
    return 0, 1 % examples, examples > 1


_ENOUGH = 4  # labels of an example, so that the weights of the means differ
_RANDOM_STATES = "mirrored_random_states.json"


def _alone(init: Callable[..., None]) -> Callable[..., None]:
    """Hides the launcher's variables from ``init``."""

    def initialise(state: Any, *args: Any, **kwargs: Any) -> None:
        hidden = {name: os.environ.pop(name) for name in _OF_LAUNCHERS if name in os.environ}
        try:
            init(state, *args, **kwargs)
        finally:
            os.environ.update(hidden)

    return initialise


# It advises DDP because of the strategy's process group.
logging.getLogger("transformers.training_args").addFilter(lambda record: "ParallelMode" not in record.getMessage())
accelerate.state.PartialState.__init__ = _alone(accelerate.state.PartialState.__init__)  # before TrainingArguments


class _Loader:
    """A distributed dataset in the form of the loader that ``Trainer`` expects.

    Args:
        loader: the loader that ``transformers`` has made.
        first: the first batch of the first epoch.
    """

    def __init__(self, loader: DataLoader[Any], distributed: DistributedDataset, first: int = 0) -> None:
        self.dataset, self.batch_sampler = loader.dataset, loader.batch_sampler
        self.batch_size = loader.batch_size
        self._loader, self._distributed, self._first = loader, distributed, first

    def __len__(self) -> int:
        return len(self._distributed)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._distributed)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of an epoch."""
        if (set_epoch := getattr(self._loader, "set_epoch", None)) is not None:
            set_epoch(epoch)
        seed = self._distributed.state_dict()["seed"]
        self._distributed.load_state_dict({"seed": seed, "epoch": epoch, "step": self._first})
        self._first = 0

    def without(self, batches: int) -> _Loader:
        """Returns a loader whose first epoch leaves out so many batches."""
        return _Loader(self._loader, self._distributed, batches)


_skip_first_batches = _trainer.skip_first_batches


def _skip(loader: Any, num_batches: int = 0) -> Any:
    return loader.without(num_batches) if isinstance(loader, _Loader) else _skip_first_batches(loader, num_batches)


_trainer.skip_first_batches = _skip


class _EndOfStep(transformers.TrainerCallback):  # type: ignore[misc]
    """Reports the end of a step to the strategy, after the optimizer has stepped outside of ``run``."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._strategy.events.end_step()


class OnTowers(_AnyTrainer):  # type: ignore[misc]
    """Makes a subclass of ``transformers.Trainer`` train on all towers: ``class Own(OnTowers, SFTTrainer): …``.

    Batch sizes are global: each tower computes its share of every batch. The loss is that of the global batch, also if
    towers have different numbers of tokens, and evaluation counts every example once.

    Args:
        args: of the other class; the second one is the ``TrainingArguments``.
        strategy: the strategy that trains; default ``MultiWorkerMirroredStrategy(seed=…)`` with the seed of the
            ``TrainingArguments``.
        kwargs: of the other class.

    Attributes:
        strategy: the strategy that trains.

    Raises:
        ValueError: the strategy has ``virtual_towers`` or ``synchronize``; or, on several towers, DeepSpeed, FSDP,
            ``batch_eval_metrics``, ``auto_find_batch_size`` or ``include_for_metrics`` with inputs is selected.
    """

    current_flos: float

    def __init__(self, *args: Any, strategy: Strategy | None = None, **kwargs: Any) -> None:
        given = kwargs["args"] if "args" in kwargs else args[1] if len(args) > 1 else None
        if given is None:
            given = transformers.TrainingArguments("tmp_trainer")
            if len(args) > 1:
                args = (args[0], given, *args[2:])
            else:
                kwargs["args"] = given
        self.strategy = strategy = strategy or MultiWorkerMirroredStrategy(seed=given.seed)
        if strategy.virtual_towers is not None or strategy.engine.local is not None:
            raise ValueError(
                "the Trainer computes one loss of a tower's share, and steps its optimizer outside of run: omit "
                "virtual_towers and synchronize"
            )
        self._several = strategy.num_replicas_in_sync > 1
        if self._several:
            _check_settings(given)
        self._adds_up: bool | None = None  # see [Note: the weight of a tower's loss]
        self._means = list(_MEANS)  # those that are possible
        self._settled = False  # whether the loss was found to be one of them
        self._repeats = False  # whether a repeated example does not change the loss
        self._weight = 1.0  # of the loss of the running step
        self._share: Share | None = None  # of the batch of the running step
        self._weights: dict[str, Tensor] | None = None  # to save, if the model is sharded
        _take_place(given, strategy)
        super().__init__(*args, **kwargs)
        self.add_callback(_EndOfStep(strategy))
        if self.model_init is None:
            self._mirror(self.model)

    def _mirror(self, model: Any) -> None:
        self.strategy.mirror(model)
        self.strategy.engine.mirror_pending()  # the first step of an optimizer starts outside of run
        if any(map(is_dtensor, model.parameters())):
            # Trainer reads from the name of a model's class whether it shifts its labels. torch has prefixed the name.
            model._get_name = functools.partial(str, type(model).__name__.removeprefix("FSDP"))

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        self._mirror(model)
        return model

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        backward, gather = self.accelerator.backward, self.accelerator.gather

        def weighted(loss: Tensor, **kwargs: Any) -> None:
            backward(loss * self._weight if self._weight != 1 else loss, **kwargs)

        def gathered(values: Any) -> Any:
            return gather(values) if self._share is None else trees.map_leaves(self._gathered, values)

        if self._several:
            self.accelerator.backward, self.accelerator.gather = weighted, gathered

    def _gathered(self, value: Any) -> Any:
        """Returns the values of all towers, in a step; a stand-in adds none, or 0."""
        replica, share = current_replica(), self._share
        if replica is None or share is None or not isinstance(value, Tensor):
            return value
        rows = value.detach().reshape(1) if value.dim() == 0 else value.detach()
        if not share.local:
            rows = torch.zeros_like(rows) if value.dim() == 0 else rows[:0]
        return replica.all_gather(rows)

    # -- data --------------------------------------------------------------------------------------------

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        if not self._several or not isinstance(loader, DataLoader):
            return loader
        return _Loader(loader, self.strategy.distribute_dataset(loader, stand_in=True, seed=self.args.seed))

    def _share_of(self, inputs: Any) -> Share | None:
        """Returns the share of a batch, or None for a batch that every tower computes whole."""
        shares = self.strategy.known_shares.of(inputs) if self._several else []
        return shares[0] if shares else None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Returns the number of labels of the batches on all towers."""
        shares = [self._share_of(batch) for batch in batch_samples]
        own = super()._get_num_items_in_batch(batch_samples, device)
        if own is None or None in shares or not shares:
            return own
        real = [batch for batch, share in zip(batch_samples, shares, strict=True) if share is not None and share.local]
        own = super()._get_num_items_in_batch(real, device) if real else torch.zeros_like(torch.as_tensor(own))
        return self._sum(torch.as_tensor(own, dtype=torch.float32))

    def _sum(self, value: Tensor) -> Tensor:
        replica = current_replica()
        value = value.to(self.strategy.device)
        total: Tensor = self.strategy.reduce("sum", value) if replica is None else replica.all_reduce("sum", value)
        return total

    # -- steps -------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        step, strategy = super().training_step, self.strategy
        if (share := self._share_of(inputs)) is None:
            result: Tensor = strategy.run(step, args=(model, inputs, num_items_in_batch))
            return result
        fraction = self._fraction(model, inputs, num_items_in_batch, share)
        self._weight, self._share = fraction * strategy.num_replicas_in_sync, share
        try:
            with contextlib.nullcontext() if self.accelerator.sync_gradients else strategy.no_sync():
                loss = strategy.run(step, args=(model, inputs, num_items_in_batch))
        finally:
            self._weight, self._share = 1.0, None
        return self._total(loss, fraction)

    def _total(self, loss: Tensor, fraction: float) -> Tensor:
        """Returns the loss of the global batch."""
        return self._sum(loss * fraction if fraction else torch.zeros_like(loss))

    def _fraction(self, model: Any, inputs: Any, num_items_in_batch: Any, share: Share) -> float:
        """Returns the factor of this tower's loss. The sum of all products is the loss of the global batch.

        Raises:
            ValueError: on all towers: the loss is not a mean that is known.
        """
        if num_items_in_batch is not None and self._adds_up is None:
            self._adds_up = self._is_divided(model, inputs, num_items_in_batch)
        if self._adds_up:
            return 1.0 if share.local else 0.0
        labels = inputs.get("labels")
        own = [float(_MEANS[name](labels, share.local)) if share.local else 0.0 for name in self._means]
        votes, settles = [1.0] * len(own), True
        if not self._settled and (self.strategy.is_chief or self._is_sharded):  # a forward gathers sharded parameters
            votes, settles = self._votes(model, inputs, num_items_in_batch, max(share.local, 1))
        if not self.strategy.is_chief:
            votes, settles = [0.0] * len(own), False
        *totals, settled = self._sum(torch.tensor([*own, *votes, float(settles)])).tolist()
        self._settled = bool(settled)
        possible = [place for place in range(len(own)) if totals[len(own) + place]]
        if not possible:
            raise ValueError(
                "the loss of the model or of compute_loss is neither a mean over examples or labels nor divided by "
                "num_items_in_batch, so the loss of the global batch is not known: return one of these"
            )
        self._means = [self._means[place] for place in possible]
        first = possible[0]
        return own[first] / totals[first] if totals[first] else 0.0

    def _is_divided(self, model: Any, inputs: Any, items: Any) -> bool | None:
        """Returns whether the loss is divided by the number of items. None: it is 0 or not finite on all towers."""
        one, half = self._losses(model, [(inputs, items), (inputs, 2 * items)])
        is_known = math.isfinite(one) and one != 0
        is_half = is_known and abs(half - one / 2) <= self._tolerance * abs(one)
        known, halved = self._sum(torch.tensor([float(is_known), float(is_half)])).tolist()
        return halved == known if known else None

    def _votes(self, model: Any, inputs: Any, items: Any, examples: int) -> tuple[list[float], bool]:
        """Returns for each possible mean whether the loss may be it, and whether no further test is needed.

        See [Note: the weight of a tower's loss].
        """
        labels, yes = inputs.get("labels"), [1.0] * len(self._means)
        if not all(isinstance(value, (Tensor, int, float, NoneType)) for value in inputs.values()):
            return yes, True  # an example cannot be repeated
        batched = [name for name, value in inputs.items() if _is_of(value, examples)]
        of_entries = _are_of_entries(labels)
        at, place, differ = _two_examples(labels, examples)
        if self._repeats and not differ and not self._is_sharded:
            return yes, False
        one = {**inputs, **{name: inputs[name][at : at + 1] for name in batched}}
        other = {**inputs, **{name: inputs[name][place : place + 1] for name in batched}}
        if of_entries:
            entries = torch.nonzero(one["labels"].flatten() != -100).flatten()
            fewer = one["labels"].flatten().index_fill(0, entries[len(entries) // 2 :], -100)
            other = {**one, "labels": fewer.view_as(one["labels"])}
        twice, both = ({**one, **{name: torch.cat([one[name], two[name]]) for name in batched}} for two in (one, other))
        of_one, again, of_twice, of_other, of_both = self._losses(
            model, [(batch, items) for batch in (one, one, twice, other, both)]
        )
        if of_one == 0 or not math.isfinite(of_one + of_other):
            return yes, False
        if not of_entries and abs(again - of_one) > self._tolerance * abs(of_one):
            return yes, True  # the loss is random
        self._repeats = abs(of_twice - of_one) <= self._tolerance * abs(of_one)
        if not self._repeats:
            return [0.0] * len(yes), False
        if not differ:
            return yes, False
        limit = self._tolerance * max(abs(of_one), abs(of_other))
        weights = [tuple(_MEANS[name](each.get("labels"), 1) for each in (one, other)) for name in self._means]
        votes = [float(abs((a * of_one + b * of_other) / ((a + b) or 1) - of_both) <= limit) for a, b in weights]
        return votes, not of_entries or sum(votes) == 1

    @property
    def _tolerance(self) -> float:
        """The relative rounding error of a loss."""
        kinds = {parameter.dtype for parameter in self.model.parameters()}
        return 1e-4 if kinds <= {torch.float32, torch.float64} and not (self.args.bf16 or self.args.fp16) else 0.03

    def _losses(self, model: Any, batches: list[tuple[Any, Any]]) -> list[float]:
        """Returns the losses of batches, each with a number of items."""
        was_training = model.training
        model.eval()
        found = []
        with torch.no_grad(), self.compute_loss_context_manager():
            for inputs, items in batches:
                loss = self.compute_loss(model, {**inputs}, num_items_in_batch=items)
                found.append(float(loss))
        model.train(was_training)
        return found

    def store_flos(self) -> None:
        if self._several:
            self.current_flos = float(self._sum(torch.tensor(self.current_flos, dtype=torch.float64)))
        super().store_flos()

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        arguments = (model, inputs, prediction_loss_only, ignore_keys)
        if (share := self._share_of(inputs)) is None:
            result: tuple[Any, Any, Any] = self.strategy.run(super().prediction_step, args=arguments)
            return result
        has_loss = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        fraction = self._fraction(model, inputs, items, share) if has_loss else 0.0
        loss, logits, labels = self.strategy.run(super().prediction_step, args=arguments)
        if loss is not None:
            loss = self._total(loss, fraction)
        # The loop repeats the loss for each example of a full batch.
        self.gather_function = functools.partial(trees.map_leaves, lambda leaf: leaf[: share.total])
        return loss, self._gather(logits, share), self._gather(labels, share)

    def _gather(self, values: Any, share: Share) -> Any:
        """Returns all towers' examples, with dimension 1 filled up with -100."""
        if isinstance(values, (list, tuple)):
            return type(values)(self._gather(value, share) for value in values)
        if isinstance(values, dict):
            return {name: self._gather(value, share) for name, value in values.items()}
        if not isinstance(values, Tensor) or values.dim() == 0:
            return values
        if not share.local:
            values = values[:0]
        if values.dim() > 1:
            longest = int(self.strategy.reduce("max", torch.tensor(values.shape[1], device=self.strategy.device)))
            if (missing := longest - values.shape[1]) > 0:
                padding = values.new_full((values.shape[0], missing, *values.shape[2:]), -100)
                values = torch.cat([values, padding], dim=1)
        return self.strategy.gather(values.contiguous())

    # -- checkpoints -------------------------------------------------------------------------------------

    @property
    def _is_sharded(self) -> bool:
        return any(map(is_dtensor, self.model.parameters()))

    @torch.no_grad()
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model as ``transformers`` does. All towers call it."""
        if self._is_sharded:
            state, known = self.model.state_dict(keep_vars=True), dict[int, Any]()
            for value in state.values():  # tied weights recur
                if id(value) not in known:
                    known[id(value)] = whole_leaves(value, keep=self.args.should_save)
            self._weights = {name: known[id(value)] for name, value in state.items()}
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._weights = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, self._weights if state_dict is None else state_dict)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        self.strategy.barrier()  # other towers may load it

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = self.strategy.engine
        if (
            not self.args.should_save
            and engine.attached(OptimizerSharder) is not None
            and not engine.one_tower_reads_state
        ):
            self.optimizer.state_dict()  # the chief's call is a collective
        with contextlib.ExitStack() as stack:
            if self._is_sharded:
                state = whole_leaves(self._torch_optimizer.state_dict(), keep=self.args.should_save)
                hook = self._torch_optimizer.register_state_dict_post_hook(lambda *_: state)
                stack.callback(hook.remove)
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with contextlib.ExitStack() as stack:
            if self._is_sharded:
                hook = self._torch_optimizer.register_load_state_dict_pre_hook(state_in_parts)
                stack.callback(hook.remove)
            super()._load_optimizer_and_scheduler(checkpoint)

    @property
    def _torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without the wrapper of ``accelerate``."""
        found: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", None) or self.optimizer
        return found

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves the random numbers that are equal on all towers, and those of each tower: dropout continues."""
        if self.args.should_save:
            super()._save_rng_state(output_dir)
        if self._several:
            streams = self.strategy.streams.state_dict()
            state = trees.map_leaves(lambda leaf: leaf.tolist() if isinstance(leaf, Tensor) else leaf, streams)
            states = self.strategy.communicator.all_gather_json(state)
            if self.args.should_save:
                (pathlib.Path(output_dir) / _RANDOM_STATES).write_text(json.dumps(states))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if not self._several or checkpoint is None:
            return
        path = pathlib.Path(checkpoint) / _RANDOM_STATES
        states = json.loads(path.read_text()) if path.exists() else []
        if len(states) == self.strategy.num_replicas_in_sync:
            self.strategy.streams.load_state_dict(states[self.strategy.topology.index])
        else:
            self.strategy.streams.restart(f"resumed at step {self.state.global_step}")


def _is_of(value: Any, examples: int) -> bool:
    """Returns whether a value is a tensor with an entry for each example."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == examples


class Trainer(OnTowers, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` on all towers, which start as in every other script; see :class:`OnTowers`."""


def _take_place(args: Any, strategy: Strategy) -> None:
    """Gives ``TrainingArguments`` the index and the device of this tower."""
    _ = args.device  # makes the state
    state = args.distributed_state
    state.process_index, state.local_process_index = strategy.topology.index, strategy.topology.local_index
    state.device = vars(args)["_setup_devices"] = strategy.device
    args._n_gpu = min(args.n_gpu, 1)  # no DataParallel


def _check_settings(args: Any) -> None:
    """Refuses settings that several towers do not support."""
    for name in ("deepspeed", "fsdp", "batch_eval_metrics", "auto_find_batch_size"):
        if getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}=…) is not supported on several towers: leave it out")
    if "inputs" in args.include_for_metrics:
        raise ValueError(
            "TrainingArguments(include_for_metrics=…): several towers do not support 'inputs': leave it out"
        )
