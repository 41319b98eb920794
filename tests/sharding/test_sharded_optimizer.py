"""``shard_optimizer=True``: the bits of the unsharded step, an N-th of the state, and plain PyTorch around it."""

from __future__ import annotations

import copy
import os
import pathlib
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

import mirrored
from tests.support.jobs import assert_close, make_data
from tests.support.waiting import at_most
from tests.training.test_plain_pytorch import FEATURES, mlp, train
from towers.collectives.shared_memory import regions
from towers.gradients import buckets
from towers.sharding.inner import ShardedState
from towers.sharding.optimizer import OptimizerSharder

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "SGD without state": lambda p: torch.optim.SGD(p, 0.05),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, 0.01, fused=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


class Awkward(nn.Module):
    """Parameters of all kinds: channels-last, complex, half precision, scalars, tied, sharing memory, unused."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.hidden = nn.Linear(180, 37)
        self.low = nn.Linear(37, 37).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.rotation = nn.Parameter(torch.full((37,), 0.8 + 0.6j))
        self.out = nn.Linear(37, 10)
        self.tied = self.out
        self.twice = nn.Parameter(torch.ones(300))
        self.alias = nn.Parameter(self.twice.data[:37])  # the same memory
        self.strided = nn.Parameter(torch.zeros(74)[::2])
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(37, 10)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        x = torch.relu(self.hidden(self.norm(self.conv(x)).flatten(1))) * self.scale
        x = self.low(x.to(torch.bfloat16)).float()
        x = (x * self.rotation).real * self.twice.mean() + self.strided + self.alias
        return self.out(x) + self.tied(x) + (self.sometimes(x) if other else 0)


def strategy_of(shard: bool, implementation: str = "auto") -> mirrored.MirroredStrategy:
    buckets._LARGE_BYTES = 1000  # some of these small gradients are to be treated as large ones are
    options = mirrored.CommunicationOptions(implementation=implementation, bucket_bytes=20_000)
    return mirrored.MirroredStrategy(shard_optimizer=shard, seed=1, communication=options)


def launch(fn: Callable[..., Any], *args: Any, count: int = 2, timeout: float = 60) -> list[Any]:
    return mirrored.launch(fn, args, devices=[f"cpu:{i}" for i in range(count)], timeout=timeout)


def train_awkward(name: str, shard: bool, implementation: str) -> tuple[list[Tensor], dict[str, Any]]:
    strategy = strategy_of(shard, implementation)
    index = strategy.topology.index
    with strategy.scope():
        model = Awkward()
        kwargs = {"foreach": False} if name in ("Adam", "SGD") else {}
        groups = [{"params": list(model.conv.parameters()), "lr": 0.02}]
        groups.append({"params": [p for n, p in model.named_parameters() if not n.startswith("conv")], **kwargs})
        if "fused" in name or name == "Rprop":  # fused kernels and Rprop take no complex numbers
            model.rotation.requires_grad_(False)
        if name == "SGD fused":  # its momenta of bfloat16 are not those of SGD, nor the same for parts (torch 2.13)
            model.low.requires_grad_(False)
        optimizer = OPTIMIZERS[name](groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    generator = torch.Generator().manual_seed(7 + index)

    def step(x: Tensor, y: Tensor, other: bool) -> None:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x, other), y, reduction="none")
        mirrored.compute_average_loss(losses, global_batch_size=5 * strategy.num_replicas_in_sync).backward()
        optimizer.step()
        schedule.step()

    for number in range(6):
        x, y = torch.randn(5, 3, 8, 8, generator=generator), torch.randint(0, 10, (5,), generator=generator)
        strategy.run(step, (x, y, number % 3 == index))
    return [p.detach().clone() for p in model.parameters()], optimizer.state_dict()


def assert_same_state(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ours["param_groups"] == expected["param_groups"]
    assert ours["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for key, value in state.items():
            mine = ours["state"][number][key]
            if not isinstance(value, Tensor):
                assert mine == value
                continue
            assert (mine.shape, mine.dtype, mine.stride()) == (value.shape, value.dtype, value.stride()), (number, key)
            assert torch.equal(mine, value), (number, key)


def in_turn(fn: Callable[..., Any], names: Sequence[str], *args: Any) -> dict[str, Any]:
    """``fn(name, *args)`` for each name, on the same towers."""
    return {name: fn(name, *args) for name in names}


def both(fn: Callable[..., Any], names: Sequence[str], *args: Any, count: int = 2) -> tuple[list[Any], list[Any]]:
    """What ``fn(name, shard, *args)`` gives on each tower, sharded and not."""
    ours, expected = (launch(in_turn, fn, names, shard, *args, count=count, timeout=200) for shard in (True, False))
    return ours, expected


@pytest.fixture(scope="module")
def optimizers() -> tuple[list[Any], list[Any]]:
    return both(train_awkward, list(OPTIMIZERS), "auto")


def assert_same_bits(name: str, trained: tuple[list[Any], list[Any]]) -> None:
    for ours, expected in zip(*trained, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[name][0], expected[name][0], strict=True))
        assert_same_state(ours[name][1], expected[name][1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_the_unsharded_step(name: str, optimizers: tuple[list[Any], list[Any]]) -> None:
    assert_same_bits(name, optimizers)


@pytest.mark.parametrize("implementation", ["auto", "gloo"])
def test_the_bits_of_the_unsharded_step_on_three_towers(implementation: str) -> None:
    assert_same_bits("AdamW", both(train_awkward, ["AdamW"], implementation, count=3))


def on_two_hosts(shard: bool) -> tuple[list[Tensor], dict[str, Any]]:
    os.environ["NCCL_HOSTID"] = "aab"[int(os.environ["RANK"])]
    return train_awkward("AdamW", shard, "auto")


def test_the_bits_of_the_unsharded_step_on_two_hosts() -> None:
    ours, expected = (launch(on_two_hosts, shard, count=3) for shard in (True, False))
    for mine, should in zip(ours, expected, strict=True):
        assert_same_bits("all", ([{"all": mine}], [{"all": should}]))


def with_feature(name: str, shard: bool) -> dict[str, list[Tensor]]:
    return train(strategy_of(shard), **FEATURES[name])


@pytest.fixture(scope="module")
def features() -> tuple[list[Any], list[Any]]:
    return both(with_feature, list(FEATURES))


@pytest.mark.parametrize("name", FEATURES)
def test_plain_pytorch_has_the_same_bits(name: str, features: tuple[list[Any], list[Any]]) -> None:
    for ours, expected in zip(*features, strict=True):
        for key, tensors in expected[name].items():
            assert all(torch.equal(a, b) for a, b in zip(ours[name][key], tensors, strict=True)), key


def user_code(what: str, shard: bool) -> list[Tensor]:
    """What scripts do to gradients and parameters between backward and the next step."""
    strategy = strategy_of(shard)
    with strategy.scope():
        model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    x, y = make_data(24, torch.float32)
    seen: list[Tensor] = []
    kept: list[Tensor] = []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        output = model(x.to(model[0].weight.dtype))
        return mirrored.compute_average_loss(F.cross_entropy(output, y, reduction="none"))

    def backward(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=what != "zero_grad to zeros")
        loss_of(x, y).backward()

    def step(x: Tensor, y: Tensor) -> None:
        if what == "closure":

            def closure() -> float:
                backward(x, y)
                return 1.0

            def broken() -> float:
                raise KeyError("broken")

            with pytest.raises(KeyError, match="broken"):
                optimizer.step(broken)
            assert optimizer.step(closure) == 1.0
            return
        if what == "GradScaler":
            optimizer.zero_grad()
            scaler.scale(loss_of(x, y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            return
        if what == "GradScaler without unscale_":
            optimizer.zero_grad()
            scaler.scale(loss_of(x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
            return
        if what == "no zero_grad":
            loss_of(x, y).backward()
            optimizer.step()
            return
        backward(x, y)
        if what == "log":
            seen.extend(p.grad.clone() for p in model.parameters())
        elif what == "clip_grad_value_":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        elif what == "in place":
            for p in model.parameters():
                p.grad.mul_(0.5).add_(p.detach(), alpha=0.1)
        elif what == "grad.data":
            for p in model.parameters():
                p.grad.data = p.grad.data * 0.5
        elif what == "replaced":
            for p in model.parameters():
                p.grad = p.grad.sign()
        elif what == "one read":
            seen.append(model[2].bias.grad.norm())
        elif what == "numpy":
            seen.append(torch.from_numpy(model[0].weight.grad.numpy().copy()))
        elif what == "several losses":  # their gradients are compared, then summed
            kept[:] = [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            (loss_of(x, y) * 0.5).backward()
            for p, other in zip(model.parameters(), kept, strict=True):
                p.grad = p.grad + other
        elif what == "two backwards":
            (loss_of(x, y) * 0.5).backward()
        elif what == "other dtype":
            model.double()
        elif what == "backward of a gradient":
            (p := model[2].bias).grad.requires_grad_(False)
            (p * 2).backward(p.grad)
        elif what == "accumulation":
            with strategy.no_sync():
                loss_of(x, y).backward()
            loss_of(x, y).backward()
        optimizer.step()
        if what == "after the step":
            seen.extend(p.grad.clone() for p in model.parameters())
        elif what == "clamped":
            for p in model.parameters():
                p.data.clamp_(-0.1, 0.1)
        elif what == "scaled":
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.9)
                    p.data.mul_(0.9)
        elif what == "other memory":
            for p in model.parameters():
                p.data = p.data.clone()
        elif what == "loaded":
            model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        elif what == "moved by share_memory":
            model.share_memory()
        elif what == "loaded by assignment":
            state = {name: value * 0.9 for name, value in model.state_dict().items()}
            for name, p in model.named_parameters():
                p.data = state[name]

    for batch in strategy.distribute_dataset(TensorDataset(x, y), 8):
        strategy.run(step, batch)
    assert isinstance(optimizer.state, ShardedState) is shard
    return [*(p.detach().clone() for p in model.parameters()), *seen]


USER_CODE = (
    "log",
    "clip_grad_value_",
    "in place",
    "grad.data",
    "replaced",
    "one read",
    "numpy",
    "several losses",
    "two backwards",
    "accumulation",
    "after the step",
    "clamped",
    "scaled",
    "other memory",
    "loaded",
    "loaded by assignment",
    "moved by share_memory",
    "other dtype",
    "backward of a gradient",
    "closure",
    "GradScaler",
    "GradScaler without unscale_",
    "no zero_grad",
    "zero_grad to zeros",
)


@pytest.fixture(scope="module")
def scripts() -> tuple[list[Any], list[Any]]:
    return both(user_code, USER_CODE)


@pytest.mark.parametrize("what", USER_CODE)
def test_what_scripts_do_to_gradients_and_parameters(what: str, scripts: tuple[list[Any], list[Any]]) -> None:
    for ours, expected in zip(*scripts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[what], expected[what], strict=True))


def without_memory(what: str, shard: bool) -> list[Tensor]:
    """Tower 1 gets no memory to share, but for the two channels that a strategy begins with."""
    make, asked = os.memfd_create, [0]

    def create(*args: Any) -> int:
        asked[0] += 1
        if asked[0] > 2 and os.environ["RANK"] == "1":
            raise OSError(28, "no memory")
        return make(*args)

    os.memfd_create = create
    try:
        return user_code(what, shard)
    finally:
        os.memfd_create = make
        assert asked[0] > 2


WITHOUT_MEMORY = ("log", "accumulation", "after the step", "scaled")


def test_without_memory_to_share(capfd: pytest.CaptureFixture[str]) -> None:
    ours, expected = both(without_memory, WITHOUT_MEMORY)
    said = re.findall(
        r"\[tower 1\].*a shared region of [0-9.e-]+ MB cannot be allocated \(\[Errno 28\] no memory\)",
        capfd.readouterr().err,
    )
    assert len(said) == 2 * len(WITHOUT_MEMORY), "once for each strategy"
    for mine, should in zip(ours, expected, strict=True):
        for what in WITHOUT_MEMORY:
            assert all(torch.equal(a, b) for a, b in zip(mine[what], should[what], strict=True)), what


def mirror_copies(shard: bool) -> list[Tensor]:
    """A script that mirrors a fresh copy of a model in every step (learning to learn), with few places for regions."""
    regions.KEYS = 40
    strategy = strategy_of(shard)
    base = mlp()
    for number in range(20):
        model = copy.deepcopy(base)
        strategy.mirror(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.full((2, 5), float(number + strategy.topology.index))

        def step(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()

        strategy.run(step, (x,))
        base = model
    return parameters(base)


def test_copies_of_a_model_take_the_places_of_those_before(capfd: pytest.CaptureFixture[str]) -> None:
    ours, expected = launch(mirror_copies, True), launch(mirror_copies, False)
    for mine, should in zip(ours, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, should, strict=True))
    assert "cannot be allocated" not in capfd.readouterr().err


def ask_on_the_chief_after_three_models() -> int:
    strategy = strategy_of(True)
    for _ in range(3):
        model = mlp()
        strategy.mirror(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)  # which has no state

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()

        strategy.run(step)
    return len(optimizer.state_dict()["param_groups"]) if strategy.is_chief else 0


def test_the_chief_alone_can_ask_where_other_regions_have_lain() -> None:
    with at_most(20):
        assert launch(ask_on_the_chief_after_three_models) == [1, 0]


def come_for_nothing_that_has_a_name() -> str:
    barrier = strategy_of(True).engine.averager._channel.regions.barrier
    barrier.wait_tagged("tries")
    try:
        if os.environ["RANK"] == "0":
            barrier.wait_tagged("steps Adam")
        else:
            barrier.wait()
            barrier.wait()
    except mirrored.TowersError as error:
        time.sleep(0.5)
        return str(error)
    return "nothing noticed"


def test_a_tower_that_comes_for_something_without_a_name_finds_out() -> None:
    with at_most(20):
        first, second = launch(come_for_nothing_that_has_a_name)
    assert "tower 0 steps Adam, tower 1 does something else" in first
    assert "tower 0 broke off a collective" in second


def read_on_the_chief_only() -> None:
    strategy = strategy_of(True)
    with strategy.scope():
        model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.ones(2, 5)).sum().backward()
        if strategy.is_chief:
            float(model[0].weight.grad.norm())
        optimizer.step()

    strategy.run(step)


def test_a_gradient_that_one_tower_alone_reads_is_an_error_on_all() -> None:
    with at_most(20), pytest.raises(mirrored.TowerFailedError) as caught:
        launch(read_on_the_chief_only)
    assert len(caught.value.failures) == 2
    for failure in caught.value.failures:
        assert isinstance(failure.exception, mirrored.DisagreementError)
        assert "tower 0 uses the averaged gradients" in str(failure.exception)
        assert "tower 1 steps Adam number 0" in str(failure.exception)


class Deadly(torch.optim.SGD):
    elementwise = True

    def step(self) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        super().step()


def die_in_the_step() -> None:
    strategy = strategy_of(True)
    with strategy.scope():
        model = mlp()
    optimizer = Deadly(model.parameters(), 0.1)

    def step() -> None:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()

    strategy.run(step)


def test_a_tower_that_dies_in_its_part_of_the_step_is_named() -> None:
    with at_most(10), pytest.raises(mirrored.TowerFailedError) as caught:
        launch(die_in_the_step, count=3)
    assert caught.value.tower == 1
    for failure in caught.value.failures:
        if failure.tower != 1:
            assert "tower 1 (process" in failure.traceback


def two_alike(what: str, shard: bool) -> list[Tensor]:
    """Two parameters of one shape, whose gradients lie in one memory, or change places."""
    strategy = strategy_of(shard)
    with strategy.scope():
        model = nn.ParameterList([torch.zeros(40, 50), torch.zeros(40, 50)])
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    factors = torch.randn(2000, generator=torch.Generator().manual_seed(strategy.topology.index))

    def step() -> None:
        optimizer.zero_grad()
        first, second = model
        if what == "one memory":
            ((first.view(-1) + second.flatten()) * factors).sum().backward()
        else:
            (first.view(-1) * factors + second.view(-1) * factors.flip(0)).sum().backward()
        if what == "swapped":
            first.grad, second.grad = second.grad, first.grad
        optimizer.step()

    for _ in range(2):
        strategy.run(step)
    return parameters(model)


def test_gradients_that_share_memory_or_change_places() -> None:
    names = ("one memory", "swapped")
    ours, expected = both(two_alike, names)
    for mine, should in zip(ours, expected, strict=True):
        for name in names:
            assert all(torch.equal(a, b) for a, b in zip(mine[name], should[name], strict=True)), name


def come_one_meeting_late() -> None:
    """On the chief alone a gradient goes by, so that the others' next meeting is its second."""
    strategy = strategy_of(True)
    with strategy.scope():
        model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.zero_grad()
        if number == 2 and strategy.is_chief:
            torch.autograd.grad(model(torch.ones(2, 5)).sum(), list(model.parameters()))
        optimizer.step()

    for number in range(6):
        strategy.run(step, (number,))


