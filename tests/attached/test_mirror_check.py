"""The check that towers are still mirror images: what it finds, what it says, and what it leaves alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from mirrored.attached.mirror_check import MirrorCheck
from tests.support.jobs import GLOO, all_raise, make_data, make_mlp, towers
from tests.support.logs import Records
from tests.support.steps import local_share
from towers.collectives.communicator import Alone


class Net(nn.Module):
    """Two layers, one of them large enough to be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4096)
        self.second = nn.Linear(4096, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def change_one_bit(strategy: mirrored.Strategy, model: Net, optimizer: torch.optim.Optimizer) -> None:
    if strategy.topology.index == strategy.num_replicas_in_sync - 1:
        model.first.weight.data.view(torch.int32)[4000, 3] ^= 1


def swap_values(strategy: mirrored.Strategy, model: Net, optimizer: torch.optim.Optimizer) -> None:
    if strategy.topology.index == 0:
        model.first.weight.data[[10, 900]] = model.first.weight.data[[900, 10]]


def swap_parameters(strategy: mirrored.Strategy, model: Net, optimizer: torch.optim.Optimizer) -> None:
    if strategy.topology.index == 1:
        one, other = model.second.weight.data[0, :3], model.second.bias.data
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def change_state(strategy: mirrored.Strategy, model: Net, optimizer: torch.optim.Optimizer) -> None:
    if strategy.topology.index == 1:
        optimizer.state[model.second.bias]["exp_avg"][1] *= -1


def change_all(strategy: mirrored.Strategy, model: Net, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.second.bias += strategy.topology.index


def halve_the_rate(strategy: mirrored.Strategy, model: Net, optimizer: torch.optim.Optimizer) -> None:
    if strategy.is_chief:
        optimizer.param_groups[0]["lr"] /= 2


def step_alone(strategy: mirrored.Strategy, model: Net, optimizer: torch.optim.Optimizer) -> None:
    sum(p.sum() for p in model.parameters()).backward()  # of all towers
    if strategy.is_chief:
        optimizer.step()


Change = Callable[[mirrored.Strategy, Net, torch.optim.Optimizer], None]


def train(
    strategy: mirrored.Strategy,
    change: Change | None,
    at: int = 10**9,
    runs: int = 12,
    now: bool = False,
    later: bool = False,
) -> list[int]:
    """Train for some runs, with a change before the one with number ``at``. Returns in which runs was checked.

    Args:
        now: check at once, too.
        later: read what a check finds as late as between GPUs.
    """
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    strategy.engine.attached(MirrorCheck)._read_later = later
    x, _ = make_data(8, torch.float32)
    checked: list[int] = []
    come_to = MirrorCheck.come_to

    def noted(check: MirrorCheck, run: int) -> None:
        checked.append(run)
        come_to(check, run)

    MirrorCheck.come_to = noted  # type: ignore[method-assign]

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for run in range(1, runs + 1):
        if change is not None and run == at:
            change(strategy, model, optimizer)
        if now and run >= at:
            strategy.check_mirrored()
        strategy.run(step)
    return checked


def error_of(change: Change, *args: Any, count: int = 2, hosts: str = "", **settings: Any) -> str:
    """What a training that must fail says, the same on all towers."""
    options: Any = {"count": count, "hosts": hosts, "settings": settings}
    return all_raise(mirrored.MirrorError, "", train, change, *args, same=True, **options)[0]


def runs_checked(*args: Any, **settings: Any) -> list[int]:
    first, second = towers(train, *args, settings=settings)
    assert first == second
    return first


def test_one_bit_of_one_tower_is_found_and_named() -> None:
    text = error_of(change_one_bit, 5, count=3)
    assert text.startswith(
        "parameter Net.first.weight is no longer the same on all towers: tower 2 differs from towers 0 and 1. This is "
        "how it was at the start of run 10; the towers were equal at the start of run 2."
    )


DIFFERS = "is no longer the same on all towers: tower 0 differs from tower 1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap_values, f"parameter Net.first.weight {DIFFERS}. This is"),
        (swap_parameters, f"parameter Net.second.weight {DIFFERS}. Also different: 1 parameter. "),
        (change_state, f"optimizer state exp_avg of Net.second.bias (Adam) {DIFFERS}. This"),
        (halve_the_rate, f"setting lr of Adam {DIFFERS} (0.005 on tower 0, 0.01 on tower 1"),
        (step_alone, f"parameter Net.first.weight {DIFFERS}. Also different: 3 parameters, 12 optimizer states. "),
    ],
)
def test_what_one_tower_did_alone_is_found(change: Change, words: str) -> None:
    assert error_of(change, 7, 7, mirror_check_interval=7).startswith(words)


