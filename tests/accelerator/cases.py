"""What towers on any accelerator have to do, however they communicate: run there by test modules, two towers each.

Functions return what JSON can hold.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import os
import pathlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import mirrored
from tests import simulated_device
from tests.faults import training
from tests.support.jobs import assert_close, make_data, make_mlp, strategy_of, text_of
from towers.gradients import flags

SIMULATED = os.environ.get("MIRRORED_TEST_DEVICE") in ("sim", "tpu")


def flat(tensors: Any) -> list[float]:
    """The numbers of some tensors, in order."""
    numbers: list[float] = torch.cat([tensor.detach().double().flatten().cpu() for tensor in tensors]).tolist()
    return numbers


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Inside, an exception is raised where the host waits for the device."""
    torch.accelerator.synchronize()
    if SIMULATED:
        simulated_device.load().make_waiting_an_error(True)
    elif torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if SIMULATED:
            simulated_device.load().make_waiting_an_error(False)
        elif torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def train(options: dict[str, Any], compiled: bool = False, **settings: Any) -> list[Any]:
    """The backend, and after some steps parameters and losses; the last batch is ragged, one layer never used."""
    communication = mirrored.CommunicationOptions(**options)
    strategy = strategy_of({"communication": communication, **settings})
    model = make_mlp()  # on the CPU
    weight = model[0].weight
    strategy.mirror(model)
    assert weight is model[0].weight
    assert weight.device == strategy.device
    with strategy.scope():
        unused = torch.nn.Linear(3, 3, dtype=torch.float64)
        optimizer = torch.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.1, momentum=0.9)
    data = strategy.distribute_dataset(TensorDataset(*make_data(22)), 8, shuffle=True)
    backend = "aot_eager" if SIMULATED else "inductor"
    called = torch.compile(model, backend=backend) if compiled else model

    def losses_of(x: Tensor, y: Tensor) -> Tensor:
        assert x.device == strategy.device
        return F.cross_entropy(called(x), y, reduction="none")

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        if strategy.virtual_towers is not None:
            loss = strategy.backward(losses_of, x, y)
        else:
            loss = mirrored.compute_average_loss(losses_of(x, y))
            loss.backward()
        optimizer.step()
        return loss

    op = "sum" if strategy.virtual_towers is None else "mean"  # strategy.backward gives the loss of all towers
    losses = [strategy.reduce(op, strategy.run(step, args=batch)) for _ in range(2) for batch in data]
    assert unused.weight.grad is None
    return [strategy.communicator.backend, flat(model.parameters()), flat(losses)]


