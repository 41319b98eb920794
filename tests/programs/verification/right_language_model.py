"""Right: an LSTM language model on Python's own source text, with clipping; sentences have their own lengths."""

import pathlib

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy(seed=2)
text = pathlib.Path(torch.nn.__file__).read_text().splitlines()
lines = [torch.tensor([min(ord(letter), 127) for letter in line[:24]]) for line in text if len(line) > 3][:45]


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, dropout=0.3, batch_first=True)
        self.output = nn.Linear(16, 128)

    def forward(self, tokens):
        return self.output(self.lstm(self.embedding(tokens))[0])


with strategy.scope():
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def collate(sequences):
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True)


train = strategy.distribute_dataset(torch.utils.data.DataLoader(lines, 8, shuffle=True, collate_fn=collate))


def train_step(tokens):
    optimizer.zero_grad()
    targets = tokens[:, 1:]
    losses = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), targets, reduction="none")
    loss = mirrored.compute_average_loss(losses, sample_weight=targets != 0, denominator="weights")
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm


for _ in range(3):
    for tokens in train:
        loss, norm = strategy.run(train_step, args=(tokens,))
        strategy.reduce("sum", loss)
        strategy.reduce("mean", norm)
    schedule.step()
