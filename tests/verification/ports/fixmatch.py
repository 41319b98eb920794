"""Semi-supervised learning with pseudo labels, in the shape of FixMatch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, TensorDataset

import mirrored


class Unlabelled(Dataset[tuple[Tensor, Tensor]]):
    """A weakly and a strongly changed copy of each example."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.inputs[index]
        return x + 0.05 * torch.randn_like(x), x * (torch.rand_like(x) < 0.8) + 0.2 * torch.randn_like(x)


def endless(loader) -> Iterator:
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description="PyTorch FixMatch Training")
    parser.add_argument("--batch-size", type=int, default=5)
    parser.add_argument("--mu", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--eval-step", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--lambda-u", type=float, default=1.0)
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--ema-decay", type=float, default=0.9)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=5)
    centres = 1.5 * torch.randn(3, 8)
    targets = torch.randint(0, 3, (160,))
    inputs = centres[targets] + torch.randn(160, 8)
    labelled = TensorDataset(inputs[:22], targets[:22])
    labelled_loader = strategy.distribute_dataset(labelled, args.batch_size, shuffle=True)
    unlabelled_loader = strategy.distribute_dataset(Unlabelled(inputs[22:119]), args.batch_size * args.mu, shuffle=True)
    test_loader = strategy.distribute_dataset((inputs[119:], targets[119:]), 16)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 24), nn.LeakyReLU(0.1), nn.Linear(24, 3))
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema_decay))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * args.eval_step)

    def train_step(x: Tensor, y: Tensor, weak: Tensor, strong: Tensor) -> dict[str, Tensor]:
        logits = model(torch.cat([x, weak, strong]))
        logits_x, logits_weak, logits_strong = logits.split([len(x), len(weak), len(strong)])
        loss_x = mirrored.compute_average_loss(F.cross_entropy(logits_x, y, reduction="none"), batch=x)
        confidence, pseudo_labels = F.softmax(logits_weak.detach(), dim=-1).max(dim=-1)
        mask = (confidence >= args.threshold).float()
        losses_u = F.cross_entropy(logits_strong, pseudo_labels, reduction="none") * mask
        loss_u = mirrored.compute_average_loss(losses_u, batch=weak)
        loss = loss_x + args.lambda_u * loss_u
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema_model.update_parameters(model)
        share = mirrored.compute_average_loss(mask, batch=weak)
        return {"loss": loss.detach(), "loss_x": loss_x.detach(), "loss_u": loss_u.detach(), "mask": share}

    @torch.no_grad()
    def test_step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs = ema_model(x)
        return F.cross_entropy(outputs, y, reduction="sum"), (outputs.argmax(1) == y).sum()

    labelled_iter, unlabelled_iter = endless(labelled_loader), endless(unlabelled_loader)
    for epoch in range(args.epochs):
        model.train()
        for index in range(args.eval_step):
            x, y = next(labelled_iter)
            weak, strong = next(unlabelled_iter)
            meters = strategy.reduce("sum", strategy.run(train_step, args=(x, y, weak, strong)))
            text = " ".join(f"{name}: {float(value):.4f}" for name, value in meters.items())
            strategy.print(f"Train Epoch: {epoch + 1}/{args.epochs} Iter: {index + 1}/{args.eval_step} {text}")
        ema_model.eval()
        found = [strategy.run(test_step, args=batch) for batch in test_loader]
        loss, right = strategy.reduce("sum", (sum(part[0] for part in found), sum(part[1] for part in found)))
        strategy.print(f"test loss {float(loss) / 41:.4f}, top-1 {100 * int(right) / 41:.2f}")


if __name__ == "__main__":
    main()
