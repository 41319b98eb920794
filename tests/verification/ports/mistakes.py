"""Mistakes that users make, each planted into one of the right scripts of this folder."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from mirrored.verification import Cause

PORTS = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A change of a right script that makes it wrong, and the answer that verify must give.

    Attributes:
        port: the script's name, without ".py".
        old: a text that occurs once in the script.
        new: its replacement.
        causes: those that are right answers; none if the report is a note on what each tower draws.
        line: a piece of the line that verify is to name; "" if there is no such line.
    """

    port: str
    old: str
    new: str
    causes: tuple[Cause, ...]
    line: str = ""


def text_of(mistake: Mistake) -> str:
    """The text of the script with the mistake."""
    text = (PORTS / f"{mistake.port}.py").read_text()
    if text.count(mistake.old) != 1:
        raise ValueError(f"{mistake.port}: {mistake.old!r} occurs {text.count(mistake.old)} times")
    return text.replace(mistake.old, mistake.new)


def is_named(mistake: Mistake, causes: Sequence[Cause], report: str) -> bool:
    """Whether verify has named a mistake.

    Args:
        report: the text of the report in one line.
    """
    lines = {number for found in re.findall(r"lines? ([\d, ]+)", report) for number in re.findall(r"\d+", found)}
    wanted = {str(i) for i, line in enumerate(text_of(mistake).splitlines(), start=1) if mistake.line in line}
    right = set(causes) <= set(mistake.causes) and bool(causes) == bool(mistake.causes)
    return right and (not mistake.line or bool(lines & wanted))


