"""Denoising diffusion with an average of the weights, in the shape of denoising-diffusion-pytorch."""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored


class Denoiser(nn.Module):
    """Predicts the noise in a picture."""

    def __init__(self, channels: int, timesteps: int) -> None:
        super().__init__()
        self.timesteps = timesteps
        self.time = nn.Sequential(nn.Embedding(timesteps, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.begin = nn.Conv2d(1, channels, 3, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(2, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1))
        self.end = nn.Sequential(nn.GroupNorm(2, channels), nn.SiLU(), nn.Conv2d(channels, 1, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.begin(x) + self.time(t)[:, :, None, None]
        return self.end(h + self.middle(h))


class Diffusion:
    def __init__(self, timesteps: int) -> None:
        self.timesteps = timesteps
        self.betas = torch.linspace(1e-3, 0.2, timesteps)
        self.kept = (1 - self.betas).cumprod(0)

    def noisy(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        kept = self.kept[t][:, None, None, None]
        return kept.sqrt() * x + (1 - kept).sqrt() * noise

    def losses(self, model: nn.Module, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """One value for each example; noisy examples count less."""
        errors = F.mse_loss(model(self.noisy(x, t, noise), t), noise, reduction="none").mean((1, 2, 3))
        signal = self.kept[t] / (1 - self.kept[t])
        weights = signal.clamp(max=5) / signal
        return weights * errors

    @torch.no_grad()
    def sample(self, model: nn.Module, x: Tensor) -> Tensor:
        """A deterministic sampler, from noise to a picture."""
        for step in reversed(range(1, self.timesteps)):
            t = torch.full((len(x),), step)
            noise = model(x, t)
            clean = (x - (1 - self.kept[step]).sqrt() * noise) / self.kept[step].sqrt()
            x = self.noisy(clean.clamp(-1, 1), t - 1, noise)
        return x


class EMA:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for average, p in zip(self.model.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 1 - self.decay)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-batch-size", type=int, default=12)
    parser.add_argument("--train-lr", type=float, default=2e-3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--timesteps", type=int, default=20)
    parser.add_argument("--ema-decay", type=float, default=0.9)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=10)
    pictures = torch.rand(79, 1, 8, 8).round() * 2 - 1
    train = strategy.distribute_dataset((pictures[:57],), args.train_batch_size, shuffle=True)
    held_out = strategy.distribute_dataset((pictures[57:], torch.arange(22) % args.timesteps), args.train_batch_size)
    with strategy.scope():
        model = Denoiser(8, args.timesteps)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.train_lr, betas=(0.9, 0.99))
    ema = EMA(model, args.ema_decay)
    diffusion = Diffusion(args.timesteps)

    def train_step(x: Tensor) -> Tensor:
        t = torch.randint(0, args.timesteps, (len(x),))
        noise = torch.randn_like(x)
        loss = mirrored.compute_average_loss(diffusion.losses(model, x, t, noise))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(x: Tensor, t: Tensor) -> Tensor:
        noise = torch.cos(torch.arange(x[0].numel()) * 1.7).view_as(x[0]).expand_as(x)
        return diffusion.losses(ema.model, x, t, noise).sum()

    for epoch in range(args.epochs):
        for batch in train:
            loss = strategy.run(train_step, args=batch)
            ema.update(model)
        strategy.print(f"epoch {epoch}: loss {strategy.reduce('sum', loss).item():.4f}")
        total = sum(strategy.run(test_step, args=batch) for batch in held_out)
        strategy.print(f"loss of the average: {strategy.reduce('sum', total).item() / 22:.4f}")
    noise = torch.randn(2, 1, 8, 8)
    if strategy.is_chief:
        print(f"mean of the samples: {diffusion.sample(ema.model, noise).mean().item():.3f}")


if __name__ == "__main__":
    main()
