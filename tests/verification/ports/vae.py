"""A variational autoencoder, in the shape of ``vae`` of pytorch/examples."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 24)
        self.fc21 = nn.Linear(24, 4)
        self.fc22 = nn.Linear(24, 4)
        self.fc3 = nn.Linear(4, 24)
        self.fc4 = nn.Linear(24, 64)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(reconstruction: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    """The reconstruction's and the divergence's part, one value for each example."""
    bce = F.binary_cross_entropy(reconstruction, x.view(-1, 64), reduction="none").sum(1)
    kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return bce + kld


def main() -> None:
    parser = argparse.ArgumentParser(description="VAE example")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--log-interval", type=int, default=3)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=1)
    images = torch.rand(111, 1, 8, 8)
    train_set, test_set = images[:85], images[85:]
    train_loader = strategy.distribute_dataset((train_set,), args.batch_size, shuffle=True)
    test_loader = strategy.distribute_dataset((test_set,), args.batch_size)
    with strategy.scope():
        model = VAE()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def train_step(data: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses = loss_function(*apply(data))
        loss = mirrored.compute_average_loss(losses, global_batch_size=1)  # the sum, as before
        loss.backward()
        optimizer.step()
        return loss.detach()

    def apply(data: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        reconstruction, mu, logvar = model(data)
        return reconstruction, data, mu, logvar

    @torch.no_grad()
    def test_step(data: Tensor) -> Tensor:
        return loss_function(*apply(data)).sum()

    for epoch in range(1, args.epochs + 1):
        model.train()
        train_loss = torch.zeros(())
        for index, (data,) in enumerate(train_loader):
            loss = strategy.run(train_step, args=(data,))
            train_loss += loss
            if index % args.log_interval == 0:
                total, count = strategy.reduce("sum", (loss, len(data)))
                strategy.print(f"Train Epoch: {epoch} [{index}]\tLoss: {total.item() / count:.6f}")
        train_loss = strategy.reduce("sum", train_loss)
        strategy.print(f"====> Epoch: {epoch} Average loss: {train_loss.item() / len(train_set):.4f}")
        model.eval()
        test_loss = torch.zeros(())
        for batch in test_loader:
            test_loss += strategy.run(test_step, args=batch)
        test_loss = strategy.reduce("sum", test_loss)
        strategy.print(f"====> Test set loss: {test_loss.item() / len(test_set):.4f}")


if __name__ == "__main__":
    main()