def test_towers_that_meet_one_meeting_apart_find_out() -> None:
    with at_most(30), pytest.raises(mirrored.TowerFailedError) as caught:
        launch(come_one_meeting_late)
    assert isinstance(caught.value.__cause__, mirrored.DisagreementError)


def read_an_old_gradient(shard: bool) -> list[Tensor]:
    """A second backward reaches one half; then a gradient of the other half, which is still there, is read."""
    strategy = strategy_of(shard)
    with strategy.scope():
        halves = [nn.Linear(40, 50), nn.Linear(40, 50)]
    x = torch.ones(2, 40) * (strategy.topology.index + 1)

    def step() -> Tensor:
        (halves[0](x).square().mean() + halves[1](x).square().mean()).backward()
        for p in halves[1].parameters():
            p.grad.norm()
        halves[0](x).square().mean().backward()
        return halves[1].weight.grad.norm()

    return [strategy.run(step), *(p.grad.clone() for half in halves for p in half.parameters())]


def test_old_gradients_stay_whole() -> None:
    expected = launch(read_an_old_gradient, False, count=3)[0]
    for result in launch(read_an_old_gradient, True, count=3):
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def edit_groups(what: str, shard: bool) -> list[Tensor]:
    """Parameters that leave their group, come back, or change places: their state stays theirs."""
    strategy = strategy_of(shard)
    with strategy.scope():
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 5) * (strategy.topology.index + 1)).square().mean().backward()
        optimizer.step()

    strategy.run(step)
    group = optimizer.param_groups[0]
    kept = list(group["params"])
    group["params"] = {"reordered": kept[::-1], "left": kept[2:], "left and back": kept[2:]}[what]
    strategy.run(step)
    if what == "left and back":
        group["params"] = kept
        strategy.run(step)
    # torch's own state_dict() fails while there is state of parameters that have left.
    return [*parameters(model), *(tensors(optimizer) if what != "left" else ())]