def accumulate(**settings: Any) -> list[float]:
    """Gradients that are added up under no_sync, and clipped."""
    strategy = mirrored.MirroredStrategy(seed=0, **settings)
    with strategy.scope():
        model = make_mlp().to(strategy.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = strategy.distribute_dataset(TensorDataset(*make_data(32)), 8)

    def step(x: Tensor, y: Tensor, last: bool) -> None:
        with contextlib.nullcontext() if last else strategy.no_sync():
            mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    for number, (x, y) in enumerate(data):
        strategy.run(step, args=(x, y, number % 2 == 1))
    return flat(model.parameters())


def multiply_a_loss() -> str:
    """The error of a weight that multiplies the result of compute_average_loss, in a backward of another thread."""
    strategy = mirrored.MirroredStrategy(seed=0)

    def step() -> None:
        weight = torch.tensor(2.0, device=strategy.device, requires_grad=True)
        (weight * mirrored.compute_average_loss(weight * torch.ones(3, device=strategy.device))).backward()

    return text_of(RuntimeError, strategy.run, step)


def values() -> dict[str, Any]:
    """Values between towers: numbers, rows of different length, a gradient through a sum."""
    strategy = mirrored.MirroredStrategy(seed=0)
    tower, device = strategy.topology.index, strategy.device

    def all_reduce() -> float:
        x = torch.tensor([1.0, 3.0][tower], device=device, requires_grad=True)
        (mirrored.get_replica_context().all_reduce("sum", x) * [1.0, 3.0][tower]).backward()
        return float(x.grad)

    mean, total = strategy.variable(0.0, aggregation="mean"), strategy.variable([1.0], "on_read", "sum")

    def write() -> bool:
        total.assign_add(torch.tensor([tower + 1.0]))
        return mean.assign_add(torch.tensor(tower + 1.0, device=device)).device == total.value().device == device

    return {
        "variables": [strategy.run(write), mean.item(), total.tolist(), total.assign([7.0]).tolist()],
        "reduce": strategy.reduce("sum", torch.tensor([tower + 1.0], device=device)).tolist(),
        "mean of numbers": strategy.reduce("mean", tower + 1),
        "gather": strategy.gather(torch.full((tower + 1, 1), tower, device=device)).tolist(),
        "gradient of all-sum": strategy.run(all_reduce),
    }


VALUES = {
    "variables": [True, 1.5, [4], [7]],
    "reduce": [3],
    "mean of numbers": 1.5,
    "gather": [[0], [1], [1]],
    "gradient of all-sum": 4,
}


def step_without_waiting(part: str) -> list[float]:
    """Steps that must not make the host wait for the device: an exception, where one does. The fourth has a check."""
    virtual = 4 if part == "virtual" else None
    strategy = mirrored.MirroredStrategy(seed=0, mirror_check_interval=4, virtual_towers=virtual)
    with strategy.scope():
        model = torch.nn.Sequential(*make_mlp(torch.float32), torch.nn.BatchNorm1d(3)).to(strategy.device)
        unused = torch.nn.Linear(3, 3, device=strategy.device)
    model[0].requires_grad_(part != "frozen")
    optimizer = torch.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.1, momentum=0.9, foreach=True)
    x, y = (tensor.to(strategy.device) for tensor in make_data(32, torch.float32))
    weight = {"number": 0.5, "weights": torch.full((32,), 0.5)}.get(part)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        output = model(x) + (unused(torch.ones_like(model(x))) if part == "all" else 0)
        return F.cross_entropy(output, y, reduction="none")

    def step() -> None:
        optimizer.zero_grad()
        if virtual is not None:
            strategy.backward(losses, x, y)
        else:
            mirrored.compute_average_loss(losses(x, y), weight).backward()
        optimizer.step()

    strategy.run(step)
    strategy.run(step)
    with waiting_is_an_error():
        for _ in range(3):
            strategy.run(step)
    return [float(p.sum()) for p in model.parameters()]


PHASES = {"all": 21, "none": 10, "all again": 20, "first": 9, "turns": 9, "everyone": 5, "all at last": 3}


