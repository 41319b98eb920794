"""Stand-ins for empty shares: a model computes on them, and nothing counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, TensorDataset

import mirrored
from tests.support.datasets import Streamed
from tests.support.jobs import assert_close, parameters_of, seeded, text_of, towers


class Words(nn.Module):
    """A packed LSTM and a reshape, neither of which takes an empty batch, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.out = nn.Linear(10, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        state, cell = self.lstm(packed)[1]
        return self.out(torch.cat([state, cell]).transpose(0, 1).reshape(len(words), -1))


def make_words() -> Words:
    return seeded(Words, 3).double()


def sentences(count: int = 7) -> list[tuple[Tensor, int]]:
    return [(torch.arange(2 + i % 3) + i, i % 3) for i in range(count)]


def pad(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    words = [row[0] for row in rows]
    lengths = torch.tensor([len(w) for w in words])
    return {
        "words": pad_sequence(words, batch_first=True),
        "lengths": lengths,
        "y": torch.tensor([row[1] for row in rows]),
        "weight": 1.0 / lengths.double(),
    }


def train_words(strategy: mirrored.Strategy, how: str, workers: int = 0) -> tuple[Any, ...]:
    """Two epochs of 7 examples in batches of 3, of which the last has 1; parameters and the global losses."""
    with strategy.scope():
        model = make_words()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = strategy.distribute_dataset(sentences(), 3, collate_fn=pad, num_workers=workers, stand_in=True)

    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(batch["words"], batch["lengths"]), batch["y"], reduction="none")
        weight = batch["weight"] if how != "examples" else None
        kind = "weights" if how == "by weight" else "examples"
        loss = mirrored.compute_average_loss(losses, weight, denominator=kind)
        loss.backward()
        optimizer.step()
        return loss.detach()

    sizes, losses = [], []
    for _ in range(2):
        for batch in data:
            sizes.append(len(mirrored.drop_stand_in(batch["y"])))
            losses.append(strategy.reduce("sum", strategy.run(step, args=(batch,))))
    assert all(p.grad is None for p in model.unused.parameters())
    return parameters_of(model), losses, sizes


@pytest.mark.parametrize("how", ["examples", "weighted", "by weight"])
def test_models_that_take_no_empty_batch_train_as_on_one_tower(how: str) -> None:
    alone = train_words(mirrored.OneDeviceStrategy(), how)
    results = towers(train_words, how, 1 if how == "examples" else 0, count=3)
    assert [sizes[:3] for _, _, sizes in results] == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]
    for parameters, losses, _ in results:
        assert_close(parameters, alone[0], 1e-12)
        assert_close(losses, alone[1], 1e-12)


def ready_made(strategy: mirrored.Strategy) -> list[Any]:
    """Batches that come ready made, and pipelines of different lengths; sums and what the towers were given."""
    towers, index = strategy.num_replicas_in_sync, strategy.topology.index
    x = torch.arange(1.0, 6.0)
    batches = Streamed([{"x": x[:3], "names": ["a", "b", "c"]}, {"x": x[3:], "names": ["d", "e"]}])
    stream = strategy.distribute_dataset(DataLoader(batches, batch_size=None), stand_in=True)
    pipeline = strategy.distribute_datasets_from_function(
        lambda context: [torch.full((2,), 1.0 + i) for i in range(1 + context.input_pipeline_id)], stand_in=True
    )
    found = []
    for batch in stream:
        assert len(batch["x"]) == len(batch["names"]) > 0
        loss = strategy.run(lambda b: mirrored.compute_average_loss(b["x"]), args=(batch,))
        found.append((float(strategy.reduce("sum", loss)), len(mirrored.drop_stand_in(batch["names"]))))
    for batch in pipeline:
        assert len(batch) == (2 if len(found) - 2 <= index else 1)
        loss = strategy.run(mirrored.compute_average_loss, args=(batch,))
        found.append((float(strategy.reduce("sum", loss)), len(mirrored.drop_stand_in(batch))))
    assert len(found) == 2 + towers
    return found


