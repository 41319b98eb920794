"""Policy gradients on a pole that is to be balanced, in the shape of ``reinforcement_learning`` of pytorch/examples."""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored


class Pole:
    """A cart with a pole, simplified."""

    def __init__(self, generator: torch.Generator) -> None:
        self.place, self.speed, self.angle, self.turn = (torch.rand(4, generator=generator) * 0.1 - 0.05).tolist()

    def observe(self) -> Tensor:
        return torch.tensor([self.place, self.speed, self.angle, self.turn])

    def step(self, action: int) -> bool:
        """Pushes the cart to one side; whether the pole has fallen."""
        force = 1.0 if action else -1.0
        turning = 9.8 * math.sin(self.angle) - force * math.cos(self.angle)
        self.place, self.speed = self.place + 0.1 * self.speed, self.speed + 0.1 * force
        self.angle, self.turn = self.angle + 0.1 * self.turn, self.turn + 0.1 * turning
        return abs(self.angle) > 0.21 or abs(self.place) > 2.4


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 16)
        self.affine2 = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.affine2(torch.tanh(self.affine1(x))), dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description="REINFORCE example")
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--episodes", type=int, default=66)
    parser.add_argument("--batch-size", type=int, default=7)
    parser.add_argument("--log-interval", type=int, default=1)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=543)
    with strategy.scope():
        policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    episodes = strategy.distribute_dataset(torch.arange(args.episodes), args.batch_size)

    def play(seed: int) -> tuple[Tensor, float]:
        """The discounted returns, weighted by the logarithms of the actions' probabilities, and the reward."""
        generator = torch.Generator().manual_seed(seed)
        pole, log_probs, rewards = Pole(generator), [], []
        for _ in range(20):
            choices = policy(pole.observe())
            action = int(torch.multinomial(choices.detach().exp(), 1, generator=generator))
            log_probs.append(choices[action])
            rewards.append(1.0)
            if pole.step(action):
                break
        returns, discounted = [], 0.0
        for reward in reversed(rewards):
            discounted = reward + args.gamma * discounted
            returns.insert(0, discounted)
        return torch.stack([torch.stack(log_probs).sum(), torch.tensor(returns[0])]), sum(rewards)

    def train_step(seeds: Tensor) -> Tensor:
        optimizer.zero_grad()
        played = [play(int(seed)) for seed in seeds]
        values = torch.stack([value for value, _ in played])
        rewards = torch.tensor([reward for _, reward in played])
        log_probs, returns = values[:, 0], values[:, 1].detach()
        baseline = strategy.reduce("mean", returns, axis=0)
        loss = mirrored.compute_average_loss(-log_probs * (returns - baseline))
        loss.backward()
        optimizer.step()
        return rewards

    running_reward = 10.0
    for index, seeds in enumerate(episodes):
        rewards = strategy.run(train_step, args=(seeds,))
        mean = strategy.reduce("mean", rewards, axis=0)
        running_reward = 0.05 * float(mean) + 0.95 * running_reward
        if index % args.log_interval == 0:
            strategy.print(f"Batch {index}\tLast reward: {float(mean):.2f}\tAverage reward: {running_reward:.2f}")
        if running_reward > 19.5:
            strategy.print(f"Solved! Running reward is now {running_reward}")
            break


if __name__ == "__main__":
    main()
