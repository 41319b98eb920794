"""Contrastive learning of two views of each example, in the shape of SimCLR."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import mirrored


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Two random views of each picture: shifted, mirrored, with noise."""

    def __init__(self, pictures: Tensor) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def view(self, picture: Tensor) -> Tensor:
        down, right = torch.randint(0, 3, (2,)).tolist()
        picture = F.pad(picture, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return picture + 0.1 * torch.randn_like(picture)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.view(self.pictures[index]), self.view(self.pictures[index])


class Encoder(nn.Module):
    def __init__(self, width: int, projection: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            *(nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        )
        self.projector = nn.Sequential(nn.Linear(8 * width, 24), nn.ReLU(), nn.Linear(24, projection))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.projector(self.backbone(x)), dim=1)


def info_nce(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """The loss of each example of this tower's share, against all examples of the global batch."""
    replica = mirrored.get_replica_context()
    sizes = replica.all_gather(torch.tensor([len(first)]), 0)
    begin = int(sizes[: replica.replica_id_in_sync_group].sum())
    every_first, every_second = replica.all_gather(first, 0), replica.all_gather(second, 0)
    own = begin + torch.arange(len(first))
    itself = F.one_hot(own, len(every_first)).bool()
    losses = torch.zeros(len(first))
    for one, same, other in ((first, every_first, every_second), (second, every_second, every_first)):
        others = (one @ same.t() / temperature).masked_fill(itself, -1e9)
        logits = torch.cat([one @ other.t() / temperature, others], dim=1)
        losses = losses + F.cross_entropy(logits, own, reduction="none") / 2
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="PyTorch SimCLR")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("-b", "--batch-size", type=int, default=14)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--temperature", type=float, default=0.2)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=5)
    pictures = torch.rand(79, 3, 8, 8)
    train_loader = strategy.distribute_dataset(TwoViews(pictures), args.batch_size, shuffle=True)
    with strategy.scope(sync_batch_norm=True):
        model = Encoder(6, projection=8)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(train_loader))

    def train_step(first: Tensor, second: Tensor) -> Tensor:
        both = model(torch.cat([first, second]))
        one, two = both.chunk(2)
        loss = mirrored.compute_average_loss(info_nce(one, two, args.temperature))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    for epoch in range(args.epochs):
        total = torch.zeros(())
        for views in train_loader:
            total += strategy.run(train_step, args=views)
        total = strategy.reduce("sum", total)
        strategy.print(f"Epoch: {epoch}\tLoss: {total.item() / len(train_loader):.4f}")
    if strategy.is_chief:
        print(f"Training has finished: {sum(p.numel() for p in model.parameters())} parameters")


if __name__ == "__main__":
    main()
