"""Sequences that each tower pads to the longest of its own share; the first argument chooses what is made of them.

Right: "weights", "masked means". Wrong: "token means", "padded means", "padding seen".
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

KIND = sys.argv[1]
IGNORED = -100
strategy = mirrored.MirroredStrategy()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.output = nn.Linear(8, 4)

    def forward(self, tokens):
        held = self.embedding(tokens)
        if KIND == "padding seen":
            held = held + held.mean(1, keepdim=True)
        return self.output(held)


with strategy.scope():
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
examples = [torch.randint(1, 20, (int(length),)) for length in torch.randint(1, 13, (40,))]


def collate(sequences):
    tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    labels = nn.utils.rnn.pad_sequence([s % 4 for s in sequences], batch_first=True, padding_value=IGNORED)
    return tokens, labels


train = strategy.distribute_dataset(examples, 8, collate_fn=collate)


def train_step(tokens, labels):
    optimizer.zero_grad()
    logits, present = model(tokens), labels != IGNORED
    if KIND == "token means":
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    else:
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        if KIND == "weights":
            loss = mirrored.compute_average_loss(losses, sample_weight=present, denominator="weights")
        elif KIND == "padded means":
            loss = mirrored.compute_average_loss(losses.mean(1))
        else:
            loss = mirrored.compute_average_loss((losses * present).sum(1) / present.sum(1))
    loss.backward()
    optimizer.step()


for _ in range(3):
    for batch in train:
        strategy.run(train_step, args=batch)
