"""Is training the same to the last bit on any number of towers? Trains real models and compares SHA-256 sums.

Every case trains 50 steps on scikit-learn's 1,797 digits, shifted at random, in global batches of 64 (the last one of
an epoch has 5), cut into 8 virtual towers; on 1, 2, 4 and 8 real towers, through shared memory and through Gloo, and
once more on 4, then 1, then 2 towers, each going on where the last one ended. One sum covers parameters, buffers, the
optimizer's state, a moving average of the parameters and the loss of every step.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mirrored
from towers.system import tree as trees

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

VIRTUAL_TOWERS, GLOBAL_BATCH, STEPS, SEED = 8, 64, 50, 7
MODELS = ("cnn", "lstm", "transformer")
OPTIMIZERS = ("sgd", "adam", "adamw")


class Convolutions(nn.Sequential):
    """A convolutional network with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(32 * 16, 10),
        )


class Recurrent(nn.Module):
    """Reads an image row by row, in two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(images.squeeze(1))[0][:, -1])
        return logits


class Transformer(nn.Module):
    """Reads an image as a sequence of rows; with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(torch.randn(8, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(images.squeeze(1)) + self.place).mean(1))
        return logits


def make_model(name: str) -> nn.Module:
    return {"cnn": Convolutions, "lstm": Recurrent, "transformer": Transformer}[name]()


class Run:
    """A training run that can be stopped after any step and continued by another number of towers."""

    def __init__(self, strategy: mirrored.Strategy, model: str, optimizer: str) -> None:
        from digits import Digits, load_digits

        train, held_out = load_digits()
        images, labels = torch.cat([train.images, held_out.images]), torch.cat([train.labels, held_out.labels])
        self.strategy = strategy
        self.data = strategy.distribute_dataset(Digits(images, labels, augment=True), GLOBAL_BATCH, shuffle=True)
        torch.manual_seed(SEED)
        with strategy.scope():
            self.model = make_model(model)
            kinds: dict[str, Any] = {
                "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
                "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
                "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
            }
            self.optimizer = kinds[optimizer](self.model.parameters())
        self.complete = optimizer == "adamw"  # with all that usually goes with it
        self.schedule = (
            torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=STEPS) if self.complete else None
        )
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if self.complete else None
        self.losses: list[float] = []

    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.strategy.backward(lambda x, y: F.cross_entropy(self.model(x), y, reduction="none"), images, labels)
        if self.schedule is not None and self.average is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.average.update_parameters(self.model)
        else:
            self.optimizer.step()
        return loss

    def train(self, until: int) -> None:
        while len(self.losses) < until:
            for batch in itertools.islice(self.data, until - len(self.losses)):
                self.losses.append(float(self.strategy.run(self.train_step, args=batch)))

    def parts(self) -> dict[str, Any]:
        """What a checkpoint would hold."""
        extra = {"schedule": self.schedule, "average": self.average} if self.complete else {}
        objects = {"model": self.model, "optimizer": self.optimizer, "data": self.data, "strategy": self.strategy}
        return {name: each.state_dict() for name, each in (objects | extra).items()} | {"losses": self.losses}

    def load(self, parts: dict[str, Any]) -> None:
        for name in parts.keys() - {"losses"}:
            getattr(self, name).load_state_dict(parts[name])
        self.losses = list(parts["losses"])

    def digest(self) -> str:
        """SHA-256 over model, optimizer, moving average and losses."""
        parts = self.parts()
        sha = hashlib.sha256()
        for name in ("model", "optimizer", "average", "losses"):
            for leaf in trees.leaves(parts.get(name, ())):
                sha.update(leaf.contiguous().numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode())
        return sha.hexdigest()


def train(
    model: str, optimizer: str, implementation: str, first: int, until: int, parts: dict[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """Train in a tower; returns the digest after step ``until``, and what the next run resumes from."""
    communication = mirrored.CommunicationOptions(implementation=implementation)
    strategy = mirrored.MirroredStrategy(communication=communication, virtual_towers=VIRTUAL_TOWERS, seed=SEED)
    run = Run(strategy, model, optimizer)
    if parts is not None:
        run.load(parts)
    assert len(run.losses) == first
    run.train(until)
    return run.digest(), run.parts()


def digest(model: str, optimizer: str, implementation: str, towers: Iterable[int], stops: Iterable[int]) -> str:
    """The digest after a run on one number of towers after the other.

    Args:
        towers: how many, in turn.
        stops: the step after which each of them stops.

    Raises:
        AssertionError: the towers of one run have different digests.
    """
    parts, first, sha = None, 0, ""
    for count, until in zip(towers, stops, strict=True):
        results = mirrored.launch(train, (model, optimizer, implementation, first, until, parts), towers=count)
        assert len({one for one, _ in results}) == 1, f"{count} towers ended with different numbers"
        (sha, parts), first = results[0], until
    return sha


def cases(
    counts: Iterable[int], implementations: Iterable[str]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Implementation, towers in turn, and the steps after which they stop."""
    for implementation in implementations:
        for count in counts:
            yield implementation, (count,), (STEPS,)
        yield implementation, (4, 1, 2), (20, 35, STEPS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--towers", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--implementations", nargs="+", default=["shared_memory", "gloo"])
    arguments = parser.parse_args()
    started, different = time.monotonic(), 0
    for model, optimizer in itertools.product(arguments.models, arguments.optimizers):
        runs: dict[str, list[str]] = {}
        for implementation, towers, stops in cases(arguments.towers, arguments.implementations):
            name = f"{' then '.join(map(str, towers))} ({implementation})"
            runs.setdefault(digest(model, optimizer, implementation, towers, stops), []).append(name)
        different += len(runs) > 1
        for sha, names in runs.items():
            print(f"{model:12} {optimizer:6} {sha[:16]}  {', '.join(names)}", flush=True)
    print(f"{'NOT THE SAME' if different else 'the same bits everywhere'}, {time.monotonic() - started:.0f} s")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