def use_other_parameters(changes: dict[str, int], **settings: Any) -> list[Any]:
    """The parameters after phases in which towers use all parameters, or others; and the number of gathers of hosts.

    Weight decay and momentum show whether an optimizer has stepped a parameter that no tower has used.

    Args:
        changes: for each phase the steps, and in its name who uses the second layer: all, none, first, last or turns.
            In other phases all use it, and some thaw the third layer: everyone or one.
    """
    options = mirrored.CommunicationOptions(bucket_bytes=512)
    strategy = mirrored.MirroredStrategy(seed=0, communication=options, **settings)
    with strategy.scope():
        first, second, frozen = torch.nn.Linear(5, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        frozen.requires_grad_(False)
        model = torch.nn.ModuleList([first, second, frozen]).to(strategy.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    gathers: list[int] = []
    original = flags.Gather

    def gather(channel: Any, flags: Any, passed: Any) -> Any:
        gathers.append(len(passed))
        return original(channel, flags, passed)

    flags.Gather = gather  # type: ignore[misc, assignment]
    x, y = (tensor.to(strategy.device) for tensor in make_data(8, torch.float32))
    tower, last, number = strategy.topology.index, strategy.num_replicas_in_sync - 1, 0

    def step(who: str) -> None:
        uses = {"all": True, "none": False, "first": not tower, "last": tower == last, "turns": number % 2 == tower % 2}
        optimizer.zero_grad()
        frozen.requires_grad_({"everyone": True, "one": tower == last}.get(who, False))
        hidden = frozen(first(x))
        output = second(hidden) if uses.get(who, True) else hidden
        mirrored.compute_average_loss(F.cross_entropy(output, y, reduction="none")).backward()
        assert (second.weight.grad is None) == (who == "none")
        optimizer.step()

    for who, steps in changes.items():
        for _ in range(steps):
            strategy.run(step, args=(who.split()[0],))
            number += 1
    flags.Gather = original  # type: ignore[misc]
    strategy.check_mirrored()
    return [flat(model.parameters()), gathers]


def operations_of_a_step() -> dict[str, int]:
    """How often a step calls each operation of torch and each collective beyond the loop without a strategy."""
    strategy = mirrored.MirroredStrategy(seed=0)
    x, y = (tensor.to(strategy.device) for tensor in make_data(32, torch.float32))

    def counted(step: Callable[[], object]) -> collections.Counter[str]:
        for _ in range(12):
            step()
        with torch.profiler.profile(acc_events=True) as profile:
            step()
        names = [event.name for event in profile.events() or [] if event.cpu_parent is None or in_autograd(event)]
        return collections.Counter(name for name in names if name.startswith(("aten::", "c10d::", "gloo:")))

    def in_autograd(event: Any) -> bool:
        return event.cpu_parent.name.startswith(("autograd::", "Optimizer.", "mirrored::"))

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = make_mlp(torch.float32).to(strategy.device)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

    with strategy.scope():
        model, optimizer = make()
    bare_model, bare_optimizer = make()

    def step(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, mean: Callable[[Tensor], Tensor] = torch.mean
    ) -> None:
        optimizer.zero_grad()
        mean(F.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()

    average = functools.partial(mirrored.compute_average_loss, global_batch_size=64)
    ours = counted(lambda: strategy.run(step, args=(model, optimizer, average)))
    ours.subtract(counted(lambda: step(bare_model, bare_optimizer)))
    return {name: count for name, count in sorted(ours.items()) if count}


def step_sharded(who: str) -> list[float]:
    """Sharded steps of parameters of which some share their memory: the parameters.

    Args:
        who: does something alone in the tenth step: "none"; "looks", if the chief reads a gradient; "repeats", if it
            repeats the call for a step of the optimizer.
    """
    options = mirrored.CommunicationOptions(bucket_bytes=512)
    strategy = mirrored.MirroredStrategy(seed=0, communication=options, shard_optimizer=True)
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept = model[0].weight.detach()  # so it stays where it is
    x, y = (tensor.to(strategy.device) for tensor in make_data(8, torch.float32))

    def step(number: int) -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
        if number == 10 and strategy.is_chief and who == "looks":
            model[0].weight.grad.norm()
        if number == 10 and strategy.is_chief and who == "repeats":
            strategy.engine.repeated_calls.compare("steps Adam number 0 with 4 parameters")
        optimizer.step()

    for number in range(30):
        strategy.run(step, args=(number,))
    assert kept.data_ptr() == model[0].weight.data_ptr()
    return flat(model.parameters())


def reduce_in_steps(differs: str) -> list[float]:
    """What steps reduce, without waiting for the device or for other hosts; then the chief reduces something else.

    Args:
        differs: how the chief's last reduction differs: "nothing", "shape" or "operation".
    """
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (tensor.to(strategy.device) for tensor in make_data(8, torch.float32))
    reduced: list[Tensor] = []

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"), global_batch_size=16)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = strategy.run(step)
            reduced.append(strategy.reduce("sum", {"loss": loss, "twice": loss.expand(2)})["loss"])
            reduced.append(strategy.reduce("max", loss))

    train(3)
    started = strategy.communicator.count if hasattr(strategy.communicator, "count") else 0
    with waiting_is_an_error():
        train(3)
    if started:  # three collectives a step, of the sum, the largest value and whether any is not a number
        assert strategy.communicator.count - started == 9
    loss = strategy.run(step)
    if strategy.is_chief and differs == "shape":
        strategy.reduce("sum", loss.expand(3))
    op = "max" if strategy.is_chief and differs == "operation" else "sum"
    strategy.reduce(op, {"loss": loss, "twice": loss.expand(2)})
    train(20)
    return flat(reduced)


def watch_without_waiting() -> list[float]:
    """Steps with a monitor, which must not make the host wait for the device before it reports; what that says."""
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    x, y = (tensor.to(strategy.device) for tensor in make_data(32, torch.float32))
    losses: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        losses.append(mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")))
        losses[-1].backward()
        optimizer.step()

    monitor = mirrored.Monitor(strategy, every=6, show=False, gradient_norm=True)
    for context in (contextlib.nullcontext(), waiting_is_an_error(), contextlib.nullcontext()):
        with context:
            for _ in range(2):
                strategy.run(step)
                monitor.step(losses[-1])
    report = monitor.report
    assert report is not None
    assert (report.step, report.steps, report.learning_rate) == (6, 5, 0.125)
    assert sum(report.parts_ms.values()) == pytest.approx(report.step_ms, rel=1e-6)
    assert report.loss == pytest.approx(float(strategy.reduce("sum", torch.stack(losses).mean())), rel=1e-5)
    assert report.gradient_norm == pytest.approx(
        float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    )
    return [report.loss, report.gradient_norm]


def same_bits() -> str:
    """A digest after some steps of virtual towers."""
    torch.use_deterministic_algorithms(True)
    strategy = mirrored.MirroredStrategy(virtual_towers=4, seed=0)
    with strategy.scope():
        layers = (torch.nn.Linear(5, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 3))
        model = torch.nn.Sequential(*layers).to(strategy.device)
        model.register_buffer("calls", torch.zeros((), dtype=torch.int64, device="cpu"))
        model.register_forward_pre_hook(lambda module, _: module.calls.add_(1) and None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = strategy.distribute_dataset(TensorDataset(*make_data(60, torch.float32)), 24, shuffle=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = strategy.backward(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
        optimizer.step()
        return loss

    losses = [strategy.run(step, args=batch) for batch in data]
    assert model.calls == len(losses)
    values = [value.detach().double().flatten().cpu() for value in (*model.parameters(), *model.buffers(), *losses)]
    return hashlib.sha256(torch.cat(values).numpy().tobytes()).hexdigest()


def batch_norm_over_both(dtypes: list[str]) -> list[float]:
    """Uneven shares without waiting for the device, against plain layers; then each tower at another layer."""
    strategy = mirrored.MirroredStrategy(seed=0)

    def make() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.BatchNorm2d(4), torch.nn.Tanh(), torch.nn.BatchNorm2d(4))

    with strategy.scope(sync_batch_norm=True):
        model = make()
    plain = make().to(strategy.device)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        if str(dtype) not in dtypes:
            continue
        whole = torch.randn(11, 4, 6, 6, generator=torch.Generator().manual_seed(0)).to(strategy.device, dtype)
        own = slice(0, 4) if strategy.is_chief else slice(4, 11)
        xs = [whole[own].clone().requires_grad_(), whole.clone().requires_grad_()]

        def step(part: Tensor = xs[0]) -> Tensor:
            model.zero_grad()
            y = model(part)
            (2 * y.float().pow(3).sum()).backward()
            return y

        strategy.run(step)
        xs[0].grad = None
        plain.load_state_dict(model.state_dict())
        with waiting_is_an_error():
            y = strategy.run(step)
        plain.zero_grad()
        expected = plain(xs[1])
        expected.float().pow(3).sum().backward()
        assert y.dtype == dtype
        mine, all_of_it = xs[0].grad, xs[1].grad
        compare([y, mine / 2], [expected[own], all_of_it[own]], tolerance)
        compare([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], 10 * tolerance)
        compare(list(model.buffers()), list(plain.buffers()), 1e-4)
    trained = [float(buffer.double().sum()) for buffer in model.buffers()]
    norm = model[0 if strategy.is_chief else 2]
    try:
        result = strategy.run(lambda: norm(xs[0]))
        assert result.isnan().all()
        torch.accelerator.synchronize()
        strategy.run(lambda: norm(xs[0]))
    except mirrored.DisagreementError as error:
        assert "tower 0 goes forward through Sequential.0, tower 1 goes" in str(error)
        return trained
    raise AssertionError("towers went through different layers, and nobody said so")


def wait_between_buckets_and_batch_norm(who: str, shard_optimizer: bool = False, seed: int = 0) -> list[float]:
    """Parameters after steps in which a tower waits for its device when the first bucket is full.

    In the backward, a batch norm over all towers follows the first bucket.

    Args:
        who: uses the parameters of that bucket: "first", or "all" towers.
        seed: of the tower that waits, and of the order in which the towers reach each place.
    """
    options = mirrored.CommunicationOptions(bucket_bytes=64)
    strategy = mirrored.MirroredStrategy(seed=0, communication=options, shard_optimizer=shard_optimizer)
    draw = random.Random(f"{seed} {strategy.topology.index}")

    def come_late() -> None:
        time.sleep(draw.choice([0.0, 0.0, 0.005, 0.02]))

    with strategy.scope(sync_batch_norm=True):
        first, norm, extra = torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
        model = torch.nn.ModuleList([first, norm, extra]).to(strategy.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (tensor.to(strategy.device) for tensor in make_data(8, torch.float32))
    if strategy.device.type != "cpu" and strategy.topology.index == seed % 2:
        norm.register_full_backward_pre_hook(lambda *_: torch.accelerator.synchronize())
    for module in (first, norm, extra):
        module.register_full_backward_pre_hook(lambda *_: come_late())

    def step() -> None:
        come_late()
        optimizer.zero_grad()
        hidden = norm(first(x))
        output = extra(hidden) if who == "all" or strategy.is_chief else hidden
        mirrored.compute_average_loss(F.cross_entropy(output, y, reduction="none")).backward()
        optimizer.step()

    for _ in range(8):
        strategy.run(step)
    strategy.check_mirrored()
    return flat(model.parameters())


def compare(first: list[Any], second: list[Any], tolerance: float) -> None:
    """As ``assert_close``, on the CPU: not every accelerator has what it needs."""
    assert_close([tensor.cpu() for tensor in first], [tensor.cpu() for tensor in second], tolerance)


def find_a_changed_bit() -> list[Any]:
    """The run in which a change before run 12 is an error, that error, and the one of a check at once."""
    strategy = mirrored.MirroredStrategy(seed=0, mirror_check_interval=6)
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
        large = torch.nn.Linear(300, 200, device=strategy.device)
    optimizer = torch.optim.Adam([*model.parameters(), *large.parameters()], lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.ones(2, 5, device=strategy.device)).sum() + large.weight.square().sum()).backward()
        optimizer.step()

    runs: list[int] = []

    def train_on() -> None:
        for run in range(1, 40):
            runs.append(run)
            if run == 12:
                strategy.check_mirrored()
                if strategy.topology.index == 1:
                    large.weight.data.view(torch.int32)[100, 7] ^= 1
            strategy.run(step)

    later = text_of(mirrored.MirrorError, train_on)
    return [runs[-1], later, text_of(mirrored.MirrorError, strategy.check_mirrored)]


def check_changed_bit(results: list[Any]) -> None:
    """What both towers say of it."""
    first, second = results
    assert first == second
    run, later, at_once = first
    assert run == 18  # where the check after the one that found it is due
    words = "parameter Linear.weight is no longer the same on all towers: tower 0 differs from tower 1."
    assert later.startswith(words)
    assert "at the start of run 12; the towers were equal at the start of run 10" in later
    assert at_once.startswith(words)


def average_by_a_metric() -> float:
    """The mean of 0 to 6, in batches of 3, by a metric that was created on the CPU."""
    torchmetrics = pytest.importorskip("torchmetrics")
    strategy = mirrored.MirroredStrategy(seed=0)
    metric = strategy.mirror(torchmetrics.MeanMetric())
    for batch in strategy.distribute_dataset(torch.arange(7.0), 3):
        strategy.run(metric.update, args=(batch,))
    return float(metric.compute())


def gather_shapes() -> int:
    """Rows of every kind of tensor."""
    comm = mirrored.MirroredStrategy(seed=0).communicator

    def of(tower: int) -> list[Tensor]:
        numbers = torch.arange(12, device=comm.device).view(3, 4) * (tower + 1)
        others = [numbers.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.uint8, torch.complex64)]
        return [numbers[1, 1], numbers[:0], numbers.t(), numbers[:, ::2], numbers > 5, *others]

    for kind, mine in enumerate(of(comm.index)):
        expected = torch.stack([of(tower)[kind] for tower in range(comm.size)])
        pending, rows = comm.start_all_gather(mine)
        assert torch.equal(comm.all_gather(mine), expected), kind
        pending.wait()
        assert torch.equal(rows, expected), kind
    return len(of(0))


def train_into_nan() -> str:
    """What is said of a gradient that is not a number on tower 1."""
    strategy = mirrored.MirroredStrategy(seed=0, nonfinite_gradients="raise")
    with strategy.scope():
        model = make_mlp(torch.float32).to(strategy.device)
    factor = float("nan") if strategy.topology.index == 1 else 1.0
    try:
        strategy.run(lambda: (model(torch.ones(2, 5, device=strategy.device)).sum() * factor).backward())
    except mirrored.NonFiniteGradientError as error:
        return str(error)
    return ""


def train_with_checkpoints(folder: str, stop: int | None) -> list[Any]:
    """A training, to its end or interrupted: its digest and losses, and the step at which it went on."""
    strategy = mirrored.MirroredStrategy(seed=0)
    with contextlib.suppress(training.Interrupted):
        done = training.train(strategy, pathlib.Path(folder), stop=stop)
        return [done["digest"], done["losses"], done["restored"] and done["restored"].step]
    return []


def train_a_table(central: bool) -> list[Any]:
    """Parameters, and where they and the optimizers' state lie, after steps between which parameters are scaled."""
    strategy = strategy_of({"central": central})
    with strategy.scope():
        table = torch.nn.EmbeddingBag(31, 4, sparse=True, dtype=torch.float64)
        dense = torch.nn.Linear(9, 3, dtype=torch.float64)
        for p in (*table.parameters(), *dense.parameters()):
            p.data = (torch.arange(p.numel(), device=p.device).view(p.shape) % 7 - 3).double() / 10
    optimizers = [torch.optim.SparseAdam(table.parameters(), 0.05), torch.optim.Adam(dense.parameters(), 0.05)]
    words = torch.arange(22 * 3).view(22, 3) ** 2 % 17

    def step(words: Tensor, x: Tensor, y: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = F.cross_entropy(dense(torch.cat([table(words), x], 1)), y, reduction="none")
        mirrored.compute_average_loss(losses).backward()
        for optimizer in optimizers:
            optimizer.step()

    for batch in strategy.distribute_dataset(TensorDataset(words, *make_data(22)), 7):
        strategy.run(step, args=batch)
        dense.weight.data.mul_(0.9)
        table.weight.data.mul_(0.9)
    states = [state for optimizer in optimizers for state in optimizer.state_dict()["state"].values()]
    places = {tensor.device.type for state in states for tensor in state.values() if isinstance(tensor, Tensor)}
    values = flat([table.weight, dense.weight, *(s["exp_avg"] for s in states)])
    return [table.weight.device.type, dense.weight.device.type == strategy.device.type, sorted(places), values]
