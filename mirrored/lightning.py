"""Lightning: ``Trainer(strategy=MirroredLightningStrategy())`` on all towers, with the weights of one device.

.. code-block:: python

    import lightning as L
    from mirrored.lightning import MirroredLightningStrategy

    trainer = L.Trainer(strategy=MirroredLightningStrategy(), max_epochs=5)
    trainer.fit(Model(), DataLoader(examples, batch_size=64, shuffle=True))  # the global batch size

``docs/how-to/lightning.md`` lists the differences from one device.

[Note: a step of Lightning is two runs] Lightning calls the module's step, then backward, then the optimizer, and hooks
of callbacks between them. The step and backward are one ``run`` each. Hooks and the optimizer draw the random numbers
that are equal on all towers. In manual optimization, the step calls backward itself, within its own run.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mirrored.context import current_replica, operation_name
from mirrored.data.dataset import DistributedDataset
from mirrored.strategy.base import Strategy
from mirrored.strategy.kinds import MultiWorkerMirroredStrategy
from mirrored.verification.loss_graph import terms_of
from towers.collectives.agreement import announce
from towers.system import tree as trees
from towers.system.tensors import state_in_parts, whole_leaves

try:
    if "pytorch_lightning" in sys.modules:  # the same library under its older name, with separate classes
        from pytorch_lightning.strategies import ParallelStrategy
        from pytorch_lightning.utilities import rank_zero_only
    else:
        from lightning.pytorch.strategies import ParallelStrategy
        from lightning.pytorch.utilities import rank_zero_only
except ModuleNotFoundError as error:
    raise ImportError("mirrored.lightning needs Lightning: pip install 'lightning>=2.6.4,<3'") from error


class MirroredLightningStrategy(ParallelStrategy):  # type: ignore[misc]
    """Trains a ``LightningModule`` on all towers, which start as in every other script.

    A ``DataLoader``'s batch size is the global one: each tower receives its share of the batch. The loss of a share is
    weighted by its number of examples. A step that returns a mean over examples therefore has the gradient of the
    global batch.

    Args:
        towers: the strategy that trains; default ``MultiWorkerMirroredStrategy(**options)``.
        mean_loss: whether ``training_step`` returns a mean over the examples of its batch. False: it returns this
            tower's share of the loss, as :func:`mirrored.compute_average_loss` does.
        options: options of :class:`mirrored.MultiWorkerMirroredStrategy`, such as ``devices``, ``seed``,
            ``shard_optimizer``.

    Attributes:
        towers: the strategy that trains.

    Raises:
        TypeError: both ``towers`` and ``options``.
        ValueError: ``virtual_towers``, because Lightning's steps do not support their parts; or ``synchronize``,
            because Lightning steps its optimizers outside ``run``.
    """

    strategy_name = "mirrored"

    def __init__(self, towers: Strategy | None = None, *, mean_loss: bool = True, **options: Any) -> None:
        if towers is not None and options:
            raise TypeError(f"give {', '.join(options)} to the strategy that trains, or leave towers out")
        self.towers = MultiWorkerMirroredStrategy(**options) if towers is None else towers
        if self.towers.virtual_towers is not None:
            raise ValueError("virtual_towers needs strategy.backward, which Lightning's Trainer does not call")
        if self.towers.engine.local is not None:
            raise ValueError(
                "synchronize= averages parameters after the optimizer's step inside strategy.run, but Lightning's "
                "Trainer steps its optimizers outside: omit synchronize, or write a custom training loop"
            )
        super().__init__(parallel_devices=[self.towers.device])
        rank_zero_only.rank = self.global_rank
        self._mean_loss = mean_loss
        self._looked_at_loss = False
        self._weights = {1.0}
        self._stepped = False  # whether an optimizer has stepped since the end of the last step

    # -- the position of this tower ----------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        return self.towers.device

    @property
    def global_rank(self) -> int:
        return self.towers.topology.index

    @property
    def local_rank(self) -> int:
        return self.towers.topology.local_index

    @property
    def node_rank(self) -> int:
        return self.towers.topology.worker

    @property
    def world_size(self) -> int:
        return self.towers.num_replicas_in_sync

    @property
    def is_distributed(self) -> bool:
        """Whether ``self.log(…, sync_dist=True)`` has an effect."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- model and data ----------------------------------------------------------------------------------

    def connect(self, model: Any) -> None:
        super().connect(model)
        # Otherwise, Lightning adds a DistributedSampler to each loader before it calls process_dataloader.
        model.trainer._accelerator_connector.use_distributed_sampler = False

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.towers.mirror(model, sync_batch_norm=self._layer_sync is not None)
        self.towers.engine.mirror_pending()  # the first step of an optimizer starts before the first run
        return model

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns the distributed dataset of a ``DataLoader``, which follows the epochs of the ``Trainer``.

        Raises:
            TypeError: with several towers, data of another kind.
        """
        if isinstance(dataloader, DataLoader):
            dataloader = self.towers.distribute_dataset(dataloader, stand_in=True)
        elif not isinstance(dataloader, DistributedDataset):
            if self.world_size == 1:
                return dataloader
            raise TypeError(
                f"a {type(dataloader).__name__} cannot be split among {self.world_size} towers: give the Trainer "
                "a DataLoader, or the result of strategy.towers.distribute_dataset or "
                "distribute_datasets_from_function"
            )
        dataloader.sampler = _Epochs(dataloader)  # type: ignore[attr-defined]
        return dataloader

    # -- steps -------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step, health = super().training_step, self.towers.health

        def training_step(*args: Any, **kwargs: Any) -> Any:
            health.train()  # although backward is in its own, later run
            return step(*args, **kwargs)

        health.count(self.lightning_module.trainer.global_step)
        result = self._step(training_step, args, kwargs)
        self._end_step()  # in manual optimization; otherwise, the optimizer has not stepped yet
        return result

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        self._stepped = True
        if current_replica() is None:
            self._end_step()
        return result

    def _end_step(self) -> None:
        stepped, self._stepped = self._stepped, False
        if stepped:
            self.towers.events.end_step()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(super().predict_step, args, kwargs)

    def _step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shares = [share for share in self.towers.known_shares.at_hand((args, kwargs)) if share.total]
        self._weights = {self.world_size * share.local / share.total for share in shares} or {1.0}
        if shares and (results := self.lightning_module.trainer._results) is not None:
            results.batch_size = shares[0].local  # the weight of self.log; Lightning would count a stand-in
        with _logging_nothing(self.lightning_module) if shares and not shares[0].local else nullcontext():
            return self.towers.run(step, args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Averages the gradients of all towers' losses, weighted by their numbers of examples.

        Raises:
            ValueError: the loss is already a share of the global mean, or its weight is unknown.
        """
        if self._mean_loss and self.world_size > 1:
            if not self._looked_at_loss and any(term.share for term in terms_of(closure_loss)):
                raise ValueError(
                    "the loss is the result of compute_average_loss, so it is this tower's share of the global "
                    "mean already: return a mean over the batch's examples, or pass mean_loss=False to "
                    "MirroredLightningStrategy"
                )
            self._looked_at_loss = True
            if (weight := self._weight()) != 1:
                closure_loss = closure_loss * weight
        call = super().backward
        if current_replica() is not None:  # manual optimization
            return call(closure_loss, optimizer, *args, **kwargs)
        return self.towers.run(call, (closure_loss, optimizer, *args), kwargs)

    def _weight(self) -> float:
        """Returns the weight with which means over the towers' shares average to the mean over the global batch.

        Raises:
            ValueError: the step has several batches, of which this tower has different fractions.
        """
        if len(self._weights) > 1:
            raise ValueError(
                f"this step has batches of several loaders, of which tower {self.global_rank} has different fractions, "
                "so the weight of its mean is not known: take batch sizes that the number of towers divides and "
                "drop_last=True, or compute_average_loss(…, batch=…) and MirroredLightningStrategy(mean_loss=False)"
            )
        return next(iter(self._weights))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.towers.no_sync():
            yield

    # -- checkpoints -------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint of Lightning, with every tower's random numbers: dropout continues where it was."""
        streams = self.towers.streams.state_dict()
        state = trees.map_leaves(lambda leaf: leaf.tolist() if isinstance(leaf, Tensor) else leaf, streams)
        checkpoint[_RANDOM_STATES] = self.towers.communicator.all_gather_json(state)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = whole_leaves(super().lightning_module_state_dict(), keep=self.is_global_zero)
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        state: dict[str, Any] = whole_leaves(super().optimizer_state(optimizer), keep=self.is_global_zero)
        return state

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        states = [
            state_in_parts(one, state)
            for state, one in zip(checkpoint["optimizer_states"], self.optimizers, strict=True)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
        states = checkpoint.get(_RANDOM_STATES, [])
        if len(states) == self.world_size:
            self.towers.streams.load_state_dict(states[self.global_rank])
        elif states:
            self.towers.streams.restart(f"resumed at step {checkpoint['global_step']}")

    # -- collectives -------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        self.towers.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns tower ``src``'s value: strings, numbers, None, paths (as strings), lists and dicts of these.

        Raises:
            TypeError: a value of another kind.
        """
        if self.world_size == 1:
            return obj
        text = json.dumps(obj, default=os.fspath) if self.global_rank == src else ""
        return json.loads(announce(self.towers.communicator, "broadcast of a Trainer", text)[src])

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns a tensor reduced over all towers. Within a step, a mean is over the examples of the global batch.

        Raises:
            ValueError: ``group`` is not that of all towers.
        """
        _check_group(group)
        operation = operation_name(reduce_op)
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        if operation == "mean" and current_replica() is not None and (weight := self._weight()) != 1:
            tensor = tensor * weight if weight else torch.zeros_like(tensor)  # zero even if NaN
        return self.towers.reduce(operation, tensor)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns all towers' tensors, stacked: shape ``(towers, *tensor.shape)``. On one tower: ``tensor`` itself."""
        _check_group(group)
        if self.world_size == 1:
            return tensor
        replica = current_replica() if sync_grads else None
        gather: Callable[[Tensor], Tensor] = self.towers.gather if replica is None else replica.all_gather
        return gather(tensor.unsqueeze(0))

    def teardown(self) -> None:
        """Cleans up as for one device. The launcher's variables stay, and so does the (sharded) state of optimizers."""
        optimizers = self.optimizers
        self._optimizers: list[Any] = []
        super(ParallelStrategy, self).teardown()
        self._optimizers = optimizers


_RANDOM_STATES = "mirrored_random_states"

_NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}
"""Values that do not change a reduction."""


