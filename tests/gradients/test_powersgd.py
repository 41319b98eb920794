"""Gradients that travel as products of thin matrices: the paper's numbers, bytes, towers that stay equal, refusals."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrored
from examples.digits import Digits, Net, load_digits
from tests.support.features import FEATURES, train_gan, with_feature
from tests.support.jobs import assert_close, launch, text_of, towers
from tests.support.steps import averaging_step

SHAPES = [(12, 40), (7,), (30, 2, 3), (3, 4)]  # the first and the third travel as products
WAYS = {"gloo": (2, ""), "gloo of three": (3, ""), "hosts": (3, "aab"), "shared memory": (2, "")}


def settings(implementation: str = "gloo", rank: int = 2, start_step: int = 0, **options: Any) -> dict[str, Any]:
    how = mirrored.PowerSGD(rank=rank, start_step=start_step)
    return {"communication": mirrored.CommunicationOptions(implementation, compression=how, **options)}


def gradient(tower: int, step: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(100 * tower + step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sent(strategy: mirrored.Strategy) -> list[int]:
    """Sizes in bytes, from now on, of what is averaged."""
    channel, sizes = strategy.engine.averager._channel, list[int]()
    submit = channel.submit_average

    def noting(tensor: Tensor) -> Any:
        sizes.append(tensor.nbytes)
        return submit(tensor)

    channel.submit_average = noting
    return sizes


def average(strategy: mirrored.Strategy, numbers: Sequence[int | None]) -> Any:
    """The averaged gradients of each step, and how many bytes were averaged in it.

    Args:
        numbers: which gradients each step has; None: the vector alone has one.
    """
    parameters = strategy.mirror(nn.ParameterList([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]))
    tower, after, sizes = strategy.topology.index, [], sent(strategy)

    def step(number: int | None) -> None:
        parameters.zero_grad()
        chosen = [parameters[1]] if number is None else parameters
        sum((p * gradient(tower, number or 0, tuple(p.shape))).sum() for p in chosen).backward()

    for number in numbers:
        strategy.run(step, args=(number,))
        after.append(([None if p.grad is None else p.grad.clone() for p in parameters], sum(sizes)))
        sizes.clear()
    return after


def exact(count: int, step: int) -> list[Tensor]:
    """The means of gradients."""
    return [torch.stack([gradient(tower, step, shape) for tower in range(count)]).mean(0) for shape in SHAPES]


def reference(count: int, numbers: Sequence[int], rank: int) -> Iterator[list[Tensor]]:
    """The gradients of each step as the paper has them: of matrices the mean of products, of others the mean."""
    qs: dict[int, Tensor] = {}
    errors: dict[tuple[int, int], Tensor] = {}
    for number in numbers:
        found = exact(count, number)
        for i in (0, 2):
            rows, each = SHAPES[i][0], range(count)
            wide = [gradient(tower, number, SHAPES[i]).view(rows, -1) for tower in each]
            if rows > wide[0].shape[1]:
                wide = [matrix.T for matrix in wide]
            matrices = [wide[tower] + errors.get((i, tower), 0.0) for tower in each]
            first = torch.randn((matrices[0].shape[1], rank), generator=torch.Generator().manual_seed(0))
            q = torch.linalg.qr(qs.get(i, first.double()))[0]
            p = torch.linalg.qr(torch.stack([m @ q for m in matrices]).mean(0))[0]
            qs[i] = torch.stack([m.T @ p for m in matrices]).mean(0)
            errors |= {(i, tower): matrices[tower] - p @ qs[i].T for tower in each}
            product = p @ qs[i].T
            found[i] = (product if len(product) == rows else product.T).reshape(SHAPES[i])
        yield found


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_papers_and_equal_on_all_towers(way: str) -> None:
    count, hosts = WAYS[way]
    options = settings("gloo" if "gloo" in way else "auto")
    results = towers(average, range(6), count=count, hosts=hosts, settings=options)
    for step, expected in enumerate(reference(count, range(6), rank=2)):
        for result in results:
            assert_close(result[step][0], expected, 1e-9)
            assert all(map(torch.equal, result[step][0], results[0][step][0]))


def _with_threads(strategy: mirrored.Strategy) -> list[Tensor]:
    torch.set_num_threads(4 if strategy.is_chief else 1)
    model, after = strategy.mirror(nn.Linear(2000, 1000, bias=False)), []
    for step in range(2):
        model.zero_grad()
        factor = gradient(strategy.topology.index, step, (1000, 2000)).float()
        strategy.run(lambda factor: (model.weight * factor).sum().backward(), args=(factor,))
        after.append(model.weight.grad.clone())
    return after


def test_towers_with_other_numbers_of_threads_get_the_same_bits() -> None:
    one, other = towers(_with_threads, settings=settings(rank=32))
    assert all(map(torch.equal, one, other))


def test_from_a_step_on_fewer_bytes_travel_and_before_it_averages_are_exact() -> None:
    for result in towers(average, range(5), settings=settings(start_step=3)):
        for step, (gradients, nbytes) in enumerate(result):
            assert all(map(torch.allclose, gradients, exact(2, step))) == (step < 3)
            if step < 3:
                assert nbytes > 8 * (12 * 40 + 7 + 6 * 30 + 12)
            else:  # P twice and Q of two, the others, and the flags
                assert nbytes < 8 * (2 * (24 + 40 + 12 + 30) + 7 + 12 + 200)


def test_what_no_tower_uses_has_no_gradient_and_keeps_its_error() -> None:
    for result in towers(average, [0, None, None, 1], settings=settings()):
        assert [g is None for g in result[1][0]] == [True, False, True, True]
        for (gradients, _), expected in zip(result[::3], reference(2, range(2), rank=2), strict=True):
            assert_close(gradients, expected, 1e-9)


def test_nothing_is_lost_for_good() -> None:
    for result in towers(average, [0] * 60, settings=settings()):
        lacks = [(exact(2, 0)[0] - gradients[0]) for gradients, _ in result]
        far = torch.stack(lacks).cumsum(0).norm(dim=(1, 2))
        assert far[20:].max() < 1.2 * far[:20].max()  # without errors it would grow by the same in every step


def _not_a_number(strategy: mirrored.Strategy) -> list[bool]:
    """Whether the gradients of each step are finite; those of tower 1 are not in step 1."""
    model = strategy.mirror(nn.Linear(30, 20))
    finite = []

    def step(factor: float) -> None:
        model.zero_grad()
        (model(torch.ones(2, 30)).square().mean() * factor).backward()

    for number in range(4):
        strategy.run(step, args=(float("nan") if number == strategy.topology.index == 1 else 1.0,))
        finite.append(bool(model.weight.grad.isfinite().all()))
    return finite


def test_a_gradient_that_is_not_finite_is_seen_on_all_towers_and_leaves_nothing_behind() -> None:
    assert towers(_not_a_number, settings=settings()) == [[True, False, True, True]] * 2


@pytest.mark.parametrize("feature", FEATURES)
def test_towers_stay_equal_with_what_pytorch_has(feature: str) -> None:
    one, other = towers(with_feature, feature, settings=settings(rank=1))
    assert all(map(torch.equal, one["parameters"], other["parameters"]))


def _others(strategy: mirrored.Strategy) -> list[Tensor]:
    """Gradients of complex, half and channels-last parameters, and of a model that only tower 0 keeps."""
    kept, found = [], []
    for dtype in (torch.complex64, torch.bfloat16, torch.float16):
        with strategy.scope():
            model = nn.Conv2d(8, 16, 3, bias=False).to(memory_format=torch.channels_last).to(dtype)
        for step in range(2):
            model.zero_grad()
            factor = gradient(strategy.topology.index, step, (16, 8, 3, 3)).to(dtype)
            with torch.autocast("cpu", torch.bfloat16):
                strategy.run(lambda m, f: (m.weight * f).sum().abs().backward(), args=(model, factor))
        found.append(model.weight.grad)
        if strategy.is_chief:
            kept.append(model)
    return found


def test_other_kinds_of_parameters() -> None:
    one, other = towers(_others, settings=settings())
    assert all(map(torch.equal, one, other))
    assert all(g.isfinite().all() and g.norm() > 1 for g in one)


def test_two_models_with_losses_of_their_own() -> None:
    one, other = towers(train_gan, settings=settings(rank=1))
    assert all(map(torch.equal, one, other))


def _right(strategy: mirrored.Strategy, epochs: int, train_set: Digits, test_set: Digits) -> tuple[float, int]:
    """The share of the test digits that a network is right on after some epochs, and bytes averaged."""
    torch.set_num_threads(1)
    train = strategy.distribute_dataset(train_set, 64, shuffle=True)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * len(train))
    step, sizes = averaging_step(model, optimizer), sent(strategy)
    for _ in train.epochs(epochs):
        for batch in train:
            strategy.run(step, args=batch)
            schedule.step()
    strategy.check_mirrored()
    model.eval()
    with torch.no_grad():
        return (model(test_set.images).argmax(1) == test_set.labels).float().mean().item(), sum(sizes)


@pytest.mark.extended
def test_digits_are_learned_as_well_with_an_eighth_of_the_bytes() -> None:
    gloo, digits = {"communication": mirrored.CommunicationOptions("gloo")}, load_digits()  # scikit-learn's
    exact, whole = towers(_right, 8, *digits, settings=gloo)[0]
    compressed, fewer = towers(_right, 8, *digits, settings=settings(rank=4, start_step=10))[0]
    assert compressed > exact - 0.01 > 0.96
    assert fewer < whole / 8


# -- what else there is --------------------------------------------------------------------------------------


def _resumes(strategy: mirrored.Strategy, folder: str, steps: int) -> tuple[list[int], int]:
    """Bytes averaged in each step, and the step after which a checkpoint was."""
    with strategy.scope():
        model = nn.Linear(60, 50)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = mirrored.CheckpointManager(strategy, folder, {"model": model, "optimizer": optimizer})
    restored = checkpoints.restore_newest()
    sizes, each = sent(strategy), []
    for _ in range(steps):
        strategy.run(lambda: (optimizer.zero_grad(), model(torch.ones(1, 60)).sum().backward(), optimizer.step()))
        checkpoints.step()
        each.append(sum(sizes))
        sizes.clear()
    checkpoints.save(wait=True)
    return each, restored.step if restored is not None else 0


def test_a_resumed_run_does_not_begin_its_exact_averages_anew(tmp_path: pathlib.Path) -> None:
    options = settings(start_step=3)
    whole, _ = towers(_resumes, str(tmp_path), 2, settings=options)[0]
    resumed, step = towers(_resumes, str(tmp_path), 2, settings=options)[0]
    assert step == 2
    assert whole[0] == whole[1] == resumed[0] > 4 * resumed[1]
    exact, step = towers(_resumes, str(tmp_path), 1)[0]  # a run without compression resumes from there
    assert (step, exact) == (4, [whole[0]])


@pytest.mark.row(76)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"virtual_towers": 2}, "while virtual_towers promise the same bits"),
        ({"shard_optimizer": True}, "while shard_optimizer=True sends all parameters"),
        ({"synchronize": mirrored.LocalSGD(4)}, "while with synchronize= towers send no gradients"),
        ({"central": True}, "while the towers of CentralStorageStrategy are on one host"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    kind = mirrored.CentralStorageStrategy if options.pop("central", False) else mirrored.MirroredStrategy
    with pytest.raises(ValueError, match=words):
        kind(**settings("auto"), **options)


@pytest.mark.row(76)
def test_wrong_numbers_and_other_objects_are_refused() -> None:
    for rank in (0, -1, 2.0, True):
        assert f"rank is {rank!r}" in text_of(ValueError, mirrored.PowerSGD, rank)
    assert "start_step is -1, but must be a whole number from 0" in text_of(ValueError, mirrored.PowerSGD, 4, -1)
    for other in ("powersgd", 4, mirrored.PowerSGD):
        assert "has to be mirrored.PowerSGD" in text_of(TypeError, mirrored.CommunicationOptions, compression=other)


def _of_another_rank() -> None:
    import os

    mirrored.MirroredStrategy(**settings(rank=2 + int(os.environ["RANK"])))


@pytest.mark.row(76)
def test_towers_agree_on_the_rank() -> None:
    with pytest.raises(mirrored.TowerFailedError, match="different communication options"):
        launch(_of_another_rank)
