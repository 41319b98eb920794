"""Layers that train without backpropagation, in the shape of ``mnist_forward_forward`` of pytorch/examples."""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import mirrored

CLASSES = 5


def overlay(x: Tensor, y: Tensor) -> Tensor:
    """The examples, whose first values say to which class they are claimed to belong."""
    x = x.clone()
    x[..., :CLASSES] = F.one_hot(y, CLASSES).to(x)
    return x


class Claims(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """Each example with its own label, and with a wrong one, which is drawn in each epoch."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, y = self.inputs[index], self.labels[index]
        wrong = (y + torch.randint(1, CLASSES, ())) % CLASSES
        return overlay(x, y), overlay(x, wrong), x, y


class Layer(nn.Linear):
    def __init__(self, inputs: int, outputs: int, threshold: float, lr: float) -> None:
        super().__init__(inputs, outputs)
        self.threshold = threshold
        self.opt = torch.optim.Adam(self.parameters(), lr=lr)

    def forward(self, x: Tensor) -> Tensor:
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(super().forward(direction))

    def learn(self, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        goodness = self.forward(positive).pow(2).mean(1)
        badness = self.forward(negative).pow(2).mean(1)
        losses = F.softplus(self.threshold - goodness) + F.softplus(badness - self.threshold)
        loss = mirrored.compute_average_loss(losses / 2)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return self.forward(positive).detach(), self.forward(negative).detach(), loss.detach()


class Net(nn.Module):
    def __init__(self, sizes: list[int], threshold: float, lr: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, o, threshold, lr) for i, o in itertools.pairwise(sizes))

    def learn(self, positive: Tensor, negative: Tensor) -> list[Tensor]:
        losses = []
        for layer in self.layers:
            positive, negative, loss = layer.learn(positive, negative)
            losses.append(loss)
        return losses

    def predict(self, x: Tensor) -> Tensor:
        goodness = []
        for label in range(CLASSES):
            h = overlay(x, torch.full((len(x),), label))
            total = torch.zeros(len(x))
            for layer in self.layers:
                h = layer(h)
                total += h.pow(2).mean(1)
            goodness.append(total)
        return torch.stack(goodness, dim=1).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--threshold", type=float, default=0.3)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=1234)
    inputs = torch.rand(83, 20)
    labels = inputs[:, -CLASSES:].argmax(1)
    train_loader = strategy.distribute_dataset(Claims(inputs[:57], labels[:57]), args.batch_size, shuffle=True)
    test_loader = strategy.distribute_dataset(Claims(inputs[57:], labels[57:]), args.batch_size)
    net = Net([20, 24, 16], args.threshold, args.lr)
    strategy.mirror(net)

    def train_step(positive: Tensor, negative: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        return net.learn(positive, negative)

    @torch.no_grad()
    def test_step(positive: Tensor, negative: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return (net.predict(x) == y).sum(), len(x)

    for epoch in range(args.epochs):
        for batch in train_loader:
            losses = strategy.run(train_step, args=batch)
        losses = strategy.reduce("sum", losses)
        strategy.print(f"epoch {epoch}: losses of the layers {[round(float(loss), 4) for loss in losses]}")
    right, count = 0, 0
    for batch in test_loader:
        hits, examples = strategy.run(test_step, args=batch)
        right, count = right + hits, count + examples
    right, count = strategy.reduce("sum", (right, count))
    strategy.print(f"test error: {1.0 - int(right) / int(count):.4f}")


if __name__ == "__main__":
    main()
