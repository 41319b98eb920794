"""Matrix factorisation with sparse embeddings, in the shape of the usual MovieLens scripts."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import mirrored


class MatrixFactorization(nn.Module):
    def __init__(self, users: int, items: int, factors: int) -> None:
        super().__init__()
        self.user_factors = nn.Embedding(users, factors, sparse=True)
        self.item_factors = nn.Embedding(items, factors, sparse=True)
        self.user_biases = nn.Embedding(users, 1, sparse=True)
        self.item_biases = nn.Embedding(items, 1, sparse=True)
        nn.init.zeros_(self.user_biases.weight)
        nn.init.zeros_(self.item_biases.weight)

    def forward(self, user: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted ratings, and a penalty for each of them."""
        u, i = self.user_factors(user), self.item_factors(item)
        ratings = (u * i).sum(1) + (self.user_biases(user) + self.item_biases(item))[:, 0]
        return ratings, u.square().sum(1) + i.square().sum(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--factors", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--reg", type=float, default=0.01)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=11)
    users, items = torch.randint(0, 40, (400,)), torch.randint(0, 60, (400,))
    tastes, kinds = torch.randn(40, 2), torch.randn(60, 2)
    ratings = 3 + (tastes[users] * kinds[items]).sum(1) + 0.1 * torch.randn(400)
    train_set, test_set = random_split(TensorDataset(users, items, ratings), [331, 69])
    train_loader = strategy.distribute_dataset(train_set, args.batch_size, shuffle=True)
    test_loader = strategy.distribute_dataset(test_set, args.batch_size)
    mean_rating = ratings[torch.tensor(train_set.indices)].mean()
    with strategy.scope():
        model = MatrixFactorization(40, 60, args.factors)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=args.lr)

    def train_step(user: Tensor, item: Tensor, rating: Tensor) -> Tensor:
        optimizer.zero_grad()
        predicted, penalty = model(user, item)
        errors = (predicted - (rating - mean_rating)).square()
        loss = mirrored.compute_average_loss(errors) + mirrored.compute_average_loss(args.reg * penalty)
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(user: Tensor, item: Tensor, rating: Tensor) -> Tensor:
        predicted, _ = model(user, item)
        return (predicted + mean_rating - rating).square().sum()

    for epoch in range(args.epochs):
        model.train()
        train_loss = 0.0
        for batch in train_loader:
            train_loss += strategy.run(train_step, args=batch)
        train_loss = float(strategy.reduce("sum", train_loss)) / len(train_loader)
        model.eval()
        squares = sum(strategy.run(test_step, args=batch) for batch in test_loader)
        rmse = (strategy.reduce("sum", squares) / len(test_set)).sqrt()
        strategy.print(f"epoch {epoch}: training loss {train_loss:.4f}, test RMSE {rmse.item():.4f}")


if __name__ == "__main__":
    main()
