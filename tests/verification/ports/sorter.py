"""A transformer that learns to sort, with an endless sampler, in the shape of ``demo.ipynb`` of minGPT."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import mirrored

LENGTH, DIGITS = 5, 3


class SortDataset(Dataset[tuple[Tensor, Tensor]]):
    """Digits, followed by the same digits in order; only these are to be predicted."""

    def __init__(self, split: str, count: int) -> None:
        self.split, self.count = split, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        digits = torch.randint(DIGITS, (LENGTH,), generator=torch.Generator().manual_seed(2 * index))
        if self.split == "test":
            digits = (digits + 1) % DIGITS
        both = torch.cat([digits, digits.sort().values])
        x, y = both[:-1].clone(), both[1:].clone()
        y[: LENGTH - 1] = -1
        return x, y


class Sorter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(DIGITS, width), nn.Embedding(2 * LENGTH - 1, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        logits = self.head(self.layers(self.tokens(x) + self.places.weight[:length], mask))
        losses = None
        if targets is not None:
            losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-1, reduction="none").sum(1) / LENGTH
        return logits, losses

    @torch.no_grad()
    def generate(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits, _ = self(x)
            x = torch.cat([x, logits[:, -1:].argmax(-1)], dim=1)
        return x


class Trainer:
    def __init__(self, args: argparse.Namespace, strategy, model: Sorter, train_set: Dataset) -> None:
        self.args, self.strategy, self.model = args, strategy, model
        decayed = [p for name, p in model.named_parameters() if name.endswith("weight")]
        others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=args.lr
        )
        sampler = RandomSampler(train_set, replacement=True, num_samples=10_000)
        self.loader = strategy.distribute_dataset(DataLoader(train_set, args.batch_size, sampler=sampler))
        self.callbacks: dict[str, list[Callable[[Trainer], None]]] = defaultdict(list)
        self.iter_num, self.loss = 0, torch.zeros(())

    def add_callback(self, event: str, callback: Callable[[Trainer], None]) -> None:
        self.callbacks[event].append(callback)

    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        _, losses = self.model(x, y)
        loss = mirrored.compute_average_loss(losses)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.grad_norm_clip)
        self.optimizer.step()
        return loss.detach()

    def run(self) -> None:
        self.model.train()
        data = iter(self.loader)
        while self.iter_num < self.args.max_iters:
            try:
                batch = next(data)
            except StopIteration:
                data = iter(self.loader)
                batch = next(data)
            self.loss = self.strategy.run(self.train_step, args=batch)
            self.iter_num += 1
            for callback in self.callbacks["on_batch_end"]:
                callback(self)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=9)
    parser.add_argument("--max-iters", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--grad-norm-clip", type=float, default=1.0)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=3407)
    with strategy.scope():
        model = Sorter(width=16)
    trainer = Trainer(args, strategy, model, SortDataset("train", 500))

    def batch_end(trainer: Trainer) -> None:
        if trainer.iter_num % 2 == 0:
            loss = strategy.reduce("sum", trainer.loss)
            strategy.print(f"iter {trainer.iter_num}: train loss {loss.item():.5f}")

    trainer.add_callback("on_batch_end", batch_end)
    trainer.run()

    def sorted_right(x: Tensor, y: Tensor) -> Tensor:
        digits = x[:, :LENGTH]
        return (model.generate(digits, LENGTH)[:, LENGTH:] == digits.sort().values).all(1)

    model.eval()
    for split in ("train", "test"):
        loader = strategy.distribute_dataset(SortDataset(split, 31), 10)
        results = torch.cat([strategy.run(sorted_right, args=batch) for batch in loader])
        right, count = strategy.reduce("sum", (results.sum(), len(results)))
        strategy.print(f"{split} final score: {int(right)}/{int(count)} = {100 * right / count:.2f}% correct")


if __name__ == "__main__":
    main()