def test_groups_that_a_script_edits() -> None:
    names = ("reordered", "left", "left and back")
    ours, expected = both(edit_groups, names)
    for mine, should in zip(ours, expected, strict=True):
        for name in names:
            assert all(torch.equal(a, b) for a, b in zip(mine[name], should[name], strict=True)), name


class Scaled(torch.optim.SGD):
    """Takes an argument more, and counts its steps in the group."""

    elementwise = True

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad * scale)


def step_with_an_argument() -> tuple[float, int, int]:
    strategy = strategy_of(True)
    with strategy.scope():
        model = nn.ParameterList([torch.zeros(3)])
    optimizer = Scaled(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model[0].sum().backward()
        optimizer.step(scale=2.0)

    strategy.run(step)
    strategy.run(step)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "model.safetensors")
        save_model(model, str(path))  # refuses parameters that are parts of a larger storage
        return float(model[0][0]), optimizer.param_groups[0]["steps"], path.stat().st_size


def test_arguments_of_a_step_its_settings_and_what_is_saved() -> None:
    for value, steps, size in launch(step_with_an_argument):
        assert value == -4.0
        assert steps == 2
        assert size < 1000


class Normalized(torch.optim.SGD):
    """Not element-wise, whatever it derives from."""


def refused(make: Callable[[Any], torch.optim.Optimizer]) -> str:
    strategy = strategy_of(True)
    with strategy.scope():
        model = nn.Linear(4, 4, bias=False)
    optimizer = make(model.parameters())

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step(*([lambda: 1.0] if isinstance(optimizer, torch.optim.LBFGS) else []))

    with pytest.raises(mirrored.MirrorError) as caught:
        strategy.run(step)
    return str(caught.value)


REFUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "cannot shard Adafactor.step()": torch.optim.Adafactor,
    "cannot shard LBFGS.step()": torch.optim.LBFGS,
    "set Normalized.elementwise = True": Normalized,
    "differentiable=True": lambda p: torch.optim.SGD(p, 0.1, differentiable=True),
}
if hasattr(torch.optim, "Muon"):
    REFUSED["cannot shard Muon.step()"] = torch.optim.Muon


def refuse_all() -> dict[str, str]:
    return {words: refused(make) for words, make in REFUSED.items()}


def test_what_cannot_be_shared_out_is_refused_by_name() -> None:
    for texts in launch(refuse_all):
        assert all(words in text for words, text in texts.items())


def refuse_sparse() -> str:
    strategy = strategy_of(True)
    with strategy.scope():
        table = nn.Embedding(4, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)

    def step() -> None:
        table(torch.tensor([1])).sum().backward()
        optimizer.step()

    with pytest.raises(mirrored.MirrorError) as caught:
        strategy.run(step)
    return str(caught.value)


def test_sparse_gradients_are_refused_by_name() -> None:
    assert all("Embedding.weight" in text and "sparse" in text for text in launch(refuse_sparse))


class Lion(torch.optim.Optimizer):
    """A user's own element-wise optimizer, with state that is no tensor and tensors that are replaced in each step."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.beta = 0.9

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["momentum"] = self.beta * state.get("momentum", torch.zeros_like(p)) + p.grad
                state["steps"] = state.get("steps", 0) + 1
                p.sub_(state["momentum"].sign() * group["lr"] / state["steps"])


def train_in_two_halves(
    shard: bool, given: dict[str, Any] | None, lion: bool, chief_alone: bool
) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Three steps of six, from the start or from ``given``; state dicts of model and optimizer, elements of state."""
    strategy = strategy_of(shard)
    with strategy.scope():
        model = mlp()
        optimizer = Lion(model.parameters(), 0.01) if lion else torch.optim.AdamW(model.parameters(), 0.02)
    if given is not None:
        model.load_state_dict(given["model"])
        optimizer.load_state_dict(given["optimizer"])
        assert_same_state(optimizer.state_dict(), given["optimizer"])
    x, y = make_data(48, torch.float32)
    batches = list(zip(x.split(8), y.split(8), strict=True))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        share = strategy.topology.index if strategy.num_replicas_in_sync > 1 else slice(None)
        x, y = x.view(2, 4, -1)[share].flatten(0, -2), y.view(2, 4)[share].flatten()
        losses = F.cross_entropy(model(x), y, reduction="none")
        mirrored.compute_average_loss(losses, global_batch_size=8).backward()
        optimizer.step()

    for batch in batches[3:] if given is not None else batches[:3]:
        strategy.run(step, batch)
    if chief_alone and not strategy.is_chief:
        return {}, {}, []
    if chief_alone:
        time.sleep(1.0)  # the others have ended
    inner = strategy.engine.attached(OptimizerSharder)._known[optimizer].inner if shard else optimizer
    held = [sum(v.numel() for v in s.values() if isinstance(v, Tensor)) for s in inner.state.values()]
    return model.state_dict(), optimizer.state_dict(), held