MISTAKES = [
    Mistake(
        "mnist",
        'mirrored.compute_average_loss(F.nll_loss(output, target, reduction="none"))',
        "F.nll_loss(output, target)",
        (Cause.LOCAL_MEAN,),
        "loss.backward()",
    ),
    Mistake(
        "mnist",
        '            loss = strategy.reduce("sum", loss)\n',
        "",
        (Cause.PRINTED_VALUE,),
        "Train Epoch:",
    ),
    Mistake(
        "mnist",
        "lr=args.lr)",
        "lr=args.lr * strategy.num_replicas_in_sync)",
        (Cause.LEARNING_RATE,),
        "num_replicas_in_sync",
    ),
    Mistake(
        "vae",
        "mirrored.compute_average_loss(losses, global_batch_size=1)  # the sum, as before",
        "losses.sum()",
        (Cause.SUM_LOSS,),
        "loss.backward()",
    ),
    Mistake(
        "vae",
        "        optimizer.zero_grad()\n",
        "        torch.manual_seed(1)  # the same noise in each run\n        optimizer.zero_grad()\n",
        (Cause.SHARED_RANDOM_STREAM,),
        "torch.randn_like(std)",
    ),
    Mistake(
        "vae",
        '        train_loss = strategy.reduce("sum", train_loss)\n',
        "",
        (Cause.PRINTED_VALUE,),
        "====> Epoch:",
    ),
    Mistake(
        "imagenet", "strategy.scope(sync_batch_norm=True)", "strategy.scope()", (Cause.BATCH_NORM,), "strategy.scope()"
    ),
    Mistake(
        "imagenet",
        "    val_loader = strategy.distribute_dataset(val_set, args.batch_size)\n",
        """\
    val_sampler = torch.utils.data.DistributedSampler(
        val_set, strategy.num_replicas_in_sync, strategy.topology.index, shuffle=False
    )
    val_loader = torch.utils.data.DataLoader(val_set, args.batch_size, sampler=val_sampler)
""",
        (Cause.EVALUATION_PADDING,),
        "output = model(images)",
    ),
    Mistake(
        "imagenet",
        "scheduler.step(val_loss)",
        "scheduler.step(float(losses.total) / losses.count)",
        (Cause.REPORTED_VALUE,),
        "scheduler.step(",
    ),
    Mistake(
        "word_language_model",
        "mirrored.compute_average_loss(losses_of(output, targets))",
        "F.cross_entropy(output.flatten(0, 1), targets.flatten())",
        (Cause.LOCAL_MEAN,),
        "loss.backward()",
    ),
    Mistake(
        "word_language_model",
        "    columns = batchify(text[:300], args.batch_size)\n",
        """\
    columns = batchify(text[:300], args.batch_size)
    columns = columns[:, strategy.topology.index :: strategy.num_replicas_in_sync]
""",
        (Cause.FAILS_ON_TOWERS,),
        "columns[:, strategy.topology.index",
    ),
    Mistake(
        "word_language_model",
        '        total_loss, count = strategy.reduce("sum", (total_loss, count))\n',
        "",
        (Cause.PRINTED_VALUE, Cause.CHANGED_ON_ONE_TOWER, Cause.LEARNING_RATE),
        "end of epoch",
    ),
    Mistake(
        "time_sequence",
        'return strategy.reduce("sum", loss.detach())',
        "return loss.detach()",
        (Cause.CHANGED_ON_ONE_TOWER,),
        "optimizer.step(closure)",
    ),
    Mistake(
        "time_sequence",
        "mirrored.compute_average_loss(criterion(out, target).mean(1))",
        "criterion(out, target).mean()",
        (Cause.LOCAL_MEAN,),
        "loss.backward()",
    ),
    Mistake(
        "time_sequence",
        """\
    strategy = mirrored.MirroredStrategy(seed=0)
    shift = np.random.randint(-80, 80, (args.waves, 1))
""",
        """\
    shift = np.random.randint(-80, 80, (args.waves, 1))
    strategy = mirrored.MirroredStrategy(seed=0)
""",
        (Cause.UNSEEDED,),
        "np.random.randint(-80",
    ),
    Mistake(
        "reinforce",
        'baseline = strategy.reduce("mean", returns, axis=0)',
        "baseline = returns.mean()",
        (Cause.OVER_EXAMPLES,),
        "baseline = returns.mean()",
    ),
    Mistake(
        "reinforce",
        "torch.multinomial(choices.detach().exp(), 1, generator=generator)",
        "torch.multinomial(choices.detach().exp(), 1)",
        (Cause.RANDOM_IN_RUN,),
        "torch.multinomial(",
    ),
    Mistake(
        "reinforce",
        'mean = strategy.reduce("mean", rewards, axis=0)',
        "mean = rewards.mean()",
        (Cause.PRINTED_VALUE,),
        "Last reward:",
    ),
    Mistake(
        "super_resolution",
        """\
        errors = F.mse_loss(model(inputs), target, reduction="none").mean((1, 2, 3))
        loss = mirrored.compute_average_loss(errors)
""",
        "        loss = F.mse_loss(model(inputs), target)\n",
        (Cause.LOCAL_MEAN,),
        "loss.backward()",
    ),
    Mistake(
        "super_resolution",
        "(10 * torch.log10(1 / mse)).sum()",
        "10 * torch.log10(1 / mse.mean()) * len(mse)",
        (Cause.REPORTED_VALUE,),
        "psnr = sum(",
    ),
    Mistake(
        "super_resolution",
        "return torch.stack(inputs), torch.stack(targets)",
        "return torch.stack(inputs) + 0.05 * torch.randn(len(inputs), 1, 8, 8), torch.stack(targets)",
        (Cause.OTHER_DATA,),
        "0.05 * torch.randn(",
    ),
    Mistake(
        "gcn",
        "loss + mirrored.scale_regularization_loss(penalty)",
        "loss + penalty",
        (Cause.REPORTED_VALUE,),
        'strategy.reduce("sum", loss)',
    ),
    Mistake(
        "gcn",
        '            loss, right, count = strategy.reduce("sum", (loss, right, count))\n',
        "",
        (Cause.PRINTED_VALUE,),
        "val {val_loss",
    ),
    Mistake(
        "gcn",
        """\
    with strategy.scope():
        gcn = GCN(inputs=4, hidden=16, classes=4)
        optimizer = torch.optim.Adam(gcn.parameters(), lr=args.lr)
""",
        """\
    gcn = GCN(inputs=4, hidden=16, classes=4).to(strategy.device)
    optimizer = torch.optim.Adam(gcn.parameters(), lr=args.lr)
""",
        (Cause.OUTSIDE_SCOPE,),
        "gcn = GCN(",
    ),
    Mistake(
        "translation",
        'mirrored.compute_average_loss(losses, sample_weight=present, denominator="weights")',
        "(losses * present).sum() / present.sum()",
        (Cause.LOCAL_MEAN,),
        "loss.backward()",
    ),
    Mistake("translation", "            src_key_padding_mask=padded,\n", "", (Cause.PADDING,), ".backward()"),
    Mistake(
        "translation",
        "mirrored.drop_stand_in(*token_losses(source, target))",
        "token_losses(source, target)",
        (Cause.REPORTED_VALUE, Cause.EVALUATION_PADDING),
        'strategy.reduce("sum", (valid_loss, tokens))',
    ),
    Mistake(
        "forward_forward",
        "mirrored.compute_average_loss(losses / 2)",
        "losses.mean() / 2",
        (Cause.LOCAL_MEAN,),
        "loss.backward()",
    ),
    Mistake("forward_forward", "nn.ModuleList(", "list(", (Cause.OUTSIDE_SCOPE,), "net = Net("),
    Mistake(
        "forward_forward",
        "return net.learn(positive, negative)",
        "return net.learn(positive, overlay(x, y[torch.randperm(len(y))]))",
        (Cause.RANDOM_IN_RUN,),
        "torch.randperm(",
    ),
    Mistake(
        "nanogpt",
        "accumulation_steps = args.gradient_accumulation_steps\n",
        "accumulation_steps = args.gradient_accumulation_steps // strategy.num_replicas_in_sync\n",
        (Cause.OTHER_DATA, Cause.STEPS),
        "num_replicas_in_sync",
    ),
    Mistake(
        "nanogpt",
        """\
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
""",
        """\
        nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        if last:
""",
        (Cause.CHANGED_BEFORE_AVERAGING,),
        "clip_grad_norm_",
    ),
    Mistake(
        "nanogpt",
        "contextlib.nullcontext() if last else strategy.no_sync()",
        "strategy.no_sync() if accumulation_steps > 1 else contextlib.nullcontext()",
        (Cause.STEP_BEFORE_AVERAGING,),
        "optimizer.step()",
    ),
    Mistake(
        "sorter",
        "mirrored.compute_average_loss(losses)",
        "losses.mean()",
        (Cause.LOCAL_MEAN,),
        "loss.backward()",
    ),
    Mistake(
        "sorter",
        "while self.iter_num < self.args.max_iters:",
        "while self.iter_num < self.args.max_iters // self.strategy.num_replicas_in_sync:",
        (Cause.STEPS,),
        "num_replicas_in_sync",
    ),
    Mistake(
        "sorter",
        'right, count = strategy.reduce("sum", (results.sum(), len(results)))',
        "right, count = results.sum(), len(results)",
        (Cause.PRINTED_VALUE,),
        "final score:",
    ),
    Mistake(
        "diffusion",
        "            ema.update(model)\n",
        "            if strategy.is_chief:\n                ema.update(model)\n",
        (Cause.CHANGED_ON_ONE_TOWER,),
        "if strategy.is_chief:",
    ),
    Mistake(
        "diffusion",
        "return weights * errors",
        "return weights / weights.mean() * errors",
        (Cause.OVER_EXAMPLES,),
        "weights.mean()",
    ),
    Mistake(
        "diffusion",
        "torch.randint(0, args.timesteps, (len(x),))",
        "torch.randint(0, args.timesteps, (1,)).expand(len(x))",
        (),
        "torch.randint(0, args.timesteps, (1,))",
    ),
    Mistake(
        "simclr",
        """\
    replica = mirrored.get_replica_context()
    sizes = replica.all_gather(torch.tensor([len(first)]), 0)
    begin = int(sizes[: replica.replica_id_in_sync_group].sum())
    every_first, every_second = replica.all_gather(first, 0), replica.all_gather(second, 0)
    own = begin + torch.arange(len(first))
""",
        """\
    every_first, every_second = first, second
    own = torch.arange(len(first))
""",
        (Cause.PAIRS_OF_EXAMPLES,),
        "one @",
    ),
    Mistake(
        "simclr",
        "    every_first, every_second = replica.all_gather(first, 0), replica.all_gather(second, 0)\n",
        """\
    every_first, every_second = replica.all_gather(first.detach(), 0), replica.all_gather(second.detach(), 0)
    every_first[begin : begin + len(first)] = first  # only these have gradients
    every_second[begin : begin + len(second)] = second
""",
        (Cause.GATHERED_WITHOUT_GRADIENT,),
        "all_gather(first.detach(), 0)",
    ),
    Mistake(
        "simclr",
        "begin = int(sizes[: replica.replica_id_in_sync_group].sum())",
        "begin = 0",
        (Cause.UNKNOWN,),
        "all_gather(first, 0)",
    ),
    Mistake(
        "distillation",
        """\
    def train_step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
""",
        """\
    teacher.register_buffer("centre", torch.zeros(10))

    def train_step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            teacher_logits = teacher(inputs)
            teacher.centre.lerp_(teacher_logits.mean(0), 0.1)
            teacher_logits = teacher_logits - teacher.centre
""",
        (Cause.OVER_EXAMPLES, Cause.BUFFER),
        "teacher.centre.lerp_",
    ),
    Mistake("distillation", "    teacher.eval()\n", "", (Cause.BATCH_NORM,), "strategy.scope()"),
    Mistake(
        "distillation",
        """\
    strategy = mirrored.MirroredStrategy(seed=42)
    teacher = make_teacher()
""",
        """\
    teacher = make_teacher()
    strategy = mirrored.MirroredStrategy(seed=42)
""",
        (Cause.UNSEEDED,),
        "nn.Conv2d(",
    ),
    Mistake(
        "recommender",
        "mirrored.compute_average_loss(args.reg * penalty)",
        "args.reg * penalty.mean()",
        (Cause.LOCAL_MEAN,),
        "loss.backward()",
    ),
    Mistake(
        "recommender",
        'rmse = (strategy.reduce("sum", squares) / len(test_set)).sqrt()',
        'rmse = strategy.reduce("mean", (squares * strategy.num_replicas_in_sync / len(test_set)).sqrt())',
        (Cause.REPORTED_VALUE,),
        "rmse = ",
    ),
    Mistake(
        "recommender",
        "    train_loader = strategy",
        """\
    own = range(strategy.topology.index, len(train_set), strategy.num_replicas_in_sync)
    train_set = torch.utils.data.Subset(train_set.dataset, [train_set.indices[i] for i in own])
    train_loader = strategy""",
        (Cause.SHARDED_TWICE,),
        "strategy.topology.index",
    ),
    Mistake(
        "gan",
        "        net_d = Discriminator(8)\n",
        "    net_d = Discriminator(8)\n",
        (Cause.OUTSIDE_SCOPE,),
        "net_d = Discriminator(8)",
    ),
    Mistake(
        "gan",
        "err_g = mirrored.compute_average_loss(criterion(output, torch.ones_like(output)))",
        "err_g = criterion(output, torch.ones_like(output)).mean()",
        (Cause.LOCAL_MEAN,),
        "err_g.backward()",
    ),
    Mistake(
        "gan",
        '            err_d, err_g = strategy.reduce("sum", (err_d, err_g))\n',
        "",
        (Cause.PRINTED_VALUE,),
        "Loss_D:",
    ),
    Mistake(
        "unet",
        '    overlap, size = mirrored.get_replica_context().all_reduce("sum", (overlap, size))\n',
        "",
        (Cause.OVER_EXAMPLES,),
        "overlap",
    ),
    Mistake(
        "unet",
        "        loss.backward()\n",
        "        (loss / strategy.num_replicas_in_sync).backward()\n",
        (Cause.DIVIDED_TWICE,),
        "num_replicas_in_sync",
    ),
    Mistake(
        "unet",
        'strategy.reduce("sum", dice_score).item() / len(val_set)',
        "dice_score.item() * strategy.num_replicas_in_sync / len(val_set)",
        (Cause.REPORTED_VALUE,),
        "scheduler.step(",
    ),
    Mistake(
        "multi_task",
        'mirrored.compute_average_loss(classified, sample_weight=present, denominator="weights")',
        "classified.sum() / present.sum().clamp(min=1)",
        (Cause.LOCAL_MEAN,),
        "loss.backward()",
    ),
    Mistake(
        "multi_task",
        "        model = MultiTask(6, 16, classes=3, kinds=2)\n",
        """\
        model = MultiTask(6, 16, classes=3, kinds=2)
    model.log_variances = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in ("label", "value")})
""",
        (Cause.OUTSIDE_SCOPE,),
        "model.log_variances =",
    ),
    Mistake(
        "multi_task",
        """\
    def scaled(losses: Tensor, task: str) -> Tensor:
        \"\"\"Losses, divided by their own learnt variance.\"\"\"
        return losses * torch.exp(-model.log_variances[task])
""",
        """\
    averages: dict[str, float] = {}

    def scaled(losses: Tensor, task: str) -> Tensor:
        \"\"\"Losses, divided by their own running mean.\"\"\"
        averages[task] = 0.9 * averages.get(task, 1.0) + 0.1 * losses.mean().item()
        return losses / averages[task]
""",
        (Cause.OVER_EXAMPLES,),
        "averages[task] =",
    ),
    Mistake(
        "fixmatch",
        "loss_u = mirrored.compute_average_loss(losses_u, batch=weak)",
        "loss_u = losses_u.sum() / mask.sum().clamp(min=1)",
        (Cause.LOCAL_MEAN,),
        "loss.backward()",
    ),
    Mistake(
        "fixmatch",
        "        scheduler.step()\n",
        "        if strategy.is_chief:\n            scheduler.step()\n",
        (Cause.CHANGED_ON_ONE_TOWER, Cause.SCHEDULE, Cause.LEARNING_RATE),
        "if strategy.is_chief:",
    ),
    Mistake(
        "fixmatch",
        "mask = (confidence >= args.threshold).float()",
        "mask = (confidence >= confidence.mean()).float()",
        (Cause.OVER_EXAMPLES,),
        "confidence.mean()",
    ),
    Mistake(
        "multi_task",
        'mirrored.compute_average_loss(scaled(estimated, "value"))',
        'scaled(mirrored.compute_average_loss(estimated), "value")',
        (Cause.FAILS_ON_TOWERS,),
        "loss.backward()",
    ),
]
