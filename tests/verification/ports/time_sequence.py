"""An LSTM that continues sine waves, with LBFGS, in the shape of ``time_sequence_prediction`` of pytorch/examples."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor, nn

import mirrored


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 8)
        self.lstm2 = nn.LSTMCell(8, 8)
        self.linear = nn.Linear(8, 1)

    def forward(self, waves: Tensor, future: int = 0) -> Tensor:
        outputs = []
        zeros = waves.new_zeros(len(waves), 8)
        first, second = (zeros, zeros), (zeros, zeros)
        for step in waves.split(1, dim=1):
            first = self.lstm1(step, first)
            second = self.lstm2(first[0], second)
            outputs.append(self.linear(second[0]))
        for _ in range(future):
            first = self.lstm1(outputs[-1], first)
            second = self.lstm2(first[0], second)
            outputs.append(self.linear(second[0]))
        return torch.cat(outputs, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--waves", type=int, default=25)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=0)
    shift = np.random.randint(-80, 80, (args.waves, 1))
    data = torch.from_numpy(np.sin((np.arange(24) + shift) / 4.0))
    train_loader = strategy.distribute_dataset((data[4:, :-1], data[4:, 1:]), len(data) - 4)
    test_loader = strategy.distribute_dataset((data[:3, :-1], data[:3, 1:]), 3)
    with strategy.scope():
        model = Sequence().double()
    criterion = nn.MSELoss(reduction="none")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=3, line_search_fn="strong_wolfe")

    def train_step(inputs: Tensor, target: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            out = model(inputs)
            loss = mirrored.compute_average_loss(criterion(out, target).mean(1))
            loss.backward()
            return strategy.reduce("sum", loss.detach())

        return optimizer.step(closure)

    @torch.no_grad()
    def test_step(inputs: Tensor, target: Tensor) -> Tensor:
        future = 5
        pred = model(inputs, future=future)
        return criterion(pred[:, :-future], target).mean(1).sum()

    for i in range(args.steps):
        strategy.print("STEP:", i)
        for batch in train_loader:
            loss = strategy.run(train_step, args=batch)
            strategy.print("loss:", loss.item())
        for batch in test_loader:
            loss = strategy.reduce("sum", strategy.run(test_step, args=batch))
            strategy.print("test loss:", loss.item() / 3)


if __name__ == "__main__":
    main()
