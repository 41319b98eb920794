"""Lightning: ``Trainer(strategy=MirroredLightningStrategy())`` on all towers, with the weights of one device.

.. code-block:: python

    import lightning as L
    from mirrored.lightning import MirroredLightningStrategy

    trainer = L.Trainer(strategy=MirroredLightningStrategy(), max_epochs=5)
    trainer.fit(Model(), DataLoader(examples, batch_size=64, shuffle=True))  # the global batch size

``docs/how-to/lightning.md`` says what is the same as on one device and what is not.

[Note: a step of Lightning is two runs] Lightning calls the module's step, then backward, then the optimizer, and hooks
of callbacks between them. The step and backward are a ``run`` each; hooks and the optimizer draw the random numbers
that are equal on all towers. In manual optimization the step calls backward itself, within its own run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mirrored.context import current_replica
from mirrored.data.dataset import DistributedDataset
from mirrored.operations import operation_name
from mirrored.strategy.base import Strategy
from mirrored.strategy.workers import MultiWorkerMirroredStrategy
from mirrored.verification.loss_graph import terms_of
from towers.collectives.agreement import announce

try:
    if "pytorch_lightning" in sys.modules:  # the same library by its older name, with classes of its own
        from pytorch_lightning.strategies import ParallelStrategy
        from pytorch_lightning.utilities import rank_zero_only
    else:
        from lightning.pytorch.strategies import ParallelStrategy
        from lightning.pytorch.utilities import rank_zero_only
except ModuleNotFoundError as error:
    raise ImportError("mirrored.lightning needs Lightning: pip install 'lightning>=2.6.4,<3'") from error


class MirroredLightningStrategy(ParallelStrategy):  # type: ignore[misc]
    """Trains a ``LightningModule`` on all towers, which are started as every other script's.

    A ``DataLoader``'s batch size is the global one: each tower gets its share of the batch. The loss of a share weighs
    as much as its examples, so a step that returns a mean over examples has the gradient of the global batch.

    Args:
        towers: the strategy that trains; default ``MultiWorkerMirroredStrategy(**options)``.
        mean_loss: whether ``training_step`` returns a mean over the examples of its batch. False: what it returns is
            this tower's share of the loss already, as :func:`mirrored.compute_average_loss` returns it.
        options: those of :class:`mirrored.MultiWorkerMirroredStrategy`, such as ``devices``, ``seed``,
            ``shard_optimizer``.

    Attributes:
        towers: the strategy that trains.

    Raises:
        TypeError: both ``towers`` and ``options``.
        ValueError: ``virtual_towers``, whose parts Lightning's steps know nothing of.
    """

    strategy_name = "mirrored"

    def __init__(self, towers: Strategy | None = None, *, mean_loss: bool = True, **options: Any) -> None:
        if towers is not None and options:
            raise TypeError(f"give {', '.join(options)} to the strategy that trains, or leave towers out")
        self.towers = MultiWorkerMirroredStrategy(**options) if towers is None else towers
        if self.towers.virtual_towers is not None:
            raise ValueError("virtual_towers needs strategy.backward, which Lightning's Trainer does not call")
        super().__init__(parallel_devices=[self.towers.device])
        rank_zero_only.rank = self.global_rank
        self._mean_loss = mean_loss
        self._looked_at_loss = False
        self._weights = {1.0}

    # -- the place of this tower -------------------------------------------------------------------------

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
        """Whether ``self.log(…, sync_dist=True)`` has anything to do."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # -- model and data ----------------------------------------------------------------------------------

    def connect(self, model: Any) -> None:
        super().connect(model)
        # Lightning would give each loader a DistributedSampler, and only then show it to process_dataloader.
        model.trainer._accelerator_connector.use_distributed_sampler = False

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        self.towers.mirror(model, sync_batch_norm=self._layer_sync is not None)
        self.towers.engine.mirror_pending()  # the first step of an optimizer begins before the first run
        return model

    def process_dataloader(self, dataloader: Any) -> Any:
        """The distributed dataset that a ``DataLoader`` becomes, which follows the epochs of the ``Trainer``.

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
            health.train()  # though backward comes in a run of its own
            return step(*args, **kwargs)

        health.count(self.lightning_module.trainer.global_step)
        return self._step(training_step, args, kwargs)

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
            results.batch_size = shares[0].local  # what self.log weighs by; Lightning would count a stand-in
        return self.towers.run(step, args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Average the gradients of all towers' losses, each of which weighs as much as its examples.

        Raises:
            ValueError: the loss is a share of the global mean already, or its weight is not known.
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
        """The weight of a mean over this tower's share, so that the mean over towers is one over the global batch.

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

    # -- collectives -------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        self.towers.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Tower ``src``'s value: texts, numbers, None, paths (which become texts), lists and dicts of these.

        Raises:
            TypeError: a value of another kind.
        """
        if self.world_size == 1:
            return obj
        text = json.dumps(obj, default=os.fspath) if self.global_rank == src else ""
        return json.loads(announce(self.towers.communicator, "broadcast of a Trainer", text)[src])

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over all towers. A mean within a step is one over the examples of the global batch.

        Raises:
            ValueError: ``group`` is not that of all towers.
        """
        _check_group(group)
        operation = operation_name(reduce_op)
        if not isinstance(tensor, Tensor) or self.world_size == 1:
            return tensor
        if operation == "mean" and current_replica() is not None and (weight := self._weight()) != 1:
            tensor = tensor * weight if weight else torch.zeros_like(tensor)  # also of NaN
        return self.towers.reduce(operation, tensor)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all towers, stacked: shape ``(towers, *tensor.shape)``; at one tower ``tensor`` itself."""
        _check_group(group)
        if self.world_size == 1:
            return tensor
        replica = current_replica() if sync_grads else None
        gather: Callable[[Tensor], Tensor] = self.towers.gather if replica is None else replica.all_gather
        return gather(tensor.unsqueeze(0))

    def teardown(self) -> None:
        """As of one device: the variables of the launcher stay. So does optimizers' state, which may be sharded."""
        optimizers = self.optimizers
        self._optimizers: list[Any] = []
        super(ParallelStrategy, self).teardown()
        self._optimizers = optimizers


class _Epochs:
    """In the place of a sampler: the ``Trainer`` tells it which epoch begins.

    A distributed dataset counts its epochs itself; a new one, in a run that was resumed at the end of an epoch, begins
    at the first.
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