@pytest.mark.parametrize("lion", [False, True], ids=["AdamW", "own optimizer"])
def test_state_moves_between_sharded_unsharded_and_another_number_of_towers(lion: bool) -> None:
    unsharded = launch(train_in_two_halves, False, None, lion, False)[0]
    sharded = launch(train_in_two_halves, True, None, lion, True)[0]
    assert_same_state(sharded[1], unsharded[1])
    given = {"model": sharded[0], "optimizer": sharded[1]}
    expected = launch(train_in_two_halves, False, given, lion, False)[0]
    for shard, count in ((True, 2), (True, 1), (False, 1)):
        model, state, _ = launch(train_in_two_halves, shard and count > 1, given, lion, False, count=count)[0]
        if count == 2:
            assert_same_state(state, expected[1])
        assert_close(list(model.values()), list(expected[0].values()), 0 if count == 2 else 1e-5)


def test_a_tower_holds_its_part_of_the_state() -> None:
    *_, all_of_it = launch(train_in_two_halves, False, None, False, False, count=1)[0]
    parts = [sum(held) for *_, held in launch(train_in_two_halves, True, None, False, False)]
    scalars = 4 * 2  # each tower counts the steps of its shards
    assert abs(sum(parts) - sum(all_of_it)) <= scalars
    assert max(parts) <= sum(all_of_it) / 2 + 2 * 64 + scalars


