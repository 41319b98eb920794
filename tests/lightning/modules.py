"""Modules of Lightning, their data, and what a Trainer makes of them in a tower."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

import mirrored
from mirrored.lightning import MirroredLightningStrategy
from tests.support.jobs import seeded, text_of

EXAMPLES, BATCH = 22, 4
"""The last batch has 2 examples, for 3 towers."""


class Classifier(L.LightningModule):
    """With a loss that is a mean over examples, a metric and a learning rate that falls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = seeded(lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))
        self.accuracy = MulticlassAccuracy(3)
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs.to(self.dtype))

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))

    def validation_step(self, batch: Any) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)

    def predict_step(self, batch: Any) -> torch.Tensor:
        return mirrored.drop_stand_in(self(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Dropping(Classifier):
    """Draws random numbers in its steps, which differ between towers."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(inputs, 0.3, self.training))


class Manual(Classifier):
    """Makes its optimizer's steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        optimizer.step()


class Shares(Classifier):
    """Its loss weighs examples, so it is a share of the global mean by our own function."""

    def training_step(self, batch: Any) -> torch.Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        self.log("loss", losses.mean(), on_step=True, on_epoch=True, sync_dist=True)
        return mirrored.compute_average_loss(losses, sample_weight=1.0 + batch[1], denominator="weights")


class Stream(IterableDataset):
    """Data without a length, of which a Trainer fetches a batch in advance."""

    def __iter__(self) -> Iterator[Any]:
        return iter(examples())


def examples() -> list[tuple[torch.Tensor, int]]:
    inputs = torch.randn(EXAMPLES, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [(row, index % 3) for index, row in enumerate(inputs)]


def loaders(data: Any = None) -> tuple[DataLoader[Any], DataLoader[Any]]:
    train = data if data is not None else examples()
    shuffle = None if isinstance(train, IterableDataset) else True
    return DataLoader(train, BATCH, shuffle=shuffle), DataLoader(examples()[:13], 6)


def trainer(strategy: MirroredLightningStrategy, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"precision": "64-true", "max_epochs": 2, "enable_checkpointing": False, "sync_batchnorm": True}
    warnings.filterwarnings("ignore", module="lightning")
    return L.Trainer(strategy=strategy, **{**quiet, **plain, **options})


def fitted(towers: mirrored.Strategy, kind: type[Classifier] = Classifier, data: Any = None, **options: Any) -> Any:
    """The weights, the loss of each step and the last metrics of a fit."""
    ckpt_path, mean_loss = options.pop("ckpt_path", None), options.pop("mean_loss", True)
    fit, model = trainer(MirroredLightningStrategy(towers, mean_loss=mean_loss), **options), kind()
    fit.fit(model, *loaders(data), ckpt_path=ckpt_path)
    metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
    return [weight.detach().clone() for weight in model.layers.state_dict().values()], model.losses, metrics


def all_kinds(options: dict[str, Any]) -> dict[str, Any]:
    """What each way of fitting leaves, on a tower of one strategy."""
    towers = mirrored.MultiWorkerMirroredStrategy(seed=0, **options)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "accumulating": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
        "manual": {"kind": Manual},
        "shares": {"kind": Shares, "mean_loss": False},
        "stream": {"data": Stream()},
    }
    return {name: fitted(towers, **kind) for name, kind in kinds.items()}


def interrupted(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a fit leaves that was not interrupted, and those that went on from a checkpoint."""

    def fitted_anew(**settings: Any) -> Any:
        # Lightning restores a model before it makes it one of float64.
        towers = mirrored.MultiWorkerMirroredStrategy(seed=0, **options)
        return fitted(towers, Dropping, precision="32-true", **settings)

    results = {"whole": fitted_anew(max_epochs=3)}
    for name, first in {"after an epoch": {"max_epochs": 1}, "within an epoch": {"max_steps": 9}}.items():
        place = pathlib.Path(folder, name)
        saving = ModelCheckpoint(place, save_last=True, every_n_train_steps=first.get("max_steps"))
        fitted_anew(enable_checkpointing=True, callbacks=[saving], **first)
        results[name] = fitted_anew(ckpt_path=str(place / "last.ckpt"), max_epochs=3)
    return results


def together(folder: str) -> dict[str, Any]:
    """What towers say, gather and refuse."""
    strategy = MirroredLightningStrategy(seed=0)
    fit, model = trainer(strategy, default_root_dir=folder), Classifier()
    own = torch.tensor([float(strategy.global_rank)], requires_grad=True)
    results: dict[str, Any] = {
        "place": (strategy.global_rank, strategy.local_rank, strategy.node_rank, fit.world_size, fit.is_global_zero),
        "broadcast": strategy.broadcast([pathlib.Path(f"of {strategy.global_rank}"), None, 1.5], src=1),
        "reduced": [float(strategy.reduce(own.detach(), reduce_op=op)) for op in ("mean", ReduceOp.MAX)],
        "gathered": strategy.all_gather(own),
        "decisions": [strategy.reduce_boolean_decision(strategy.is_global_zero, all=every) for every in (True, False)],
    }
    results["validated"] = fit.validate(model, loaders()[1], verbose=False)
    results["predicted"] = torch.cat(fit.predict(model, loaders()[1]))
    results["refused"] = [
        text_of(TypeError, strategy.process_dataloader, [torch.zeros(4, 5)]),
        text_of(TypeError, strategy.broadcast, object(), src=strategy.global_rank),
        text_of(ValueError, strategy.reduce, own, group=1),
        text_of(TypeError, MirroredLightningStrategy, strategy.towers, seed=1),
        text_of(ValueError, fitted, strategy.towers, Shares),
        text_of(ValueError, MirroredLightningStrategy, virtual_towers=4),
        text_of(ValueError, MirroredLightningStrategy, synchronize=mirrored.LocalSGD(2)),
    ]
    return results


class Logging(L.LightningModule):
    """Logs numbers of a batch in every way of reducing them, in training and in validation."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.layer = seeded(lambda: nn.Linear(1, 1)).double()

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        self.log_numbers(batch[0], "")
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log_numbers(batch[0], "val_")

    def log_numbers(self, x: torch.Tensor, prefix: str) -> None:
        ways = {"sum": x.sum(), "max": x.max(), "min": x.min(), "mean": x.mean()}
        how = {"sync_dist": True, "on_step": True, "on_epoch": True}
        for name, value in ways.items():
            self.log(prefix + name, value, reduce_fx=name, batch_size=len(x), **how)
        self.log_dict({f"{prefix}total": float(x.sum())}, reduce_fx=torch.sum, **how)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def logged(automatic: bool) -> dict[str, float]:
    """What an epoch of five examples, from 1 to 5, in batches of 4 logs."""
    strategy = MirroredLightningStrategy(seed=0)
    data = DataLoader([(torch.tensor([float(i)]).double(),) for i in range(1, 6)], BATCH)
    model, plain = Logging(automatic), {"enable_checkpointing": False, "enable_model_summary": False}
    trainer = L.Trainer(strategy=strategy, max_epochs=1, enable_progress_bar=False, logger=False, **plain)
    trainer.fit(model, data, data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Sharded(Classifier):
    """Its layers are sharded over the towers, if there are several."""

    def configure_model(self) -> None:
        self.trainer.strategy.towers.shard(self.layers, [nn.Linear])


def sharded(folder: str, kind: type[Classifier]) -> dict[str, Any]:
    """Fits a model at once, and in two parts, of which the second resumes in the middle of an epoch."""
    left: dict[str, Any] = {}
    for name, options in (
        ("whole", {"gradient_clip_val": 0.1}),
        ("first part", {"max_steps": 4, "gradient_clip_val": 0.1}),
        ("rest", {"ckpt_path": f"{folder}/last.ckpt", "gradient_clip_val": 0.1}),
    ):
        towers = mirrored.MultiWorkerMirroredStrategy(seed=0)
        callbacks = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=4)] if name == "first part" else []
        (weights, losses, metrics) = fitted(
            towers, kind, **options, callbacks=callbacks, enable_checkpointing=bool(callbacks)
        )
        whole = [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights]
        left[name] = whole, losses, metrics
    return left
