"""A DCGAN on scikit-learn's handwritten digits: two models, two optimizers and two losses in one step.

    python examples/dcgan.py --devices cpu:0,cpu:1

Every few epochs a sheet of samples is written to --output. The losses follow Goodfellow et al. (2014) in their
non-saturating form, the networks Radford et al. (2015). BatchNorm in the generator takes the statistics of the global
batch.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

import mirrored

NOISE = 32


def load_images() -> Tensor:
    """All digits as 8×8 images from -1 to 1, shape (1797, 1, 8, 8)."""
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1


def make_generator() -> nn.Module:
    """Noise of shape (n, 32) to images (n, 1, 8, 8)."""
    return nn.Sequential(
        nn.Unflatten(1, (NOISE, 1, 1)),
        nn.ConvTranspose2d(NOISE, 128, 4, bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 1, 3, padding=1),
        nn.Tanh(),
    )


def make_discriminator() -> nn.Module:
    """Images to one number each: positive for real."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 128, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1),
        nn.Flatten(0),
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
    parser.add_argument("--epochs", type=positive, default=60)
    parser.add_argument("--batch-size", type=positive, default=64, help="of all towers together")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--every", type=positive, default=10, help="epochs between sample sheets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/dcgan"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    strategy = mirrored.MultiWorkerMirroredStrategy(devices=arguments.devices, seed=arguments.seed)
    images = strategy.distribute_dataset(
        TensorDataset(load_images()), arguments.batch_size, shuffle=True, drop_last=True
    )
    if len(images) == 0:
        raise SystemExit(f"--batch-size is {arguments.batch_size}, but there are only {len(load_images())} digits")
    with strategy.scope(sync_batch_norm=True):
        generator, discriminator = make_generator(), make_discriminator()
        optimize_generator = torch.optim.Adam(generator.parameters(), arguments.learning_rate, betas=(0.5, 0.999))
        optimize_discriminator = torch.optim.Adam(
            discriminator.parameters(), arguments.learning_rate, betas=(0.5, 0.999)
        )
    fixed_noise = torch.randn(64, NOISE, device=strategy.device)

    def train_step(real: Tensor) -> tuple[Tensor, Tensor]:
        fake = generator(torch.randn(len(real), NOISE, device=real.device))
        # softplus(-d) is -log(sigmoid(d)): the cost of holding a picture with score d for false.
        optimize_discriminator.zero_grad()
        costs = F.softplus(-discriminator(real)) + F.softplus(discriminator(fake.detach()))
        discriminator_loss = mirrored.compute_average_loss(costs)
        discriminator_loss.backward()
        optimize_discriminator.step()

        optimize_generator.zero_grad()
        generator_loss = mirrored.compute_average_loss(F.softplus(-discriminator(fake)))
        generator_loss.backward()
        optimize_generator.step()
        return discriminator_loss.detach(), generator_loss.detach()

    for epoch in tqdm(range(1, arguments.epochs + 1), unit="epoch", disable=not strategy.is_chief):
        totals = [strategy.run(train_step, args=batch) for batch in images]
        means = [float(torch.stack(column).mean()) for column in zip(*totals, strict=True)]
        losses = strategy.reduce("sum", means)
        if strategy.is_chief and (epoch % arguments.every == 0 or epoch == arguments.epochs):
            save_sheet(arguments.output / f"epoch{epoch:04d}.png", generator, fixed_noise)
    strategy.print(f"final losses: discriminator {losses[0]:.9f}, generator {losses[1]:.9f}; see {arguments.output}/")


@torch.no_grad()
def save_sheet(path: pathlib.Path, generator: nn.Module, noise: Tensor) -> None:
    """A PNG with 8×8 samples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    generator.eval()
    samples = F.pad(generator(noise).cpu(), (1, 1, 1, 1), value=-1)
    generator.train()
    rows = samples.view(8, 8, 10, 10).permute(0, 2, 1, 3).reshape(80, 80)
    plt.imsave(path, rows.repeat_interleave(5, 0).repeat_interleave(5, 1), cmap="gray_r", vmin=-1, vmax=1)


if __name__ == "__main__":
    main()
