"""Towers that wait for each other in different collectives, and what puts them there, end within seconds."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.support.children import in_a_child
from tests.support.jobs import SETTINGS, make_data, make_mlp, parameters_of, towers
from tests.support.waiting import HANG
from towers.health.deadlock import Beat, find_cycle, find_different_calls
from towers.health.status import Status, Wait

pytestmark = pytest.mark.extended


class Training:
    """A model, its data and a step; towers have shares of 2 examples."""

    def __init__(self, strategy: mirrored.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = make_mlp()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        x, y = make_data(40)
        dataset = torch.utils.data.TensorDataset(x, y)
        self.data = strategy.distribute_dataset(dataset, 2 * strategy.num_replicas_in_sync)
        self.last = strategy.topology.index == strategy.num_replicas_in_sync - 1

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return mirrored.compute_average_loss(nn.functional.cross_entropy(self.model(x), y, reduction="none"))

    def step(self, x: Tensor, y: Tensor, reaches: bool = True) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        if not reaches:
            loss = loss.detach().requires_grad_()
        loss.backward()
        if reaches:
            self.optimizer.step()
        return loss.detach()


def leaves_the_loop(job: Training) -> None:
    for number, batch in enumerate(job.data, start=1):
        if number == 4 and job.last:
            break
        job.strategy.run(job.step, args=batch)
    job.strategy.reduce("sum", 1.0)


def reaches_no_parameter(job: Training) -> None:
    for number, batch in enumerate(job.data, start=1):
        job.strategy.run(job.step, args=(*batch, not (number == 4 and job.last)))
        job.strategy.reduce("sum", 1.0)


def local_closure(job: Training) -> None:
    """Towers whose line searches see other losses make other numbers of backwards."""
    with job.strategy.scope():
        model = make_mlp(seed=3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def step(x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach() if not job.last else torch.zeros_like(loss)

        optimizer.step(closure)

    for batch in job.data:
        job.strategy.run(step, args=batch)
        job.strategy.reduce("sum", 1.0)


def module_of_the_chief(job: Training) -> None:
    for number, batch in enumerate(job.data, start=1):
        if number == 4 and job.strategy.is_chief:
            job.strategy.mirror(make_mlp(seed=5))
        job.strategy.run(job.step, args=batch)


MISTAKES: dict[str, tuple[Callable[[Training], None], str]] = {
    "a loop that one tower leaves": (
        leaves_the_loop,
        r"tower 0 is in step 4, averaging gradients, and waits for tower \d.*tower \d is after step 3, at reduce",
    ),
    "a loss that reaches no parameter": (
        reaches_no_parameter,
        r"tower \d has gone on without averaging gradients in step 4",
    ),
    "a module that the chief made alone": (module_of_the_chief, r"tower 0 is .*at the first run\(\) of a model"),
    "a closure with the tower's own loss": (local_closure, r"LBFGS|averaging gradients|reduce"),
}


def make_a_mistake(name: str, backend: str) -> None:
    MISTAKES[name][0](Training(mirrored.MirroredStrategy(seed=0, mirror_check_interval=None, **SETTINGS[backend])))


CASES = [(name, "shared memory") for name in MISTAKES]
CASES += [("a loop that one tower leaves", "sharded"), ("a loss that reaches no parameter", "gloo")]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_towers_that_wait_for_each_other_end_at_once(name: str, backend: str) -> None:
    count = 3 if backend == "gloo" else 2
    with pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(make_a_mistake, (name, backend), towers=count, timeout=HANG)
    causes = [failed.exception for failed in caught.value.failures if not failed.consequence]
    assert causes
    for error in causes:
        assert isinstance(error, mirrored.DisagreementError), error
        assert re.search(MISTAKES[name][1], str(error), re.DOTALL), error


def deadlock_across_hosts(strategy: mirrored.Strategy) -> None:
    leaves_the_loop(Training(strategy))


def test_across_hosts() -> None:
    with pytest.raises(mirrored.TowerFailedError, match="deadlock: tower 0 is in step 4, averaging gradients"):
        towers(deadlock_across_hosts, count=3, hosts="aab", settings={"mirror_check_interval": None})


def beat_of(number: int, wait: tuple[str, int] | None, **begun: int) -> Beat:
    towers = (0, 1, 2)
    return Beat(number, Status(number), begun, Wait(*wait, towers) if wait is not None else None)


def test_a_cycle_is_found_when_it_is_one() -> None:
    def stuck(number: int) -> dict[int, Beat]:
        return {
            0: beat_of(number, ("a", 5), a=5, b=2, c=1),  # waits for 2
            1: beat_of(number, ("b", 3), a=5, b=3, c=1),  # waits for 0
            2: beat_of(number, ("c", 2), a=4, b=3, c=2),  # waits for 0 and 1
        }

    assert find_cycle(stuck(1), stuck(2)) == [0, 2]
    three = stuck(1) | {2: beat_of(1, ("c", 2), a=4, b=3, c=2), 0: beat_of(1, ("a", 5), a=5, b=2, c=2)}
    assert find_cycle(three, {tower: Beat(2, b.status, b.begun, b.wait) for tower, b in three.items()}) == [0, 2, 1]


def test_towers_that_can_go_on_are_left_alone() -> None:
    waits = {0: beat_of(1, ("a", 5), a=5, b=2), 1: beat_of(1, ("b", 3), a=4, b=3), 2: beat_of(1, None, a=4, b=2)}

    def later(**changed: Beat) -> dict[int, Beat]:
        now = {tower: Beat(2, b.status, b.begun, b.wait) for tower, b in waits.items()}
        return now | {int(tower[1:]): there for tower, there in changed.items()}

    assert find_cycle(waits, later()) == [0, 1]
    assert find_cycle({}, later()) is None  # seen once only
    assert find_cycle(waits, waits) is None  # no heartbeat since: stopped
    assert find_cycle(waits, later(t1=beat_of(2, None, a=4, b=3))) is None  # it computes
    assert find_cycle(waits, later(t1=beat_of(2, ("b", 4), a=4, b=4))) is None  # it has gone on
    both_for_the_third = beat_of(2, ("a", 5), a=5, b=2)
    assert find_cycle(waits, later(t1=both_for_the_third)) is None  # which computes
    assert find_cycle(waits, later(t1=beat_of(2, ("b", 3), b=3))) is None  # nothing is known of its part in "a"


def catch_and_go_on(backend: str, inside: bool) -> None:
    """The last tower's backward fails in a hook, the script catches it and goes on with the next batch."""
    strategy = mirrored.MirroredStrategy(seed=0, mirror_check_interval=None, **SETTINGS[backend])
    job = Training(strategy)

    def fail(_: Tensor) -> None:
        if job.last and strategy.health.step == 3:
            raise FloatingPointError("a hook of the script's")

    job.model[0].weight.register_hook(fail)

    def step(x: Tensor, y: Tensor) -> None:
        try:
            job.step(x, y)
        except FloatingPointError:
            if not inside:
                raise

    for batch in job.data:
        try:
            strategy.run(step, args=batch)
        except FloatingPointError:
            continue
        strategy.reduce("sum", 1.0)


