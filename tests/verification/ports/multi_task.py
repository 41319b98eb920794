"""One trunk with several heads, of which not all are used in each step, in the shape of multi-task learning."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored

MISSING = -100


class MultiTask(nn.Module):
    def __init__(self, inputs: int, width: int, classes: int, kinds: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.GELU())
        self.heads = nn.ModuleDict(
            {"label": nn.Linear(width, classes), "value": nn.Linear(width, 1), "kind": nn.Linear(width, kinds)}
        )
        self.log_variances = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in ("label", "value")})

    def forward(self, x: Tensor, tasks: tuple[str, ...]) -> dict[str, Tensor]:
        features = self.trunk(x)
        return {task: self.heads[task](features) for task in tasks}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=14)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--aux-every", type=int, default=2)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=77)
    x = torch.randn(113, 6)
    labels = torch.where(torch.rand(113) < 0.6, x[:, :3].argmax(1), MISSING)  # not all examples have one
    values, kinds = x[:, 3] * x[:, 4], (x[:, 5] > 0).long()
    data = TensorDataset(x, labels, values, kinds)
    train = strategy.distribute_dataset(torch.utils.data.Subset(data, range(80)), args.batch_size, shuffle=True)
    test = strategy.distribute_dataset(torch.utils.data.Subset(data, range(80, 113)), args.batch_size)
    with strategy.scope():
        model = MultiTask(6, 16, classes=3, kinds=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def scaled(losses: Tensor, task: str) -> Tensor:
        """Losses, divided by their own learnt variance."""
        return losses * torch.exp(-model.log_variances[task])

    def train_step(x: Tensor, label: Tensor, value: Tensor, kind: Tensor, auxiliary: bool) -> dict[str, Tensor]:
        tasks = ("label", "value", "kind") if auxiliary else ("label", "value")
        output = model(x, tasks)
        present = label != MISSING
        classified = F.cross_entropy(output["label"], label, reduction="none", ignore_index=MISSING)
        classified = scaled(classified, "label")
        label_loss = mirrored.compute_average_loss(classified, sample_weight=present, denominator="weights")
        estimated = F.smooth_l1_loss(output["value"][:, 0], value, reduction="none")
        value_loss = mirrored.compute_average_loss(scaled(estimated, "value"))
        penalty = (model.log_variances["label"] + model.log_variances["value"]) / 2
        loss = label_loss + value_loss + mirrored.scale_regularization_loss(penalty)
        if auxiliary:
            kind_loss = mirrored.compute_average_loss(F.cross_entropy(output["kind"], kind, reduction="none"))
            loss = loss + 0.3 * kind_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"total": loss.detach(), "label": label_loss.detach(), "value": value_loss.detach()}

    @torch.no_grad()
    def test_step(x: Tensor, label: Tensor, value: Tensor, kind: Tensor) -> dict[str, Tensor]:
        output = model(x, ("label", "value", "kind"))
        return {
            "right": (output["label"].argmax(1) == label).sum(),
            "labelled": (label != MISSING).sum(),
            "error": (output["value"][:, 0] - value).abs().sum(),
            "kinds": (output["kind"].argmax(1) == kind).sum(),
        }

    step = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in train:
            losses = strategy.run(train_step, args=(*batch, step % args.aux_every == 0))
            step += 1
        losses = strategy.reduce("sum", losses)
        strategy.print(f"epoch {epoch}", " ".join(f"{name} {float(loss):.4f}" for name, loss in losses.items()))
        model.eval()
        found = [strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test]
        sums = {name: sum(float(part[name]) for part in found) for name in found[0]}
        accuracy, error = sums["right"] / sums["labelled"], sums["error"] / 33
        strategy.print(f"  accuracy {accuracy:.3f}, mean error {error:.3f}, kinds {sums['kinds'] / 33:.3f}")


if __name__ == "__main__":
    main()