def test_all_towers_may_differ() -> None:
    text = error_of(change_all, 2, 2, count=3)
    assert "Net.second.bias is no longer the same on all towers: it is different on every tower." in text
    assert "run 2. Look for" in text


@pytest.mark.parametrize(("hosts", "settings"), [("aab", {}), ("aa", GLOO), ("aa", {"shard_optimizer": True})])
def test_several_hosts_gloo_and_parameters_of_a_sharded_optimizer(hosts: str, settings: dict[str, Any]) -> None:
    text = error_of(change_one_bit, 2, 2, count=len(hosts), hosts=hosts, **settings)
    assert text.startswith("parameter Net.first.weight is no longer the same on all towers: tower ")
    assert ("tower 2 differs from towers 0 and 1" if len(hosts) == 3 else "tower 0 differs from tower 1") in text


@pytest.mark.parametrize("implementation", ["auto", "gloo"])
def test_with_the_optimizer_shared_out_a_step_alone_meets_the_check(implementation: str) -> None:
    communication = mirrored.CommunicationOptions(implementation=implementation)
    settings = {"communication": communication, "shard_optimizer": True}
    words = r"tower 1 reaches run\(\) number 2"
    all_raise(mirrored.DisagreementError, words, train, step_alone, 2, 2, settings=settings)


def test_a_check_may_be_read_later() -> None:
    text = error_of(swap_values, 40, 60, False, True, mirror_check_interval=40)
    assert "This is how it was at the start of run 40; the towers were equal at the start of run 10." in text
    assert runs_checked(swap_values, 41, 50, False, True, mirror_check_interval=40) == [2, 10, 20, 40, 50]


def test_checking_at_once() -> None:
    text = error_of(swap_values, 5, 5, True)
    assert "tower 0 differs from tower 1. This is how it was after the start of run 4" in text
    text = error_of(swap_values, 5, 5, True, mirror_check_interval=None)
    assert "after the start of run 4. Look for" in text


def test_when_towers_check() -> None:
    assert runs_checked(None, 0, 15, mirror_check_interval=4) == [2, 4, 8, 10, 12]
    assert runs_checked(change_one_bit, 5, 12, mirror_check_interval=None) == []
    check = MirrorCheck(Alone(torch.device("cpu")), 100, lambda: ())
    due = [check.due]
    while due[-1] < 300:
        check.come_to(due[-1])
        due.append(check.due)
    assert due == [2, 10, 100, 200, 300]


@pytest.mark.extended
def test_every_250th_run_by_default() -> None:
    for change in (change_one_bit, halve_the_rate):
        text = error_of(change, 251, 510)
        assert "at the start of run 500; the towers were equal at the start of run 250" in text


@pytest.mark.parametrize("interval", [0, -1, True, 2.0, "10"])
def test_intervals_that_are_none(interval: Any) -> None:
    with pytest.raises(ValueError, match="mirror_check_interval is .*, but must be None or a whole number"):
        mirrored.MirroredStrategy(["cpu:0"], mirror_check_interval=interval)


def other_options(strategy: mirrored.Strategy) -> None:
    mirrored.MirroredStrategy(mirror_check_interval=10 + strategy.topology.index)


def test_all_towers_are_given_the_same_interval() -> None:
    words = "mirror_check_interval is 10 on tower 0, but 11 on tower 1"
    all_raise(mirrored.DisagreementError, words, other_options)


