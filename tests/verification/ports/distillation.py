"""A small student learns from a frozen teacher, in the shape of the tutorials on knowledge distillation."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

import mirrored


def make_teacher() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)),
    )


def make_student() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))


def make_digits(count: int) -> tuple[Tensor, Tensor]:
    """Ten pictures, one for each class, with noise."""
    prototypes, labels = torch.rand(10, 1, 8, 8).round(), torch.randint(0, 10, (count,))
    return prototypes[labels] + 0.3 * torch.randn(count, 1, 8, 8), labels


def pretrain(teacher: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Trains the teacher on all examples at once, outside of any strategy's step."""
    optimizer = torch.optim.Adam(teacher.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(teacher(images), labels).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.005)
    parser.add_argument("-T", "--temperature", type=float, default=2.0)
    parser.add_argument("--soft-target-loss-weight", type=float, default=0.75)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=42)
    teacher = make_teacher()
    images, labels = make_digits(250)
    train_set, test_set = random_split(TensorDataset(images, labels), [197, 53])
    train_loader = strategy.distribute_dataset(train_set, args.batch_size, shuffle=True)
    test_loader = strategy.distribute_dataset(test_set, args.batch_size)

    pretrain(teacher, images, labels)
    teacher.requires_grad_(False)
    teacher.eval()
    with strategy.scope():
        student = make_student()
        optimizer = torch.optim.Adam(student.parameters(), lr=args.learning_rate)

    def train_step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
        student_logits = student(inputs)
        soft_targets = F.softmax(teacher_logits / args.temperature, dim=-1)
        soft_prob = F.log_softmax(student_logits / args.temperature, dim=-1)
        soft_losses = F.kl_div(soft_prob, soft_targets, reduction="none").sum(1) * args.temperature**2
        label_losses = F.cross_entropy(student_logits, targets, reduction="none")
        weight = args.soft_target_loss_weight
        loss = mirrored.compute_average_loss(weight * soft_losses + (1 - weight) * label_losses)
        loss.backward()
        optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def test_step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        guess = student(inputs).argmax(1)
        return (guess == targets).sum(), (guess == teacher(inputs).argmax(1)).sum()

    for epoch in range(args.epochs):
        student.train()
        running_loss = torch.zeros(())
        for batch in train_loader:
            running_loss += strategy.run(train_step, args=batch)
        running_loss = strategy.reduce("sum", running_loss).item()
        strategy.print(f"Epoch {epoch + 1}/{args.epochs}, Loss: {running_loss / len(train_loader):.6f}")
        student.eval()
        right, agreed = 0, 0
        for batch in test_loader:
            hits, same = strategy.reduce("sum", strategy.run(test_step, args=batch))
            right, agreed = right + int(hits), agreed + int(same)
        accuracy, agreement = 100 * right / len(test_set), 100 * agreed / len(test_set)
        strategy.print(f"Test Accuracy: {accuracy:.2f}%, agrees with the teacher: {agreement:.2f}%")


if __name__ == "__main__":
    main()
