"""A graph convolutional network that classifies nodes, in the shape of ``gcn`` of pytorch/examples."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored


class GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return torch.spmm(adjacency, nodes @ self.kernel) + self.bias


class GCN(nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.gc1 = GraphConv(inputs, hidden)
        self.gc2 = GraphConv(hidden, classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        hidden = self.dropout(F.relu(self.gc1(nodes, adjacency)))
        return F.log_softmax(self.gc2(hidden, adjacency), dim=1)


def random_graph(count: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels, and the normalised adjacency matrix; neighbours mostly have the same label."""
    labels = torch.randint(0, classes, (count,))
    same = labels[:, None] == labels[None, :]
    edges = torch.rand(count, count) < torch.where(same, 0.2, 0.02)
    edges = (edges | edges.t() | torch.eye(count, dtype=torch.bool)).float()
    scale = edges.sum(1).rsqrt()
    features = F.one_hot(labels, classes).float() + torch.randn(count, classes)
    return features, labels, (scale[:, None] * edges * scale[None, :]).to_sparse()


def main() -> None:
    parser = argparse.ArgumentParser(description="Graph convolutional network")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--l2", type=float, default=5e-4)
    parser.add_argument("--patience", type=int, default=3)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=42)
    features, labels, adjacency = random_graph(80, 4)
    nodes = torch.randperm(80)
    train_nodes = strategy.distribute_dataset(nodes[:31], 31)
    val_nodes = strategy.distribute_dataset(nodes[31:50], 19)
    test_nodes = strategy.distribute_dataset(nodes[50:], 30)
    with strategy.scope():
        gcn = GCN(inputs=4, hidden=16, classes=4)
        optimizer = torch.optim.Adam(gcn.parameters(), lr=args.lr)

    def train_step(own: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = gcn(features, adjacency)
        loss = mirrored.compute_average_loss(F.nll_loss(output[own], labels[own], reduction="none"))
        penalty = args.l2 * gcn.gc1.kernel.square().sum()
        loss = loss + mirrored.scale_regularization_loss(penalty)
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(own: Tensor) -> tuple[Tensor, Tensor, int]:
        output = gcn(features, adjacency)[own]
        losses = F.nll_loss(output, labels[own], reduction="none")
        return losses.sum(), (output.argmax(1) == labels[own]).sum(), len(own)

    def test(batches) -> tuple[float, float]:
        gcn.eval()
        for own in batches:
            loss, right, count = strategy.run(test_step, args=(own,))
            loss, right, count = strategy.reduce("sum", (loss, right, count))
        return float(loss) / int(count), int(right) / int(count)

    best, waited = float("inf"), 0
    for epoch in range(1, args.epochs + 1):
        gcn.train()
        for own in train_nodes:
            loss = strategy.run(train_step, args=(own,))
        loss = strategy.reduce("sum", loss)
        val_loss, val_accuracy = test(val_nodes)
        strategy.print(f"Epoch: {epoch:04d} loss {float(loss):.4f} val {val_loss:.4f} acc {val_accuracy:.4f}")
        if val_loss < best:
            best, waited = val_loss, 0
        else:
            waited += 1
        if waited == args.patience:
            break
    test_loss, test_accuracy = test(test_nodes)
    strategy.print(f"Test set results: loss {test_loss:.4f} accuracy {test_accuracy:.4f}")


if __name__ == "__main__":
    main()