def changes(what: str, shard: bool) -> list[Tensor]:
    """Changes to model and optimizer between steps."""
    strategy = strategy_of(shard)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        other = nn.Linear(5, 3)
        model[2].requires_grad_(what != "thawed")
    optimizer = torch.optim.AdamW(model[:4].parameters(), 0.02)
    rest = torch.optim.SGD([*model[4].parameters(), *other.parameters()], 0.1, momentum=0.9)
    x, y = make_data(40, torch.float32)
    extra: list[nn.Module] = []

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        rest.zero_grad()
        output = model(x.to(model[0].weight.dtype)) + other(x.to(other.weight.dtype))
        for module in extra:
            output = output + module(x)
        mirrored.compute_average_loss(F.cross_entropy(output.float(), y, reduction="none")).backward()
        optimizer.step()
        rest.step()

    for number, batch in enumerate(strategy.distribute_dataset(TensorDataset(x, y), 8)):
        if number == 2:
            if what == "thawed":
                model[2].requires_grad_(True)
            elif what == "another group":
                with strategy.scope():
                    extra.append(nn.Linear(5, 3))
                optimizer.add_param_group({"params": list(extra[0].parameters()), "lr": 0.1})
            elif what == "another model":
                with strategy.scope():
                    extra.append(nn.Linear(5, 3))
            elif what == "another dtype":
                model.double()
                other.double()
                for one in (optimizer, rest):
                    one.load_state_dict(one.state_dict())  # gives the state the parameters' dtype
            elif what == "state again":
                optimizer.load_state_dict(optimizer.state_dict())
        strategy.run(step, batch)
    assert model[0].weight.dtype == (torch.float64 if what == "another dtype" else torch.float32)
    return [*parameters(model), *parameters(other), *tensors(optimizer), *tensors(rest)]


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = sorted(optimizer.state_dict()["state"].items())
    return [v for _, state in states for v in state.values() if isinstance(v, Tensor)]