def test_ready_made_batches_and_pipelines() -> None:
    results = towers(ready_made, count=3)
    assert [[loss for loss, _ in found] for found in results] == [[2.0, 4.5, 1.0, 2.0, 3.0]] * 3
    assert [[count for _, count in found] for found in results] == [[1, 1, 2, 0, 0], [1, 1, 2, 2, 0], [1, 0, 2, 2, 2]]


def several_batches(strategy: mirrored.Strategy) -> list[Any]:
    """Of labelled examples there is one, of the others there are two or four."""
    x = next(iter(strategy.distribute_dataset(TensorDataset(torch.tensor([3.0])), 1, stand_in=True)))[0]
    found: list[Any] = []
    for count in (4, 2):
        u = next(iter(strategy.distribute_dataset(TensorDataset(torch.arange(1.0, 1.0 + count)), count)))[0]

        def step(x: Tensor, u: Tensor, say: bool) -> list[Tensor]:
            of_x, of_u = ({"batch": x}, {"batch": u}) if say else ({}, {})
            assert len(mirrored.drop_stand_in(x, batch=x)) == (1 if strategy.is_chief else 0)
            return [mirrored.compute_average_loss(x * 1, **of_x), mirrored.compute_average_loss(u * 1, **of_u)]

        found += [float(strategy.reduce("sum", value)) for value in strategy.run(step, args=(x, u, count == 2))]
    return [*found, text_of(ValueError, strategy.run, step, args=(x, u, False))]


def test_steps_with_several_batches() -> None:
    first, second = towers(several_batches)
    assert first[:4] == second[:4] == [3.0, 2.5, 3.0, 1.5]
    assert "several of its distributed batches (1 of 1, 1 of 2 examples): pass batch=x" in first[4]
    assert "tower 1 has only a stand-in in a batch of this step" in second[4]
    assert "pass batch=x" in second[4]


def by_other_ways(strategy: mirrored.Strategy) -> list[Any]:
    """The batch comes to the loss by another way than run's arguments; losses that are not finite; mistakes."""
    found: list[Any] = []
    for (x,) in strategy.distribute_dataset(TensorDataset(torch.tensor([2.0])), 1, stand_in=True):
        leaf = torch.ones((), requires_grad=True)
        weight = leaf if strategy.is_chief else leaf * torch.inf  # what the stand-in is made of does not matter

        def step(x: Tensor, weight: Tensor) -> Tensor:
            return mirrored.compute_average_loss(x * weight)

        found.append(strategy.reduce("sum", strategy.run(lambda x=x, w=weight: step(x * 1, w)).detach()).item())
        found.append(strategy.run(lambda x: mirrored.compute_average_loss(x, global_batch_size=4), args=(x,)).item())
        found += [text_of(TypeError, mirrored.drop_stand_in, value) for value in (x.sum(), 3, object())]
        wrong = lambda x: mirrored.compute_average_loss(x, batch=x * 1)  # noqa: E731
        found.append(text_of(ValueError, strategy.run, wrong, args=(x,)))
    return found


def test_other_ways_and_mistakes() -> None:
    first, second = towers(by_other_ways)
    assert [first[0], second[0]] == [2.0, 2.0]
    assert [first[1], second[1]] == [0.5, 0.0]
    for texts in (first[2:], second[2:]):
        for text, kind in zip(texts, ("a single number", "a single number", "a object"), strict=False):
            assert f"drop_stand_in was given {kind}" in text
        assert "batch= contains no tensor of a batch" in texts[3]


