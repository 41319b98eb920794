"""A small GPT with accumulated gradients, in the shape of ``train.py`` of nanoGPT."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import mirrored


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Crops of a text, from random places, each with the letters that follow."""

    def __init__(self, text: Tensor, block: int, count: int) -> None:
        self.text, self.block, self.count = text, block, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(torch.randint(len(self.text) - self.block, ()))
        crop = self.text[start : start + self.block + 1]
        return crop[:-1], crop[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.attention(self.ln_1(x)).chunk(3, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, letters: int, block: int, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(letters, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, letters, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.lm_head(self.ln_f(self.blocks(self.wte(x) + self.wpe(places))))


def configure_optimizer(model: nn.Module, weight_decay: float, lr: float) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=12)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=4)
    parser.add_argument("--max-iters", type=int, default=9)
    parser.add_argument("--warmup-iters", type=int, default=2)
    parser.add_argument("--lr-decay-iters", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=6e-3)
    parser.add_argument("--min-lr", type=float, default=6e-4)
    parser.add_argument("--grad-clip", type=float, default=0.5)
    parser.add_argument("--eval-interval", type=int, default=3)
    parser.add_argument("--weight-decay", type=float, default=1e-1)
    args = parser.parse_args()

    strategy = mirrored.MirroredStrategy(seed=1337)
    accumulation_steps = args.gradient_accumulation_steps
    tokens_per_iter = accumulation_steps * args.batch_size * args.block_size
    strategy.print(f"tokens per iteration will be: {tokens_per_iter:,}")
    text = torch.randint(0, 24, (500,)) // torch.randint(1, 4, (500,))
    train_data = strategy.distribute_dataset(Crops(text[:400], args.block_size, 60), args.batch_size)
    val_data = strategy.distribute_dataset(Crops(text[400:], args.block_size, 13), args.batch_size)
    with strategy.scope():
        model = GPT(24, args.block_size)
    optimizer = configure_optimizer(model, args.weight_decay, args.learning_rate)

    def get_lr(it: int) -> float:
        if it < args.warmup_iters:
            return args.learning_rate * (it + 1) / (args.warmup_iters + 1)
        if it > args.lr_decay_iters:
            return args.min_lr
        ratio = (it - args.warmup_iters) / (args.lr_decay_iters - args.warmup_iters)
        return args.min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (args.learning_rate - args.min_lr)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from train_data

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(1)

    def micro_step(x: Tensor, y: Tensor, last: bool) -> Tensor:
        loss = mirrored.compute_average_loss(losses_of(x, y)) / accumulation_steps
        with contextlib.nullcontext() if last else strategy.no_sync():
            loss.backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def val_step(x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        return losses_of(x, y).sum(), len(x)

    def estimate_loss() -> float:
        model.eval()
        total, count = 0.0, 0
        for batch in val_data:
            loss, crops = strategy.run(val_step, args=batch)
            total, count = total + loss, count + crops
        total, count = strategy.reduce("sum", (total, count))
        model.train()
        return float(total) / int(count)

    batches = endless()
    for iter_num in range(args.max_iters):
        lr = get_lr(iter_num)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if iter_num % args.eval_interval == 0:
            strategy.print(f"step {iter_num}: val loss {estimate_loss():.4f}")
        loss = torch.zeros(())
        for micro in range(accumulation_steps):
            x, y = next(batches)
            loss += strategy.run(micro_step, args=(x, y, micro == accumulation_steps - 1))
        loss = strategy.reduce("sum", loss)
        strategy.print(f"iter {iter_num}: loss {loss.item():.4f}, lr {lr:.5f}")


if __name__ == "__main__":
    main()