CHANGES = ("thawed", "another group", "another model", "another dtype", "state again")


@pytest.fixture(scope="module")
def changed() -> tuple[list[Any], list[Any]]:
    return both(changes, CHANGES)


@pytest.mark.parametrize("what", CHANGES)
def test_changes_between_steps(what: str, changed: tuple[list[Any], list[Any]]) -> None:
    for ours, expected in zip(*changed, strict=True):
        assert len(ours[what]) == len(expected[what])
        assert all(torch.equal(a, b) for a, b in zip(ours[what], expected[what], strict=True))


def own_hooks() -> None:
    strategy = strategy_of(True)
    with strategy.scope():
        model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    said: list[str] = []
    norms: list[float] = []

    def before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        said.append("before")
        norms.append(float(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)))

    def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
        said.append("after")

    everywhere = register_optimizer_step_post_hook(after)
    optimizer.register_step_post_hook(after)

    def step() -> None:
        start = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        moved = torch.stack([(a - b).norm() for a, b in zip(start, model.parameters(), strict=True)]).norm()
        if norms:
            assert abs(float(moved) - 1e-3) < 1e-5, "the hook's clipping must count"

    strategy.run(step)
    optimizer.register_step_pre_hook(before)
    strategy.run(step)
    everywhere.remove()
    assert said == ["after", "after", "before", "after", "after"]


