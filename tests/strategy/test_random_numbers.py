"""Random numbers: equal on all towers outside of ``run``, at every time, and different inside."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import random_split

import mirrored
from mirrored import generators
from tests.support.jobs import make_data, make_mlp, towers

CPU = torch.device("cpu")


def draw() -> list[float]:
    """One number of each generator, one of them from a pair of which NumPy keeps the second."""
    return [random.random(), float(np.random.rand()), float(np.random.normal()), float(torch.rand(()))]


def split_and_draw() -> list[Any]:
    """What scripts draw outside of ``run``: a split of the data, an order, weights of a sampler, and ``draw``."""
    validation, _ = random_split(range(20), [5, 15])
    return [list(validation.indices), torch.randperm(9).tolist(), torch.multinomial(torch.ones(6), 3).tolist(), draw()]


def noisy_step(x: torch.Tensor) -> list[float]:
    """Draws more on one tower than on another, from every generator."""
    F.dropout(torch.ones(3 + len(x)))
    for _ in range(1 + mirrored.get_strategy().topology.index):
        random.random()
        np.random.normal()
    return draw()


def outside_and_inside(strategy: mirrored.Strategy) -> tuple[list[Any], list[list[float]]]:
    data = strategy.distribute_dataset(torch.arange(7.0), 7)
    outside, inside = [split_and_draw()], []
    for _ in range(10):
        for x in data:
            inside.append(strategy.run(noisy_step, args=(x,)))
        outside.append(split_and_draw())
    return outside, inside


def drawn_by(count: int, seed: int | None) -> list[tuple[list[Any], list[list[float]]]]:
    return towers(outside_and_inside, count=count, settings={"seed": seed})


def test_random_numbers_are_equal_outside_of_run_and_different_inside() -> None:
    by_count = {count: drawn_by(count, 3) for count in (1, 2, 3)}
    assert all(outside == by_count[1][0][0] for found in by_count.values() for outside, _ in found)
    numbers = [number for _, inside in by_count[3] for step in inside for number in step]
    assert len(set(numbers)) == len(numbers), "some number came twice"
    # torch draws as many numbers as a share has examples.
    drawn = {count: [[step[:3] for step in inside] for _, inside in found] for count, found in by_count.items()}
    assert drawn[2] == drawn[3][:2], "a tower's own stream depends on the seed and its index only"
    (first, _), (second, _) = without_seed = drawn_by(2, None)
    assert first == second
    assert drawn_by(2, None)[0][0] != first, "without a seed each job draws others"
    numbers = [number for _, inside in without_seed for step in inside for number in step]
    assert len(set(numbers)) == len(numbers)


def contexts(strategy: mirrored.Strategy) -> tuple[list[Any], list[Any]]:
    """What is drawn where contexts lie in each other, and where a run ends by an exception."""
    outside: list[Any] = []
    inside: list[Any] = []

    def merged(_: mirrored.Strategy) -> None:
        outside.append(draw())
        inside.append(strategy.run(draw))
        outside.append(draw())

    def nested() -> None:
        inside.append(draw())
        inside.append(strategy.run(draw))
        replica = mirrored.get_replica_context()
        replica.merge_call(merged)
        inside.append(draw())
        raise ArithmeticError

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            strategy.run(nested)
        outside.append(split_and_draw())
    return outside, inside


def test_random_numbers_of_nested_contexts_and_after_exceptions() -> None:
    (alone, _), *found = [*towers(contexts, count=1), *towers(contexts)]
    (first, own), (second, others) = found
    assert first == second == alone
    numbers = [number for step in own + others for number in step]
    assert len(set(numbers)) == len(numbers)


def with_virtual_towers(strategy: mirrored.Strategy) -> list[Any]:
    model = strategy.mirror(make_mlp())
    data = strategy.distribute_dataset(torch.utils.data.TensorDataset(*make_data(7)), 7)
    outside = []
    for _ in range(2):
        for x, y in data:

            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                noise = 0.1 * torch.randn(len(x), 1, dtype=x.dtype)  # as many as this tower has examples
                np.random.normal(size=len(x))
                return strategy.backward(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x + noise, y)

            strategy.run(step, args=(x, y))
        outside.append(split_and_draw())
    return outside


def test_random_numbers_with_virtual_towers_are_equal_outside_of_run() -> None:
    found = [towers(with_virtual_towers, count=count, settings={"virtual_towers": 4}) for count in (1, 2, 4)]
    assert all(outside == found[0][0] for outsides in found for outside in outsides)


def resumed(strategy: mirrored.Strategy, folder: str, first: int, last: int) -> tuple[list[Any], list[Any]]:
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": {}})
    assert manager.restore_newest() is not None or not first
    outside, inside = [], []
    for _ in range(first, last):
        inside.append(strategy.run(draw))
        outside.append(draw())
        manager.step()
    manager.save(wait=True)
    return outside, inside


def test_random_numbers_go_on_where_a_checkpoint_was_taken(tmp_path: pathlib.Path) -> None:
    def drawn(folder: str, count: int, first: int, last: int) -> list[tuple[list[Any], list[Any]]]:
        return towers(resumed, str(tmp_path / folder), first, last, count=count, settings={"seed": 4})

    whole = drawn("a", 2, 0, 7)
    parts = [drawn("b", *settings) for settings in ((2, 0, 2), (2, 2, 4), (1, 4, 5), (2, 5, 7))]
    for tower in (0, 1):
        outside = [numbers for part in parts for numbers in part[tower % len(part)][0]]
        assert outside == whole[tower][0], "outside of run they do not depend on the number of towers"
        inside = [numbers for part in parts[:2] for numbers in part[tower][1]]
        assert inside == whole[tower][1][:4], "the same number of towers goes on with the same streams"
    later = [number for tower in parts[3] for step in tower[1] for number in step]
    assert len(set(later)) == len(later), "a checkpoint of one tower gives two towers one stream"


def test_one_tower_without_a_seed_is_left_alone() -> None:
    strategy = mirrored.OneDeviceStrategy()
    before = generators.take(CPU)
    plain = [draw() for _ in range(3)]
    generators.put(before, CPU)
    assert [draw(), strategy.run(draw), draw()] == plain


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("kind", ["MT19937", "PCG64"])
def test_generators_go_on_where_they_were_taken(kind: str, odd: int) -> None:
    """Also NumPy's second normal number of a pair, and a bit generator of the script's own."""
    original = np.random.get_bit_generator()
    kept = generators.take(CPU)
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(5))
        random.seed(5)
        np.random.normal(size=odd)
        before = np.random.get_state(legacy=False)
        place = generators.take(CPU)
        np.testing.assert_equal(np.random.get_state(legacy=False), before)
        random.gauss(0, 1)
        numbers = [random.gauss(0, 1), *np.random.normal(size=5), *np.random.rand(700), *torch.rand(700).tolist()]
        generators.put(place, CPU)
        np.testing.assert_equal(np.random.get_state(legacy=False), before)
        np.random.seed(0) if kind == "MT19937" else np.random.set_bit_generator(original)
        generators.put(place, CPU)
        random.gauss(0, 1)
        again = [random.gauss(0, 1), *np.random.normal(size=5), *np.random.rand(700), *torch.rand(700).tolist()]
        assert again == numbers
    finally:
        generators.put(kept, CPU)
    assert np.random.get_bit_generator() is original