def run_more_on_one(strategy: mirrored.Strategy) -> None:
    strategy.run(lambda: None)
    if strategy.is_chief:
        strategy.run(lambda: None)
    strategy.reduce("sum", 1)


def test_a_run_of_one_tower_alone_meets_the_others() -> None:
    words = r"tower 1 reduce\('sum', axis=None\), tower 0 run\(\) number 2"
    all_raise(mirrored.DisagreementError, words, run_more_on_one)


def test_one_tower_has_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrored.attached.mirror_check.MirrorCheck.__init__", lambda *_, **__: pytest.fail("was made"))
    strategy = mirrored.MirroredStrategy(["cpu:0"], mirror_check_interval=1)
    for _ in range(3):
        strategy.run(lambda: None)
    strategy.check_mirrored()


def train_for_nothing(strategy: mirrored.Strategy, kept: list[Any]) -> None:
    """Train a model that the chief alone keeps."""
    model = strategy.mirror(make_mlp(torch.float32))
    optimizer = torch.optim.Adam(model.parameters())
    strategy.run(lambda: model(torch.ones(1, 5)).sum().backward())
    optimizer.step()
    optimizer.zero_grad()
    if strategy.is_chief:
        kept += [model, optimizer]


def train_correctly(strategy: mirrored.Strategy) -> float:
    """What towers may well do differently: dropout, BatchNorm's statistics, what they keep, a chief's own EMA."""
    kept: list[Any] = []
    train_for_nothing(strategy, kept)
    with strategy.scope():
        model = nn.Sequential(
            nn.Linear(5, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 3), nn.BatchNorm1d(3)
        )
        critic = make_mlp(torch.float32)
        ema = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
    own_ema = copy.deepcopy(model)
    one = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    other = torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(one, 2, 0.5)
    x, y = local_share(strategy, *make_data(13, torch.float32))

    def step() -> None:
        for optimizer, network in ((other, critic), (one, model)):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
        schedule.step()

    for number in range(6):
        with strategy.no_sync():
            strategy.run(lambda: critic(x).sum().backward())
        strategy.run(step)
        ema.update_parameters(model)
        if strategy.is_chief:
            own_ema.load_state_dict(model.state_dict())
        if number == 3:
            critic.load_state_dict(critic.state_dict())
            one.load_state_dict(one.state_dict())
    strategy.check_mirrored()
    means = strategy.gather(model[1].running_mean.unsqueeze(0))
    return float((means[0] - means[1]).abs().max())


@pytest.mark.parametrize("sharded", [False, True])
def test_correct_scripts_are_left_alone(sharded: bool) -> None:
    for apart in towers(train_correctly, settings={"mirror_check_interval": 1, "shard_optimizer": sharded}):
        assert apart > 0.01


def average_on_the_chief(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model, ema = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for _ in range(11):
        strategy.run(step)
        if strategy.is_chief:
            ema.load_state_dict(model.state_dict())


def test_what_no_optimizer_steps_has_to_be_equal_too() -> None:
    words = r"^parameter Linear\[1\].weight is no longer the same on all towers: tower 0 differs from"
    text, _ = all_raise(mirrored.MirrorError, words, average_on_the_chief, same=True)
    assert "an average of parameters (EMA)" in text
    assert "at the start of run 2" in text
    assert "outside the scope" in text


def become_nan(strategy: mirrored.Strategy) -> list[str]:
    records = Records()
    logging.getLogger("mirrored").addHandler(records)
    model = strategy.mirror(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        (model(torch.ones(1, 2)).sum() * float("nan")).backward()
        optimizer.step()

    for _ in range(11):
        strategy.run(step)
    return [message for message in records.messages if "nan" in message]


def test_parameters_that_are_nan_are_said_once() -> None:
    [message], nothing = towers(become_nan)
    assert nothing == []
    assert message.startswith(
        "parameter Linear.weight contains nan on all towers, and 1 more parameters are not finite, found at the start "
        "of run 2."
    )
