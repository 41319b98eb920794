"""Two networks that compete, in the shape of ``dcgan`` of pytorch/examples."""

from __future__ import annotations

import argparse
import csv
import pathlib
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored


class Generator(nn.Module):
    def __init__(self, nz: int, ngf: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *(nn.ConvTranspose2d(nz, 2 * ngf, 2, bias=False), nn.BatchNorm2d(2 * ngf), nn.ReLU(True)),
            *(nn.ConvTranspose2d(2 * ngf, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True)),
            *(nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False), nn.Tanh()),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self, ndf: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *(nn.Conv2d(1, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)),
            *(nn.Conv2d(ndf, 2 * ndf, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * ndf), nn.LeakyReLU(0.2, True)),
            *(nn.Conv2d(2 * ndf, 1, 2, bias=False), nn.Flatten(0)),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.main(pictures)


def weights_init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.1)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--nz", type=int, default=6)
    parser.add_argument("--niter", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--beta1", type=float, default=0.5)
    parser.add_argument("--outf", default=tempfile.gettempdir())
    opt = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=999)
    pictures = F.interpolate(torch.rand(67, 1, 3, 3), size=8, mode="bilinear") * 2 - 1
    dataloader = strategy.distribute_dataset((pictures,), opt.batch_size, shuffle=True)
    with strategy.scope(sync_batch_norm=True):
        net_g = Generator(opt.nz, 8)
        net_d = Discriminator(8)
    net_g.apply(weights_init)
    net_d.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss(reduction="none")
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    fixed_noise = torch.randn(4, opt.nz, 1, 1)

    def train_step(real: Tensor) -> tuple[Tensor, Tensor]:
        net_d.zero_grad()
        output = net_d(real)
        err_d_real = mirrored.compute_average_loss(criterion(output, torch.ones_like(output)))
        err_d_real.backward()
        fake = net_g(torch.randn(len(real), opt.nz, 1, 1))
        output = net_d(fake.detach())
        err_d_fake = mirrored.compute_average_loss(criterion(output, torch.zeros_like(output)))
        err_d_fake.backward()
        optimizer_d.step()

        net_g.zero_grad()
        output = net_d(fake)
        err_g = mirrored.compute_average_loss(criterion(output, torch.ones_like(output)))
        err_g.backward()
        optimizer_g.step()
        return (err_d_real + err_d_fake).detach(), err_g.detach()

    rows = []
    for epoch in range(opt.niter):
        for i, (real,) in enumerate(dataloader):
            err_d, err_g = strategy.run(train_step, args=(real,))
            err_d, err_g = strategy.reduce("sum", (err_d, err_g))
            strategy.print(f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] Loss_D: {err_d:.4f} Loss_G: {err_g:.4f}")
            rows.append((epoch, i, err_d.item(), err_g.item()))
        if strategy.is_chief:
            net_g.eval()
            with torch.no_grad():
                fake = net_g(fixed_noise)
            net_g.train()
            print(f"brightness of the samples: {fake.mean():.4f}")
            with (pathlib.Path(opt.outf) / "losses.csv").open("w", newline="") as file:
                csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
