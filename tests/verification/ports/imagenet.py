"""A residual network with validation and the best checkpoint, in the shape of ``imagenet`` of pytorch/examples."""

from __future__ import annotations

import argparse
import pathlib
import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(BasicBlock(3, 8, 1), BasicBlock(8, 16, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(self.layers(x)).flatten(1))


class AverageMeter:
    """The mean of what all towers have added."""

    def __init__(self, strategy) -> None:
        self.strategy, self.total, self.count = strategy, torch.zeros(()), 0

    def update(self, total: Tensor, count: int) -> None:
        self.total = self.total + total
        self.count += count

    def average(self) -> float:
        total, count = self.strategy.reduce("sum", (self.total, self.count))
        return float(total) / int(count)


def hits(output: Tensor, target: Tensor, k: int) -> Tensor:
    """The number of examples whose class is among the k best."""
    return (output.topk(k, dim=1).indices == target[:, None]).any(dim=1).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description="ImageNet training")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("-b", "--batch-size", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=0)
    train_set = TensorDataset(torch.randn(41, 3, 8, 8), torch.randint(0, 5, (41,)))
    val_set = TensorDataset(torch.randn(23, 3, 8, 8), torch.randint(0, 5, (23,)))
    train_loader = strategy.distribute_dataset(train_set, args.batch_size, shuffle=True)
    val_loader = strategy.distribute_dataset(val_set, args.batch_size)

    with strategy.scope(sync_batch_norm=True):
        model = ResNet(classes=5)
    criterion = nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)

    def train_step(images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = model(images)
        losses = criterion(output, target)
        loss = mirrored.compute_average_loss(losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return losses.detach().sum(), hits(output, target, 1)

    @torch.no_grad()
    def val_step(images: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output = model(images)
        return criterion(output, target).sum(), hits(output, target, 1), hits(output, target, 3)

    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        losses, top1 = AverageMeter(strategy), AverageMeter(strategy)
        for images, target in train_loader:
            loss, right = strategy.run(train_step, args=(images, target))
            losses.update(loss, len(images))
            top1.update(right, len(images))
        strategy.print(f"Epoch [{epoch}] Loss {losses.average():.4e} Acc@1 {100 * top1.average():6.2f}")

        model.eval()
        losses, top1, top3 = AverageMeter(strategy), AverageMeter(strategy), AverageMeter(strategy)
        for images, target in val_loader:
            loss, right, near = strategy.run(val_step, args=(images, target))
            losses.update(loss, len(images))
            top1.update(right, len(images))
            top3.update(near, len(images))
        val_loss, accuracy = losses.average(), top1.average()
        strategy.print(f" * Loss {val_loss:.4f} Acc@1 {100 * accuracy:.3f} Acc@3 {100 * top3.average():.3f}")
        scheduler.step(val_loss)
        if accuracy > best:
            best = accuracy
            if strategy.is_chief:
                state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best}
                torch.save(state, pathlib.Path(tempfile.gettempdir()) / "model_best.pth.tar")


if __name__ == "__main__":
    main()
