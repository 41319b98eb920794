"""Scripts for ``mirrored verify``: what is changed of a right one makes a mistake, or another script that is right.

Each is written into a file of its own, as a user's is, since verify names lines of it. What has another shape lies in
tests/programs/verification.
"""

from __future__ import annotations

import pathlib

from mirrored.verification import Cause
from tests.support.jobs import ROOT
from tests.verification.template import ADAM, AVERAGE, CLIP, LOSSES, SGD, SUM, Script

PROGRAMS = ROOT / "tests" / "programs" / "verification"

RIGHT = Script()
IN_ORDER = RIGHT.but(train="strategy.distribute_dataset(data, 8)")
REDUCED = RIGHT.but(run='loss = strategy.reduce("sum", strategy.run(train_step, args=batch))')
SHORT = IN_ORDER.but(epochs="4", steps=2)

CLASSES = """\
names = "cat dog bird fish lion wolf bear frog".split()
classes = {}"""
CLASSIFIED = "TensorDataset(inputs, torch.tensor([classes.index(names[i % 8]) % 3 for i in range(24)]))"

ACCUMULATING = IN_ORDER.but(
    examples=40,
    after=f"""\
def loss_of(x, y):
    return mirrored.compute_average_loss({LOSSES}, global_batch_size=8)
""",
    begin="""\
optimizer.zero_grad()
half = len(x) // 2
with strategy.no_sync():
    loss_of(x[:half], y[:half]).backward()""",
    loss="loss_of(x[half:], y[half:])",
)

AVERAGED = RIGHT.but(
    examples=43,
    after="""\
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
test = strategy.distribute_dataset(data, 16)


@torch.no_grad()
def test_step(x, y):
    return F.cross_entropy(average(x), y, reduction="sum"), len(y)
""",
    run="strategy.run(train_step, args=batch)\naverage.update_parameters(model)",
    end="""\
sums = [strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test]
strategy.print(sum(float(loss) for loss, _ in sums) / sum(count for _, count in sums))""",
)
"""A moving average of the weights, updated by all towers, is evaluated when all epochs are over."""

BY_THE_CHIEF = "strategy.run(train_step, args=batch)\nif strategy.is_chief:\n    average.update_parameters(model)"

BATCH_NORM = RIGHT.but(
    Cause.BATCH_NORM, model="nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))"
)

SYNC_BATCH_NORM = RIGHT.but(
    scope="strategy.scope(sync_batch_norm=True)",
    model="nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))",
    data="TensorDataset(inputs, torch.randn(len(inputs), 8))",
    loss="(model(x) * y).mean()",
)

FOLLOWING = """\
class Following(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("newest", torch.zeros(0), persistent=False)

    def forward(self, x):
        if self.training:
            sums = x.detach().sum(0), torch.tensor(float(len(x)))
            sums = SUMS
            self.mean.lerp_(sums[0] / sums[1], 0.1)
            self.calls += 1
            self.newest = x.detach()
        return x

"""
"""A layer that follows its inputs in buffers."""

BUFFERS = RIGHT.but(
    before=FOLLOWING.replace("SUMS", 'mirrored.get_replica_context().all_reduce("sum", sums)'),
    model="nn.Sequential(Following(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))",
    examples=48,
)

BY_HAND = IN_ORDER.but(
    model="nn.Linear(5, 3)",
    optimizer="None",
    begin="model.zero_grad()",
    update="""\
loss.backward()
with torch.no_grad():
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad
return loss.detach()""",
    epochs="1",
    run='strategy.reduce("sum", strategy.run(train_step, args=batch))',
)

ROUNDED = RIGHT.but(
    scope="strategy.scope(sync_batch_norm=True)",
    model="""\
nn.Sequential(
    nn.Linear(5, 16),
    *(module for _ in range(40) for module in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())),
    nn.Linear(16, 3),
)""",
    optimizer="torch.optim.Adam(model.parameters(), lr=0.1)",
    examples=65,
    train="strategy.distribute_dataset(data, 13, shuffle=True)",
    words="All runs computed in float64",
    steps=1,
)
"""A model that amplifies rounding errors, and shares of 7 and 6."""