def test_hooks_of_the_optimizer_see_its_parameters_and_come_first() -> None:
    launch(own_hooks)


def ask_for_the_state() -> list[str]:
    strategy = strategy_of(True)
    with strategy.scope():
        model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()

    strategy.run(step)
    texts = []
    weight = model[0].weight
    for ask in (
        lambda: optimizer.state[weight],
        lambda: optimizer.state.get(weight),
        lambda: weight in optimizer.state,
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.values(),
        lambda: copy.deepcopy(optimizer),
    ):
        with pytest.raises(mirrored.MirrorError) as caught:
            ask()
        texts.append(str(caught.value))
    return texts


def test_the_state_itself_is_refused_with_a_way_out() -> None:
    for texts in launch(ask_for_the_state):
        assert all("optimizer.state_dict()" in text for text in texts)


def keep_a_state_dict(shard: bool) -> list[Tensor]:
    strategy = strategy_of(shard)
    with strategy.scope():
        model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    kept = model.state_dict()  # lies in the parameters' memory

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(step)
    assert all(torch.equal(a, b) for a, b in zip(kept.values(), model.parameters(), strict=True))
    return parameters(model)


def test_parameters_that_share_their_memory_stay_there_and_it_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    expected = launch(keep_a_state_dict, False)[0]
    for result in launch(keep_a_state_dict, True):
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    said = (
        "Adam number 0: 4 parameters (Sequential.0.weight, Sequential.0.bias, Sequential.2.weight …) are updated whole"
    )
    assert capfd.readouterr().err.count(said) == 1


def gan(shard: bool) -> list[Tensor]:
    """The generator's step goes through the discriminator, whose gradients nobody wants."""
    strategy = strategy_of(shard)
    with strategy.scope():
        generator, discriminator = nn.Linear(3, 5), nn.Linear(5, 1)
    by_generator = torch.optim.Adam(generator.parameters(), 0.1)
    by_discriminator = torch.optim.Adam(discriminator.parameters(), 0.1)
    noise = torch.Generator().manual_seed(strategy.topology.index)

    def step() -> None:
        z = torch.randn(4, 3, generator=noise)
        by_discriminator.zero_grad()
        (discriminator(generator(z).detach()).mean() - discriminator(torch.ones(4, 5)).mean()).backward()
        by_discriminator.step()
        by_generator.zero_grad()
        (-discriminator(generator(z)).mean()).backward()
        by_generator.step()

    for _ in range(4):
        strategy.run(step)
    return [*parameters(generator), *parameters(discriminator)]


def test_two_models_with_two_optimizers() -> None:
    expected = launch(gan, False)[0]
    for result in launch(gan, True):
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_one_tower_has_nothing_to_share_out() -> None:
    strategy = mirrored.MirroredStrategy(["cpu:0"], shard_optimizer=True)
    with strategy.scope():
        model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters())
    strategy.run(lambda: optimizer.step(lambda: model(torch.ones(2, 5)).sum()))
    assert type(optimizer.state) is not dict
