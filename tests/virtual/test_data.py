"""Data with virtual towers: streams, nested batches, and collating that does not depend on the number of towers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from mirrored.shares import Cut, bounds
from tests.support.datasets import Streamed
from tests.support.jobs import all_raise
from tests.support.virtual import V, backward_each, digest, one_digest, virtual


def streaming(strategy: mirrored.Strategy) -> str:
    model = strategy.mirror(nn.Linear(1, 1))
    stream = Streamed(torch.arange(21.0).unsqueeze(1))
    losses = backward_each(strategy, lambda x: model(x).square().squeeze(1), stream, 8)
    return digest([*losses, model.weight.grad])


def test_iterable_data() -> None:
    one_digest(streaming)


def nested(strategy: mirrored.Strategy) -> str:
    """A batch of a dict with texts."""
    model = strategy.mirror(nn.Linear(1, 3))
    examples = [{"x": torch.tensor([float(i)]), "name": f"example {i}"} for i in range(12)]
    factors = torch.tensor([1.0, 2.0, 3.0])

    def losses(batch: dict[str, Any]) -> Tensor:
        assert batch["name"] == [f"example {int(x)}" for x in batch["x"]]
        return (model(batch["x"]) * factors).sum(1)

    backward_each(strategy, losses, examples, 12)
    return digest([model.weight.grad])


def test_nested_batches() -> None:
    one_digest(nested)


def pad_and_mask(examples: list[Tensor]) -> dict[str, Any]:
    """Sequences padded to the longest, with some entries masked at random."""
    padded = nn.utils.rnn.pad_sequence(examples, batch_first=True)
    return {"x": padded * (torch.rand(padded.shape) > 0.2), "length": [f"{len(e)}" for e in examples]}


def pad_to_eight(examples: list[Tensor]) -> dict[str, Any]:
    batch = pad_and_mask(examples)
    return batch | {"x": F.pad(batch["x"], (0, 8 - batch["x"].shape[1]))}


def sequences() -> list[Tensor]:
    return [torch.arange(1.0, 3 + 3 * i % 7) for i in range(28)]


def collating(strategy: mirrored.Strategy, collate: Callable[..., Any], stream: bool) -> tuple[str, list[Any]]:
    cell = strategy.mirror(nn.GRU(1, 4, batch_first=True))
    seen: list[Any] = []

    def losses(batch: dict[str, Any]) -> Tensor:
        x, lengths = batch["x"], batch["length"]
        assert len(x) == len(lengths)
        seen.append((tuple(x.shape), x.sum().item(), lengths))
        return cell(x.unsqueeze(2))[0].sum((1, 2))

    data: Any = Streamed(sequences()) if stream else sequences()
    for batch in strategy.distribute_dataset(data, 11, collate_fn=collate):
        strategy.run(lambda batch: strategy.backward(losses, batch), args=(batch,))
    return digest(p.grad for p in cell.parameters()), seen


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("collate", [pad_and_mask, pad_to_eight])
def test_padding_and_masking_do_not_depend_on_the_number_of_towers(collate: Callable[..., Any], stream: bool) -> None:
    alone = virtual(collating, collate, stream, count=1)[0]
    if collate is pad_and_mask:
        assert len({shape[1] for shape, _, _ in alone[1]}) > 1, "parts are padded differently"
    assert {one for one, _ in virtual(collating, collate, stream, count=4)} == {alone[0]}


def labels_and_sequences(examples: list[Tensor]) -> tuple[Tensor, list[Tensor], int, Tensor]:
    """One label and one sequence for each example, how many there are, and the longest's length."""
    lengths = torch.tensor([float(len(e)) for e in examples])
    return lengths, list(examples), len(examples), lengths.max()


def with_lists(strategy: mirrored.Strategy) -> tuple[list[float], list[list[float]]]:
    with strategy.scope():
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
    means, held = [], []

    def losses(batch: Any) -> Tensor:
        labels, sequences, count, longest = batch
        assert count == len(labels) == len(sequences)
        assert longest == labels.max()
        return torch.stack([model(s.unsqueeze(1)).sum() for s in sequences])

    for batch in strategy.distribute_dataset(sequences()[:24], 12, collate_fn=labels_and_sequences):
        assert len(batch[0]) == len(batch[1]) == batch[2]
        held.append([float(s.sum()) for s in batch[1]])
        means.append(float(strategy.run(lambda batch: strategy.backward(losses, batch), args=(batch,))))
    return means, held


def test_batches_of_lists_are_collated_part_by_part() -> None:
    sums = [float(s.sum()) for s in sequences()[:24]]
    for count in (1, 2):
        results = virtual(with_lists, count=count)
        for means, _ in results:
            assert means == pytest.approx([sum(sums[:12]) / 12, sum(sums[12:]) / 12])
        shares = [share for step in zip(*(held for _, held in results), strict=True) for share in step]
        assert [one for share in shares for one in share] == sums


def two_collated_batches(strategy: mirrored.Strategy) -> tuple[str, set[int]]:
    """Batches of two loops at once, with a loop over other data between loading and using them."""
    cell = strategy.mirror(nn.GRU(1, 4, batch_first=True))
    widths: set[int] = set()

    def losses(one: Tensor, other: Tensor) -> Tensor:
        widths.update((one.shape[1], other.shape[1] + 100))
        return cell(one.unsqueeze(2))[0].sum((1, 2)) + cell(other.unsqueeze(2))[0].sum((1, 2))

    first = strategy.distribute_dataset(sequences(), 12, collate_fn=pad_and_mask)
    second = strategy.distribute_dataset(sequences()[::-1], 12, collate_fn=pad_and_mask)
    held_out = strategy.distribute_dataset(sequences()[:5], 5, collate_fn=pad_and_mask)
    for one, other in zip(first, second, strict=True):
        for _ in held_out:
            pass
        strategy.run(lambda *both: strategy.backward(losses, *both), args=(one["x"], other["x"]))
    return digest(p.grad for p in cell.parameters()), widths


def test_batches_of_several_loops_keep_their_parts() -> None:
    alone = virtual(two_collated_batches, count=1)[0]
    assert len(alone[1]) > 4, "parts are padded differently in both"
    assert {one for one, _ in virtual(two_collated_batches, count=4)} == {alone[0]}


def padded_and_changed(strategy: mirrored.Strategy) -> None:
    for batch in strategy.distribute_dataset(sequences(), 11, collate_fn=pad_and_mask):
        strategy.run(lambda x: strategy.backward(lambda x: x.sum(1), x), args=(batch["x"] + 0,))


def test_what_was_made_of_a_collated_batch_is_refused() -> None:
    settings = {"virtual_towers": V}
    all_raise(ValueError, "not one of the batch's own", padded_and_changed, count=1, settings=settings)


def test_batches_are_cut_by_virtual_towers() -> None:
    shares = [Cut(8, 0, 4).bounds(11), Cut(8, 4, 8).bounds(11)]
    assert shares == [(0, 7), (7, 11)], "not 6 and 5"
    for total in range(40):
        for towers in (1, 2, 4, 8):
            own = V // towers
            cuts = [Cut(V, own * i, own * (i + 1)) for i in range(towers)]
            parts = [
                (start + a, start + b)
                for cut in cuts
                for start, end in [cut.bounds(total)]
                for a, b in cut.parts_of(end - start)
            ]
            assert parts == [bounds(total, V, part) for part in range(V)]
