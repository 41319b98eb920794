"""Segmentation with cross entropy and the Dice coefficient, in the shape of Pytorch-UNet."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import mirrored


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            *(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)),
            *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)),
        )


class UNet(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.inc, self.down = DoubleConv(channels, 6), DoubleConv(6, 12)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.conv, self.outc = DoubleConv(12, 6), nn.Conv2d(6, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down(F.max_pool2d(x1, 2))
        return self.outc(self.conv(torch.cat([x1, self.up(x2)], dim=1)))


def dice_loss(probabilities: Tensor, target: Tensor, epsilon: float = 1e-6) -> Tensor:
    """One minus the Dice coefficient of all pictures of the global batch, averaged over the classes."""
    overlap = (probabilities * target).sum((0, 2, 3))
    size = probabilities.sum((0, 2, 3)) + target.sum((0, 2, 3))
    overlap, size = mirrored.get_replica_context().all_reduce("sum", (overlap, size))
    return 1 - ((2 * overlap + epsilon) / (size + epsilon)).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the UNet on images and target masks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--classes", type=int, default=3)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=0)
    masks = F.interpolate(torch.randn(32, args.classes, 4, 4), size=8, mode="bilinear").argmax(1)
    images = F.one_hot(masks, args.classes).permute(0, 3, 1, 2) + 0.5 * torch.randn(32, args.classes, 8, 8)
    train_set, val_set = random_split(TensorDataset(images, masks), [19, 13])
    train_loader = strategy.distribute_dataset(train_set, args.batch_size, shuffle=True)
    val_loader = strategy.distribute_dataset(val_set, args.batch_size)
    with strategy.scope(sync_batch_norm=True):
        model = UNet(channels=3, classes=args.classes)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.learning_rate, weight_decay=1e-8, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0, threshold=0.5)
    criterion = nn.CrossEntropyLoss(reduction="none")

    def train_step(pictures: Tensor, true_masks: Tensor) -> Tensor:
        masks_pred = model(pictures)
        one_hot = F.one_hot(true_masks, args.classes).permute(0, 3, 1, 2).float()
        loss = mirrored.compute_average_loss(criterion(masks_pred, true_masks).mean((1, 2)))
        loss = loss + mirrored.scale_regularization_loss(dice_loss(F.softmax(masks_pred, dim=1), one_hot))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def val_step(pictures: Tensor, true_masks: Tensor) -> Tensor:
        """The sum of the pictures' Dice coefficients."""
        found = F.one_hot(model(pictures).argmax(1), args.classes).permute(0, 3, 1, 2)
        wanted = F.one_hot(true_masks, args.classes).permute(0, 3, 1, 2)
        overlap, size = (found * wanted).sum((2, 3)), (found + wanted).sum((2, 3))
        return ((2 * overlap + 1e-6) / (size + 1e-6)).mean(1).sum()

    def evaluate() -> float:
        model.eval()
        dice_score = torch.zeros(())
        for batch in val_loader:
            dice_score += strategy.run(val_step, args=batch)
        model.train()
        return strategy.reduce("sum", dice_score).item() / len(val_set)

    for epoch in range(1, args.epochs + 1):
        epoch_loss = 0.0
        for batch in train_loader:
            loss = strategy.run(train_step, args=batch)
            epoch_loss += strategy.reduce("sum", loss).item()
        val_score = evaluate()
        scheduler.step(val_score)
        rate = optimizer.param_groups[0]["lr"]
        strategy.print(f"epoch {epoch}: loss {epoch_loss / len(train_loader):.4f} Dice {val_score:.4f} rate {rate:.1e}")


if __name__ == "__main__":
    main()