@pytest.mark.parametrize("backend", SETTINGS)
@pytest.mark.parametrize("inside", [False, True])
def test_an_exception_in_backward_that_a_script_catches_ends_all(backend: str, inside: bool) -> None:
    words = "out of step|tower 1 broke off|ended in an exception|deadlock|ended while"
    with pytest.raises(mirrored.TowerFailedError, match=words):
        mirrored.launch(catch_and_go_on, (backend, inside), towers=2, timeout=HANG)


def train_beside_a_fork(backend: str) -> tuple[str, list[Tensor]]:
    """A forked child calls backward() between two steps, also with gradients of the last step in place."""
    job = Training(mirrored.MirroredStrategy(seed=0, **SETTINGS[backend]))
    said = ""
    for number, batch in enumerate(job.data, start=1):
        if number == 3:
            said = in_a_child(lambda: job.model(batch[0]).sum().backward())  # noqa: B023
            assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in job.model.parameters())
        job.strategy.run(job.step, args=batch)
    return said, parameters_of(job.model)


@pytest.mark.parametrize("backend", SETTINGS)
def test_a_backward_of_a_forked_child_is_refused_and_does_no_harm(backend: str) -> None:
    expected = towers(train_undisturbed, count=1)[0]
    for said, parameters in mirrored.launch(train_beside_a_fork, (backend,), towers=2, timeout=HANG):
        assert "ForkedError: a collective (backward() of a mirrored model" in said
        for a, b in zip(parameters, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def gradients_in_forks(strategy: mirrored.Strategy) -> tuple[str, str]:
    """Returns whether forks of the main thread and of another thread have dropped each gradient."""
    job = Training(strategy)
    batch = next(iter(job.data))
    strategy.run(job.step, args=batch)
    dropped: list[str] = []

    def fork() -> None:
        dropped.append(in_a_child(lambda: [p.grad is None for p in job.model.parameters()]))

    fork()
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return dropped[0], dropped[1]


def test_a_fork_of_another_thread_reads_no_gradients() -> None:
    """The main thread may be replacing them in C++: reading one crashed 3 of 1,200 workers of a data loader."""
    for by_main_thread, by_another in towers(gradients_in_forks):
        assert by_main_thread == "[True, True, True, True]"
        assert by_another == "[False, False, False, False]"


def train_undisturbed(strategy: mirrored.Strategy) -> list[Tensor]:
    job = Training(strategy)
    x, y = make_data(40)
    for start in range(0, 40, 4):
        strategy.run(job.step, args=(x[start : start + 4], y[start : start + 4]))
    return parameters_of(job.model)


def test_different_calls_of_one_number_are_found() -> None:
    """The last tower is one call behind the others, which is no difference."""
    status = Status(run=3, step=3, running=True)
    looks, steps, averages = (7, "uses the averaged gradients"), (7, "steps Adam"), (6, "steps SGD")
    behind, right = Beat(1, status, {}, None, [averages]), Beat(1, status, {}, None, [averages, steps])
    assert find_different_calls({0: right, 1: right, 2: behind}) is None
    found = find_different_calls({0: right, 1: Beat(1, status, {}, None, [averages, looks]), 2: behind})
    assert found is not None
    assert "tower 0 steps Adam, tower 1 uses the averaged gradients (in step 3)" in found
