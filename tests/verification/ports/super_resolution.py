"""Enlarged pictures by a sub-pixel convolution, in the shape of ``super_resolution`` of pytorch/examples."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mirrored


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pictures of one channel, each with a smaller copy of itself."""

    def __init__(self, count: int, size: int, factor: int) -> None:
        coarse = torch.rand(count, 1, 4, 4)
        self.pictures, self.factor = F.interpolate(coarse, size=size, mode="bilinear"), factor

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        target = self.pictures[index]
        return F.avg_pool2d(target, self.factor), target


class Net(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(8, factor**2, 3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(factor)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.pixel_shuffle(self.conv3(x))


def collate(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*examples, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def main() -> None:
    parser = argparse.ArgumentParser(description="Super resolution")
    parser.add_argument("--upscale-factor", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--test-batch-size", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=123)
    strategy.print("===> Loading datasets")
    train_set = Pictures(45, 16, args.upscale_factor)
    test_set = Pictures(17, 16, args.upscale_factor)
    training = strategy.distribute_dataset(DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=collate))
    testing = strategy.distribute_dataset(DataLoader(test_set, args.test_batch_size))

    strategy.print("===> Building model")
    model = Net(args.upscale_factor)
    strategy.mirror(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    def train_step(inputs: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        errors = F.mse_loss(model(inputs), target, reduction="none").mean((1, 2, 3))
        loss = mirrored.compute_average_loss(errors)
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(inputs: Tensor, target: Tensor) -> Tensor:
        mse = F.mse_loss(model(inputs), target, reduction="none").mean((1, 2, 3))
        return (10 * torch.log10(1 / mse)).sum()

    for epoch in range(1, args.epochs + 1):
        epoch_loss = 0.0
        for index, batch in enumerate(training, 1):
            loss = float(strategy.reduce("sum", strategy.run(train_step, args=batch)))
            epoch_loss += loss
            strategy.print(f"===> Epoch[{epoch}]({index}/{len(training)}): Loss: {loss:.4f}")
        strategy.print(f"===> Epoch {epoch} Complete: Avg. Loss: {epoch_loss / len(training):.4f}")
        psnr = sum(strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in testing)
        strategy.print(f"===> Avg. PSNR: {float(psnr) / len(test_set):.4f} dB")


if __name__ == "__main__":
    main()