def other_entries(strategy: mirrored.Strategy) -> list[Any]:
    """Losses of tokens that are not in rows of examples, and of no distributed batch; a stand-in in the third step."""
    found: list[Any] = []
    for (x,) in strategy.distribute_dataset(TensorDataset(torch.arange(1.0, 6.0)), 2, stand_in=True):
        tokens = x.repeat_interleave(3)
        for options in ({"sample_weight": torch.ones(len(tokens)), "denominator": "weights"}, {"global_batch_size": 6}):
            for batch in (None, x, ()):

                def step(x: Tensor, tokens: Tensor = tokens, options: Any = options, batch: Any = batch) -> Tensor:
                    return mirrored.compute_average_loss(tokens, **options, batch=batch)

                try:
                    found.append(float(strategy.reduce("sum", strategy.run(step, args=(x,)))))
                except ValueError as error:
                    found.append(str(error))
        found.append(float(strategy.reduce("sum", strategy.run(mirrored.compute_average_loss, args=(x,)))))
    return found


def test_losses_with_other_entries_say_of_which_batch_they_are() -> None:
    """From the first step on and on all towers, not in the last step on one of them."""
    for found in towers(other_entries):
        steps = [found[:7], found[7:14], found[14:]]
        for number, step in enumerate(steps):
            for text in (step[0], step[3]):
                assert "the loss has 3 entries" in text
                assert "with a tensor x of the batch, or batch=() if the loss belongs to no distributed batch" in text
            mean = [1.5, 3.5, 5.0][number]
            assert step[1] == step[6] == mean
            assert step[4] == (mean if number < 2 else 2.5), "15 / 6"
            # All towers' entries count where the losses are said to be of no distributed batch.
            assert [step[2], step[5]] == ([mean, mean] if number < 2 else [5.0, 5.0])


def virtual_step(strategy: mirrored.Strategy) -> tuple[list[Tensor], list[float]]:
    model = strategy.mirror(make_words())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses(batch: dict[str, Tensor]) -> Tensor:
        assert len(batch["words"]) == 1, "parts have an example, or loss_fn is not called"
        return F.cross_entropy(model(batch["words"], batch["lengths"]), batch["y"], reduction="none")

    def step(batch: dict[str, Tensor], weighted: bool) -> Tensor:
        optimizer.zero_grad()
        weights: Any = {"sample_weight": batch["weight"], "denominator": "weights"} if weighted else {}
        loss = strategy.backward(losses, batch, **weights)
        optimizer.step()
        return loss

    found = []
    for weighted in (False, True):
        for batch in strategy.distribute_dataset(sentences(5), 4, collate_fn=pad, stand_in=True):
            found.append(float(strategy.run(step, args=(batch, weighted))))
    return parameters_of(model), found


def test_virtual_towers_do_not_call_a_stand_in() -> None:
    [alone], both = (towers(virtual_step, count=count, settings={"virtual_towers": 4}) for count in (1, 2))
    torch.testing.assert_close(both, [alone, alone], rtol=0, atol=0)


def raise_on_empty(strategy: mirrored.Strategy, stand_in: bool) -> list[Any]:
    class Own(RuntimeError):
        pass

    def view(x: Tensor) -> Tensor:
        return x.view(len(x), -1)

    def divide(x: Tensor) -> float:
        return 1 / len(x)

    def check(x: Tensor) -> None:
        assert len(x)

    def key(x: Tensor) -> None:
        raise KeyError("x")

    def own(x: Tensor) -> None:
        raise Own("mine")

    [[x]] = list(strategy.distribute_dataset(TensorDataset(torch.ones(2, 3)), 2, stand_in=stand_in))
    found: list[Any] = []
    for fn in (view, divide, check, key, own):
        try:
            strategy.run(fn, args=(x,))
            found.append(None)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_errors_of_empty_shares_name_the_stand_in() -> None:
    first, _, last = towers(raise_on_empty, False, count=3)
    assert first == [None, None, None, ("KeyError", "'x'"), ("Own", "mine")]
    assert [kind for kind, _ in last] == ["RuntimeError", "ZeroDivisionError", "AssertionError", "KeyError", "Own"]
    for _, text in last[:3]:
        assert "tower 2's share of this batch has no examples" in text
        assert "stand_in=True" in text
    assert last[0][1].startswith("cannot reshape tensor of 0 elements")
    assert last[3:] == [("KeyError", "'x'"), ("Own", "mine")]
    assert towers(raise_on_empty, True, count=3)[2][:3] == [None, None, None]