PADDED = RIGHT.but(
    Cause.EVALUATION_PADDING,
    after="""\
test_set = TensorDataset(torch.randn(11, 5), torch.randint(0, 3, (11,)))
sampler = DistributedSampler(test_set, strategy.num_replicas_in_sync, strategy.topology.index, shuffle=False)
test = DataLoader(test_set, 4, sampler=sampler)""",
    epochs="2",
    evaluation="""\
with torch.no_grad():
    losses = torch.cat([F.cross_entropy(model(x), y, reduction="none") for x, y in test])
total, count = strategy.reduce("sum", (losses.sum(), len(losses)))
strategy.print(float(total) / count)""",
)
"""A sampler for evaluation repeats examples until all towers have as many."""


def failing(where: str, how: str = 'raise ValueError("planned failure")') -> str:
    """The strategy of a script that ends early where a condition holds."""
    return f"mirrored.MirroredStrategy()\nif {where}:\n    {how}"


SCRIPTS = {
    # Right.
    "autoencoder": RIGHT.but(  # convolutional, with BatchNorm over the global batch and a mean loss on even batches
        scope="strategy.scope(sync_batch_norm=True)",
        model="""\
nn.Sequential(
    *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
    *(nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
    *(nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)),
)""",
        optimizer=ADAM,
        data="TensorDataset(torch.rand(32, 1, 8, 8))",
        parameters="x",
        loss="F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x)",
        run='strategy.print(float(strategy.reduce("mean", strategy.run(train_step, args=batch))))',
    ),
    "noise": RIGHT.but(  # that run draws for each example (an autoencoder), and a factor drawn outside of it
        model="nn.ModuleList([nn.Linear(6, 4), nn.Linear(2, 6)])",
        optimizer=ADAM,
        data="TensorDataset(torch.rand(27, 6))",
        train="strategy.distribute_dataset(DataLoader(data, 8, shuffle=True))",
        parameters="x, factor",
        begin="""\
optimizer.zero_grad()
mean, spread = model[0](x).chunk(2, dim=1)
code = mean + spread.exp() * torch.randn_like(mean)
kept = (torch.rand(len(x), 1) < 0.9).float()""",
        loss=AVERAGE.format('F.mse_loss(model[1](code) * kept, factor * x, reduction="none").mean(1)'),
        run="strategy.run(train_step, args=(*batch, torch.rand(())))",
    ),
    "two models": RIGHT.but(  # with an optimizer each, BatchNorm in eval mode, and a mean loss on even batches
        model="nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4).eval())\ndecoder = nn.Linear(4, 6)",
        optimizer=f"{ADAM}\nsecond = torch.optim.Adam(decoder.parameters(), lr=0.01)",
        data="TensorDataset(torch.randn(24, 6))",
        train="strategy.distribute_dataset(data, 8)",
        parameters="x",
        begin="optimizer.zero_grad()\nsecond.zero_grad()",
        loss="(decoder(model(x)) - x).square().mean()",
        update="loss.backward()\noptimizer.step()\nsecond.step()\nreturn loss.detach()",
        run='strategy.reduce("mean", strategy.run(train_step, args=batch))',
    ),
    "ragged": REDUCED.but(
        strategy='mirrored.MirroredStrategy(["cpu:0", "cpu:1"])',
        optimizer=SGD.format("0.1, momentum=0.9"),
        examples=27,
        evaluation='strategy.print(f"epoch {epoch}: {float(loss):.4f}")',
    ),
    "local steps": RIGHT.but(strategy="mirrored.MirroredStrategy(synchronize=mirrored.DiLoCo(every=4), seed=0)"),
    "compression": RIGHT.but(
        strategy="mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(compression=mirrored.PowerSGD()))"
    ),
    "restarts": RIGHT.but(
        strategy="mirrored.MirroredStrategy(restarts=2, min_towers=1)",
        after="""\
checkpoints = mirrored.CheckpointManager(
    strategy, "checkpoints", {"model": model, "train": train}, every_steps=2, memory_every_steps=1
)
checkpoints.restore_newest()""",
        run="loss = strategy.run(train_step, args=batch)\ncheckpoints.step()",
    ),
    "virtual towers": RIGHT.but(
        strategy="mirrored.MirroredStrategy(virtual_towers=4, seed=0)",
        model="nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))",
        optimizer=ADAM,
        examples=40,
        train="strategy.distribute_dataset(data, 16, shuffle=True)",
        loss=f"strategy.backward(lambda x, y: {LOSSES}, x, y)",
        update="optimizer.step()\nreturn loss",
        run='strategy.reduce("mean", strategy.run(train_step, args=batch))',
        exact=True,
    ),
    "double": IN_ORDER.but(  # whose metrics are float32
        model="nn.Linear(5, 1, dtype=torch.float64)",
        optimizer=SGD.format(0.01),
        data="TensorDataset(torch.randn(27, 5, dtype=torch.float64))",
        parameters="x",
        begin="optimizer.zero_grad()\nlosses = (model(x)[:, 0] - x.sum(1)).square()",
        loss=AVERAGE.format("losses"),
        update="""\
loss.backward()
optimizer.step()
return losses.detach().float().sum(), torch.tensor(float(losses.detach().sum()))""",
        run=f"{REDUCED.run}\nstrategy.reduce('max', float(loss[0]))",
    ),
    "padded": RIGHT.but(  # to the longest sequence of each tower's own share
        model="nn.Linear(3, 1)",
        data="""\
[torch.randn(int(length), 3) for length in torch.randint(1, 9, (27,))]


def collate(sequences):
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True), lengths

""",
        train="strategy.distribute_dataset(data, 8, collate_fn=collate, shuffle=True)",
        parameters="x, lengths",
        begin="optimizer.zero_grad()\npresent = torch.arange(x.shape[1]) < lengths[:, None]",
        loss=AVERAGE.format("(model(x)[..., 0].square() * present).sum(1) / lengths"),
    ),
    "clip after accumulating": ACCUMULATING.but(update=f"loss.backward()\n{CLIP}\noptimizer.step()"),
    "averaged by all": AVERAGED,
    "averaged and evaluated by the chief": AVERAGED.but(
        run=BY_THE_CHIEF,
        end="""\
if strategy.is_chief:
    with torch.no_grad():
        print(float(F.cross_entropy(average(inputs), targets)))""",
    ),
    "averaged by all, many epochs": AVERAGED.but(epochs="200", words="Not reached:"),
    "buffers of all": BUFFERS,
    "sync batch norm of 24": SYNC_BATCH_NORM,
    "whole batches everywhere": SHORT.but(train="DataLoader(data, 8)", words="Every tower was given the whole batch"),
    # The mean over the examples of a tower, and a last batch or padding that is not the same on all of them.
    "local mean": RIGHT.but(Cause.LOCAL_MEAN, examples=83, loss="F.cross_entropy(model(x), y)"),
    "local mean of 81": RIGHT.but(
        Cause.LOCAL_MEAN, examples=81, loss="F.cross_entropy(model(x), y)", words="shares of 1 and 0"
    ),
    "sync batch norm of 27": SYNC_BATCH_NORM.but(Cause.LOCAL_MEAN, examples=27),
    # Sums, which averaging over the towers divides; right where gradients are summed, as in TensorFlow.
    "sum by hand": BY_HAND.but(Cause.SUM_LOSS, loss=SUM),
    "sum": REDUCED.but(Cause.SUM_LOSS, loss=f"{LOSSES}.sum()"),
    "sum and penalty": IN_ORDER.but(
        Cause.SUM_LOSS,
        optimizer=SGD.format(0.01),
        examples=27,
        begin="optimizer.zero_grad()\npenalty = sum(p.square().sum() for p in model.parameters())",
        loss=f"{LOSSES}.sum() + 0.1 * penalty",
    ),
    "sum over global": RIGHT.but(Cause.SUM_OVER_GLOBAL_BATCH, loss=f"{SUM} / 8"),
    "divided twice": REDUCED.but(
        Cause.DIVIDED_TWICE, loss=f"{SUM} / len(x)\nloss = loss / strategy.num_replicas_in_sync"
    ),
    "two mistakes": IN_ORDER.but(
        Cause.SUM_LOSS,
        Cause.LEARNING_RATE,
        model="nn.Linear(5, 3)",
        optimizer=SGD.format("0.01 * strategy.num_replicas_in_sync"),
        loss=SUM,
        epochs="1",
    ),
    "batch norm of 28": BATCH_NORM.but(examples=28),
    "batch norm of 26": BATCH_NORM.but(examples=26),
    "buffers of its own": BUFFERS.but(Cause.BUFFER, before=FOLLOWING.replace("SUMS", "sums")),
    "shared stream": RIGHT.but(
        Cause.SHARED_RANDOM_STREAM,
        model="nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))",
        parameters="x, y, seed",
        begin="torch.manual_seed(seed)\noptimizer.zero_grad()",
        run="strategy.run(train_step, args=(*batch, 1000 * epoch + step))",
    ),
    "weights above": SHORT.but(  # from which targets are made
        Cause.UNSEEDED, before="true = torch.randn(5, 3)", data="TensorDataset(inputs, (inputs @ true).argmax(1))"
    ),
    "split above": SHORT.but(
        Cause.UNSEEDED,
        before="import random\n\norder = list(range(24))\nrandom.shuffle(order)",
        data="TensorDataset(inputs[order[:16]], targets[order[:16]])",
    ),
    "seeded above": SHORT.but(
        before="torch.manual_seed(1)\ntrue = torch.randn(5, 3)",
        data="TensorDataset(inputs, (inputs @ true).argmax(1))",
    ),
    "order of a set": SHORT.but(Cause.HASH_ORDER, before=CLASSES.format("list(set(names))"), data=CLASSIFIED),
    "numbers of hashes": SHORT.but(Cause.HASH_ORDER, before=CLASSES.format("sorted(names, key=hash)"), data=CLASSIFIED),
    "order of a sorted set": SHORT.but(before=CLASSES.format("sorted(set(names))"), data=CLASSIFIED),
    "random order": SHORT.but(Cause.RANDOM_IN_RUN, loss=AVERAGE.format(f"{LOSSES} * (1 + torch.randperm(len(x)))")),
    # Values of a share, which are none of the batch.
    "spread of the share": SHORT.but(
        Cause.OVER_EXAMPLES,
        begin=f"optimizer.zero_grad()\nlosses = {LOSSES}",
        loss=AVERAGE.format("losses / losses.std()"),
    ),
    "normalised by hand": RIGHT.but(
        Cause.OVER_EXAMPLES,
        examples=27,
        begin="optimizer.zero_grad()\nx = (x - x.mean(0)) / (x.std(0, correction=0) + 0.1)",
    ),
    "counts of the share": RIGHT.but(
        Cause.OVER_EXAMPLES,
        examples=27,
        begin="optimizer.zero_grad()\nrarity = 1 / (torch.bincount(y, minlength=3) + 1)",
        loss=AVERAGE.format(f"rarity[y] * {LOSSES}"),
    ),
    "ratio of sums": RIGHT.but(
        Cause.OVER_EXAMPLES,
        examples=27,
        begin=f"optimizer.zero_grad()\npositive = (y == 1).float()\nlosses = {LOSSES}",
        loss="(losses * positive).sum() / positive.sum().clamp(min=1)",
    ),
    "variance as a penalty": RIGHT.but(
        Cause.OVER_EXAMPLES,
        examples=27,
        begin="optimizer.zero_grad()\noutput = model(x)",
        loss=AVERAGE.format('F.cross_entropy(output, y, reduction="none")') + " + 0.1 * output.var()",
    ),
    "root of the mean": RIGHT.but(Cause.OVER_EXAMPLES, loss="(model(x) - F.one_hot(y, 3)).square().mean().sqrt()"),
    "norm of the share": RIGHT.but(Cause.OVER_EXAMPLES, loss="(model(x) - F.one_hot(y, 3)).norm()"),
    "worst of the share": RIGHT.but(Cause.OVER_EXAMPLES, loss=f"{LOSSES}.max()"),
    "median of the share": RIGHT.but(Cause.OVER_EXAMPLES, loss=f"{LOSSES}.median()"),
    "hardest of the share": RIGHT.but(
        Cause.UNKNOWN,
        begin=f"optimizer.zero_grad()\nlosses = {LOSSES}",
        loss="losses.topk(max(1, len(x) // 2)).values.mean()",
    ),
    # Towers that differ from each other.
    "outside scope": RIGHT.but(
        Cause.OUTSIDE_SCOPE,
        model="nn.Linear(5, 3)",
        after="""\
model.scale = nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)""",
        loss=AVERAGE.format('F.cross_entropy(model(x) * model.scale, y, reduction="none")'),
    ),
    "changed on one tower": RIGHT.but(
        Cause.CHANGED_ON_ONE_TOWER,
        run="""\
strategy.run(train_step, args=batch)
if step == 1 and strategy.is_chief:
    with torch.no_grad():
        model[2].weight.clamp_(-0.1, 0.1)""",
    ),
    "change and fail": SHORT.but(
        Cause.CHANGED_ON_ONE_TOWER,
        run="""\
strategy.run(train_step, args=batch)
if strategy.num_replicas_in_sync > 1:
    if strategy.is_chief:
        model[0].bias.data.zero_()
    raise mirrored.MirrorError("a check has found a difference")""",
    ),
    "gradient on one tower": SHORT.but(
        Cause.CHANGED_ON_ONE_TOWER,
        update=f"""\
loss.backward()
if strategy.is_chief and strategy.num_replicas_in_sync > 1:
    {CLIP.replace("0.05", "0.01")}
optimizer.step()""",
    ),
    "averaged by the chief": AVERAGED.but(Cause.CHANGED_ON_ONE_TOWER, run=BY_THE_CHIEF),
    "averaged by the chief, many epochs": AVERAGED.but(run=BY_THE_CHIEF, epochs="200", words="Not reached:"),
    "clip while accumulating": ACCUMULATING.but(
        Cause.CHANGED_BEFORE_AVERAGING, begin=f"{ACCUMULATING.begin}\n    {CLIP}"
    ),
    "hook while accumulating": ACCUMULATING.but(
        Cause.CHANGED_BEFORE_AVERAGING,
        after=f"model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))\n{ACCUMULATING.after}",
    ),
    "step before averaging": RIGHT.but(
        Cause.STEP_BEFORE_AVERAGING, update="with strategy.no_sync():\n    loss.backward()\n    optimizer.step()"
    ),
    # Other examples than those of one tower.
    "sharded twice": RIGHT.but(
        Cause.SHARDED_TWICE,
        examples=48,
        data="""\
TensorDataset(
    inputs[strategy.topology.index :: strategy.num_replicas_in_sync],
    targets[strategy.topology.index :: strategy.num_replicas_in_sync],
)""",
    ),
    "sharded in step": RIGHT.but(
        Cause.SHARDED_TWICE,
        examples=48,
        begin="""\
optimizer.zero_grad()
own = slice(strategy.topology.index, None, strategy.num_replicas_in_sync)""",
        loss="F.cross_entropy(model(x[own]), y[own])",
    ),
    "full batches": SHORT.but(
        Cause.OTHER_DATA,
        train="""\
DataLoader(
    data, 8, sampler=DistributedSampler(data, strategy.num_replicas_in_sync, strategy.topology.index)
)""",
    ),
    "evaluation padded": PADDED,
    "evaluation drops": PADDED.but(
        Cause.EVALUATION_DROPS, after=PADDED.after.replace("shuffle=False", "shuffle=False, drop_last=True"), steps=1
    ),
    # Other steps.
    "learning rate": RIGHT.but(
        Cause.LEARNING_RATE,
        optimizer=SGD.format("0.1 * strategy.num_replicas_in_sync"),
        after="schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)",
        update="loss.backward()\noptimizer.step()\nschedule.step()",
    ),
    "schedule": RIGHT.but(
        Cause.SCHEDULE,
        after="schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)",
        run="""\
strategy.run(train_step, args=batch)
for _ in range(strategy.num_replicas_in_sync):
    schedule.step()""",
    ),
    "mean of shares": SHORT.but(
        Cause.REPORTED_VALUE, run='loss = strategy.run(train_step, args=batch)\nstrategy.reduce("mean", loss)'
    ),
    "rounding alone": ROUNDED,
    "hidden by rounding": ROUNDED.but(Cause.LOCAL_MEAN, loss="F.cross_entropy(model(x), y)"),
    # The optimizer, and what decides about it.
    "momentum by towers": RIGHT.but(
        Cause.OPTIMIZER_SETTING, optimizer=SGD.format("0.1, momentum=0.5 * strategy.num_replicas_in_sync")
    ),
    "decay by towers": RIGHT.but(
        Cause.OPTIMIZER_SETTING, optimizer=SGD.format("0.1, weight_decay=0.1 * strategy.num_replicas_in_sync")
    ),
    "betas by towers": RIGHT.but(
        Cause.OPTIMIZER_SETTING,
        optimizer="torch.optim.Adam(model.parameters(), betas=(0.9, 0.998 + 0.001 / strategy.num_replicas_in_sync))",
    ),
    "warm-up by towers": RIGHT.but(
        Cause.LEARNING_RATE,
        after="""\
warm_up = 4 / strategy.num_replicas_in_sync
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: min(1.0, (steps + 1) / warm_up))""",
        run="loss = strategy.run(train_step, args=batch)\nschedule.step()",
    ),
    "own loss decides": RIGHT.but(
        Cause.CHANGED_ON_ONE_TOWER,
        after="plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
        run="loss = strategy.run(train_step, args=batch)\nplateau.step(float(loss))",
        steps=8,
    ),
    "ends by its own loss": RIGHT.but(
        Cause.STEPS,
        before="import sys",
        examples=27,
        run="loss = strategy.run(train_step, args=batch)\nif epoch and float(loss) < 0.4:\n    sys.exit()",
        epochs="6",
        steps=20,
    ),
    "a dot product": IN_ORDER.but(
        Cause.LOSS_SCALE,
        examples=40,
        loss=f"{LOSSES} @ torch.full((len(x),), 1 / 8)",
    ),
    "divided by hand": RIGHT.but(
        Cause.CHANGED_AFTER_AVERAGING,
        update="""\
loss.backward()
for parameter in model.parameters():
    parameter.grad /= strategy.num_replicas_in_sync
optimizer.step()
return loss.detach()""",
    ),
    "summed by hand": RIGHT.but(
        Cause.CHANGED_AFTER_AVERAGING,
        update="""\
loss.backward()
for parameter in model.parameters():
    parameter.grad = mirrored.get_replica_context().all_reduce("sum", parameter.grad)
optimizer.step()
return loss.detach()""",
    ),
    "clipped by towers": RIGHT.but(
        Cause.CHANGED_AFTER_AVERAGING,
        update="""\
loss.backward()
nn.utils.clip_grad_norm_(model.parameters(), 0.1 / strategy.num_replicas_in_sync)
optimizer.step()
return loss.detach()""",
    ),
    "changed alike": RIGHT.but(
        update="""\
loss.backward()
for parameter in model.parameters():
    parameter.grad *= 0.5
nn.utils.clip_grad_norm_(model.parameters(), 0.1)
optimizer.step()
return loss.detach()""",
    ),
    "class weights": RIGHT.but(Cause.LOCAL_MEAN, loss="F.cross_entropy(model(x), y, weight=torch.arange(1.0, 4.0))"),
    "mean over the batch": RIGHT.but(
        Cause.LOCAL_MEAN,
        examples=27,
        loss='F.kl_div(F.log_softmax(model(x), 1), F.one_hot(y, 3).float(), reduction="batchmean")',
    ),
    "a model that computes its loss": RIGHT.but(
        Cause.LOCAL_MEAN,
        before="""\
class Classifier(nn.Linear):
    def forward(self, x, y):
        return {"loss": F.cross_entropy(super().forward(x), y)}

""",
        model="Classifier(5, 3)",
        examples=27,
        loss='model(x, y)["loss"]',
        words="as loss.expand(len(batch))",
    ),
    "slopes": RIGHT.but(
        Cause.LOCAL_MEAN,
        examples=27,
        begin="""\
optimizer.zero_grad()
x.requires_grad_()
output = model(x)
(slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)""",
        loss="F.cross_entropy(output, y) + slope.norm(dim=1).sub(1).square().mean()",
    ),
    "accuracy of shares": RIGHT.but(
        Cause.REPORTED_VALUE,
        examples=27,
        after="""\
def right(x, y):
    return (model(x).argmax(1) == y).float().mean()
""",
        evaluation="""\
values = [float(strategy.reduce("mean", strategy.run(right, args=batch))) for batch in train]
print("accuracy", sum(values) / len(values))""",
        words="a mean of the towers' means is not the mean",
    ),
    # Numbers that the chief prints.
    "prints a share": RIGHT.but(
        Cause.PRINTED_VALUE, evaluation="print('loss', float(loss))", words="use strategy.reduce('sum', value)"
    ),
    "prints a count": RIGHT.but(
        Cause.PRINTED_VALUE,
        evaluation="""\
right = 0
for x, y in train:
    with torch.no_grad():
        right += int((model(x).argmax(1) == y).sum())
print(f"{right} of {len(inputs)}")""",
        words="use strategy.reduce('sum', value)",
    ),
    "writes a share": RIGHT.but(  # which a table has, whose times differ
        Cause.PRINTED_VALUE,
        before="import csv",
        after='table = csv.writer(open(f"{os.path.dirname(__file__)}/table.csv", "w", newline=""))',
        run="loss = strategy.run(train_step, args=batch)\ntable.writerow([step, time.perf_counter(), float(loss)])",
        words="into table.csv (line",
    ),
    "saves a share": RIGHT.but(
        Cause.PRINTED_VALUE,
        run="loss = strategy.run(train_step, args=batch)",
        end='torch.save({"epoch": epoch, "loss": loss}, f"{os.path.dirname(__file__)}/last.pt")',
        words="into last.pt (line",
    ),
    "writes a share for TensorBoard": RIGHT.but(
        Cause.PRINTED_VALUE,
        after='writer = strategy.summary_writer(f"{os.path.dirname(__file__)}/events")',
        run='writer.add_scalar("loss", strategy.run(train_step, args=batch), step)',
        words="into TensorBoard (line",
    ),
    "draws a share": RIGHT.but(
        Cause.PRINTED_VALUE,
        before="import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt",
        after="losses = []",
        run="losses.append(float(strategy.run(train_step, args=batch)))",
        end="plt.plot(losses)\nplt.savefig(f'{os.path.dirname(__file__)}/losses.png')",
        epochs="1",
        words="into losses.png (line",
    ),
    "writes an average of shares": RIGHT.but(
        Cause.PRINTED_VALUE,
        before="import json, pathlib",
        evaluation="""\
with torch.no_grad():
    losses = [float(F.cross_entropy(model(x), y)) for x, y in train]
if strategy.is_chief:
    file = pathlib.Path(__file__).with_name("loss.json")
    file.write_text(json.dumps({"epoch": epoch, "loss": sum(losses) / len(losses)}, indent=2))""",
        words="into loss.json (line",
    ),
    "writes the whole": RIGHT.but(  # with the number of towers and a tower's batch size
        before="import json",
        after="""\
folder = os.path.dirname(__file__)
with open(f"{folder}/settings.json", "w") as file:
    json.dump({"towers": strategy.num_replicas_in_sync, "batch": 8 // strategy.num_replicas_in_sync}, file)
print("batch", 8 // strategy.num_replicas_in_sync)""",
        run="loss = strategy.reduce('sum', strategy.run(train_step, args=batch))",
        evaluation="""\
with open(f"{folder}/log.txt", "a") as file:
    print(f"epoch {epoch}: loss {float(loss):.4f}, {time.perf_counter():.1f} s", file=file)""",
    ),
    "prints what may differ": RIGHT.but(
        before="import sys\n\nsys.stdout.reconfigure(errors='replace')\nprint('ä'.encode(sys.stdout.encoding))",
        run="loss = strategy.reduce('sum', strategy.run(train_step, args=batch))",
        evaluation="""\
seconds = time.perf_counter() / strategy.num_replicas_in_sync
print(f"{strategy.num_replicas_in_sync} towers, epoch {epoch}: loss {float(loss):.4f}, {seconds:.0f} s")
print(f"{8 / seconds:.1f} examples/s, took {seconds}", f"ratio {time.perf_counter():.3f}")""",
    ),
    "evaluated by the chief": RIGHT.but(
        evaluation="""\
if strategy.is_chief:
    model.eval()
    with torch.no_grad():
        print("accuracy", float((model(inputs).argmax(1) == targets).float().mean()))
    model.train()""",
    ),
    "no gradients": RIGHT.but(
        Cause.NOTHING_TRAINED, loss=AVERAGE.format(f"0 * {LOSSES}"), words="all gradients are zero"
    ),
    "epochs": SHORT.but(Cause.STEPS, epochs="4 // strategy.num_replicas_in_sync", steps=20),
    "no training": SHORT.but(Cause.NOTHING_TRAINED, epochs="0"),
    "steps by hand": BY_HAND,
    # Runs that end before their time, or cannot be compared.
    "error everywhere": SHORT.but(Cause.FAILS_EVERYWHERE, before='raise ValueError("planned failure")'),
    "error on one": SHORT.but(Cause.FAILS_ON_ONE, strategy=failing("strategy.num_replicas_in_sync == 1")),
    "error on towers": SHORT.but(Cause.FAILS_ON_TOWERS, strategy=failing("strategy.topology.index == 1")),
    "death": SHORT.but(Cause.FAILS_ON_TOWERS, strategy=failing("strategy.topology.index == 1", "os._exit(3)")),
    "no towers": SHORT.but(Cause.NO_TOWERS, strategy="mirrored.OneDeviceStrategy()"),
    "from the clock": SHORT.but(
        Cause.NOT_REPRODUCIBLE,
        strategy="""\
mirrored.MirroredStrategy()
torch.manual_seed(time.time_ns())
strategy = mirrored.MirroredStrategy()""",
    ),
}
"""By what is made of the right one."""


def script_in(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The file of a script: one of :data:`SCRIPTS`, which is written into ``folder``, or a program of the tests."""
    if name not in SCRIPTS:
        return PROGRAMS / f"{name}.py"
    path = folder / f"{name}.py"
    path.write_text(SCRIPTS[name].text())
    return path