@contextmanager
def _logging_nothing(module: Any) -> Iterator[None]:
    """Makes ``log`` of a module count nothing, for a step of a tower without examples, which computes on a stand-in."""
    original, signature = module.log, inspect.signature(module.log)

    def log(*args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs)
        given = arguments.arguments
        reduce_fx = given.get("reduce_fx", "mean")
        name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        if isinstance(value := given["value"], (int, float, Tensor)):
            given["batch_size"] = 0
            if (neutral := _NEUTRAL.get(name.removeprefix("a"))) is not None:
                given["value"] = neutral
                if isinstance(value, Tensor) and value.is_floating_point():
                    given["value"] = torch.full_like(value, neutral)
        original(*arguments.args, **arguments.kwargs)

    module.log = log
    try:
        yield
    finally:
        del module.log


class _Epochs:
    """Replaces a sampler, so that the ``Trainer`` can set the epoch of a distributed dataset.

    A distributed dataset counts its epochs itself. A new one, in a run that resumes at the end of an epoch, starts at
    the first epoch.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    def set_epoch(self, epoch: int) -> None:
        state = self._dataset.state_dict()
        if state["epoch"] < epoch:
            self._dataset.load_state_dict({"seed": state["seed"], "epoch": epoch, "step": 0})


def _check_group(group: Any) -> None:
    if group is not None and group is not torch.distributed.group.WORLD:
        raise ValueError("towers reduce and gather over all of them: leave the group out")
