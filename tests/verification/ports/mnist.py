"""A convolutional network for digits, in the shape of ``mnist`` of pytorch/examples."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(144, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout1(x).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def make_digits(count: int) -> tuple[Tensor, Tensor]:
    """Ten pictures, one for each class, with noise."""
    prototypes, labels = torch.rand(10, 1, 8, 8).round(), torch.randint(0, 10, (count,))
    return prototypes[labels] + 0.3 * torch.randn(count, 1, 8, 8), labels


def train(args, strategy, model, batches, optimizer, epoch: int) -> None:
    def train_step(data: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = model(data)
        loss = mirrored.compute_average_loss(F.nll_loss(output, target, reduction="none"))
        loss.backward()
        optimizer.step()
        return loss.detach()

    model.train()
    for index, batch in enumerate(batches):
        loss = strategy.run(train_step, args=batch)
        if index % args.log_interval == 0:
            loss = strategy.reduce("sum", loss)
            strategy.print(f"Train Epoch: {epoch} [{index}/{len(batches)}]\tLoss: {loss.item():.6f}")


def test(strategy, model, batches, count: int) -> None:
    @torch.no_grad()
    def test_step(data: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        output = model(data)
        return F.nll_loss(output, target, reduction="sum"), (output.argmax(dim=1) == target).sum()

    model.eval()
    test_loss, correct = torch.zeros(()), torch.zeros((), dtype=torch.long)
    for batch in batches:
        batch_loss, batch_correct = strategy.run(test_step, args=batch)
        test_loss += batch_loss
        correct += batch_correct
    test_loss, correct = strategy.reduce("sum", (test_loss, correct))
    accuracy = 100.0 * correct.item() / count
    strategy.print(
        f"\nTest set: Average loss: {test_loss.item() / count:.4f}, Accuracy: {correct}/{count} ({accuracy:.0f}%)\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="MNIST example")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--test-batch-size", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=args.seed)
    images, labels = make_digits(300)
    train_set = TensorDataset(images[:231], labels[:231])
    test_set = TensorDataset(images[231:], labels[231:])
    train_batches = strategy.distribute_dataset(train_set, args.batch_size, shuffle=True)
    test_batches = strategy.distribute_dataset(test_set, args.test_batch_size)

    with strategy.scope():
        model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, strategy, model, train_batches, optimizer, epoch)
        test(strategy, model, test_batches, len(test_set))
        scheduler.step()


if __name__ == "__main__":
    main()
