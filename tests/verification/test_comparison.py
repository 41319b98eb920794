"""The parts of a comparison: traces, results, buffers, padding, losses, sketches and random numbers."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mirrored.verification import Cause, Explanation, VerificationReport
from mirrored.verification.compare import RunComparison, compare, differing_result
from mirrored.verification.draws import GlobalDraw, draw_as_one_tower, other_generators
from mirrored.verification.explain import explain
from mirrored.verification.interventions import pad
from mirrored.verification.loss_graph import scale_terms, terms_of
from mirrored.verification.proofs import distinguishable
from mirrored.verification.report import make_report
from mirrored.verification.trace import Raised, Result, Step, Trace, example_digests, form_of, sketch
from mirrored.verification.verify import ScriptJob
from tests.support.jobs import make_data, make_mlp
from tests.verification.scripts import script_in


def plain(report: VerificationReport) -> str:
    """The report's text in one line."""
    return re.sub(r"\s+", " ", str(report))


def trace_of(script: pathlib.Path) -> Trace:
    """The trace of a script's first step on one tower."""
    job = ScriptJob(str(script), (), None, 1, ("cpu:0", "cpu:1"), 1, 60.0, False)
    [trace] = job.run(1)
    return trace


def test_a_script_may_trace_export_save_and_load(tmp_path: pathlib.Path) -> None:
    trace = trace_of(script_in(tmp_path, "right_exported"))
    assert trace.raised is None, trace.raised
    assert len(trace.steps) == 1


def test_an_evaluation_after_all_epochs_is_reached_or_said_not_to_be(tmp_path: pathlib.Path) -> None:
    assert not trace_of(script_in(tmp_path, "averaged by all")).end.unevaluated
    trace = trace_of(script_in(tmp_path, "averaged by all, many epochs"))
    assert trace.end.unevaluated
    assert not trace.evaluated
    comparison, _ = explained(trace, dataclasses.replace(trace, towers=2))
    assert "Not reached: verify ends the script" in plain(make_report("a", comparison, []))


def explained(one: Trace, *many: Trace, fails_unrecorded: bool = True) -> tuple[RunComparison, list[Explanation]]:
    """The explanation of runs where every further one fails, or all but those that are not recorded."""
    return explain(compare(one, many), lambda _, changes: None if changes.recorded or fails_unrecorded else many)


def test_no_step_to_compare_is_no_success() -> None:
    one, tower = (Trace(towers=n, results=[Result("reduce('sum')", 9, 0, (1.0,), ("int64",), 1)]) for n in (1, 2))
    _, [explanation] = explained(one, tower, tower)
    assert explanation.cause is Cause.NOTHING_TRAINED
    assert "no step was compared" in explanation.what
    assert "Of 1 results that are reduced or gathered none differs" in explanation.what


def test_what_only_watching_breaks_is_not_blamed_on_the_script() -> None:
    raised = Raised("TypeError", "no proxies", "", None, False)
    runs = Trace(raised=raised), Trace(towers=2, raised=raised), Trace(towers=2, raised=raised)
    _, [explanation] = explained(*runs)
    assert explanation.cause is Cause.FAILS_EVERYWHERE
    _, [explanation] = explained(*runs, fails_unrecorded=False)
    assert explanation.cause is Cause.FAILS_WHEN_WATCHED
    assert "this script cannot be compared. It runs on 1 tower" in explanation.what


def a_step(dtype: torch.dtype, buffer: Tensor | None = None) -> Step:
    """A step of an optimizer, after which a parameter is 1."""
    held = sketch(torch.ones(1, dtype=dtype))
    buffers = {"b": sketch(buffer)} if buffer is not None else {}
    return Step((0, "SGD"), 1, [], {"p": held}, {}, {}, [{"lr": 0.1}], {}, [], [], [], {"p": held}, buffers)


@pytest.mark.parametrize(("dtype", "same"), [("float32", True), ("float64", False), ("int64", False)])
def test_a_result_is_compared_as_far_as_its_digits_go(dtype: str, same: bool) -> None:
    one, many = (
        Trace(towers=towers, steps=[a_step(torch.float64)], results=[Result("reduce('sum')", 9, 1, (v,), (dtype,), 1)])
        for towers, v in ((1, 4.08498000), (2, 4.08498020))
    )
    found = differing_result(compare(one, [many, many]))
    assert (found is None) == same
    assert distinguishable(4.08498000, 4.08498020) == ("4.08498", "4.0849802")
    assert distinguishable(1.0, 2.0) == ("1", "2")


@pytest.mark.parametrize(("last_step", "same"), [(5, True), (6, False)])
def test_a_count_may_differ_where_rounding_changes_another_one_no_later(last_step: int, same: bool) -> None:
    def counts(*numbers: int) -> list[Result]:
        pairs = zip((5, last_step), numbers, strict=True)
        return [Result("reduce('sum')", 9, steps, (number,), ("int64",), 1) for steps, number in pairs]

    one, perturbed = Trace(results=counts(1714, 1117)), Trace(results=counts(1714, 1118))
    many = Trace(towers=2, results=counts(1715, 1117))
    comparison = RunComparison(one, [many, many], 1e-4, perturbed=perturbed)
    assert (differing_result(comparison) is None) == same


@pytest.mark.parametrize(
    ("one", "many", "same"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000001]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), False),
        (torch.tensor(10**7), torch.tensor(10**7 + 1), False),
        (torch.zeros(2), torch.zeros(3), False),
        (torch.tensor([math.nan, 2.0]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([math.inf, 2.0]), False),
        (torch.tensor([math.nan, 2.0]), torch.tensor([math.nan, 2.1]), True),
    ],
)
def test_buffers_are_compared_as_parameters_are(one: Tensor, many: Tensor, same: bool) -> None:
    runs = (Trace(towers=n, steps=[a_step(torch.float32, b)]) for n, b in ((1, one), (2, many)))
    alone, tower = runs
    comparison, explanations = explained(alone, tower, tower)
    assert (comparison.first is None) == same
    assert [explanation.cause for explanation in explanations] == [] if same else [Cause.BUFFER]


def test_shares_are_padded_as_the_batch_is() -> None:
    whole = torch.tensor([[1, 2, 3, 4], [5, 0, 0, 0], [6, 7, 0, 0], [8, 0, 0, 0]])
    lengths = torch.tensor([4, 1, 2, 1])
    forms = {(3, j): form_of(tensor) for j, tensor in enumerate((whole, lengths))}
    arguments = ((whole[2:, :2], lengths[2:]), {})
    padded = pad(arguments, 3, forms, [(2, 4)])
    assert torch.equal(padded[0][0], whole[2:])
    assert torch.equal(padded[0][1], lengths[2:])
    assert torch.equal(pad(arguments, 2, forms, [(2, 4)])[0][0], whole[2:, :2])  # another batch
    assert torch.equal(pad(arguments, 3, forms, [(2, 5)])[0][0], whole[2:, :2])  # which dimension is the examples'?
    left = whole.flip(1)
    for batch in (left, left != 0):
        assert torch.equal(pad((batch[2:, 2:],), 0, {(0, 0): form_of(batch)}, [(2, 4)])[0], batch[2:])


class Named(torch.autograd.Function):
    """Keeps something in the node that hides the node's own method of that name."""

    @staticmethod
    def forward(ctx, x):
        ctx.name = "a layer"
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_what_a_loss_is_divided_by() -> None:
    logits = torch.randn(6, 3, requires_grad=True)
    labels = torch.tensor([0, 1, -100, 2, -100, 0])
    present = labels >= 0
    losses = F.cross_entropy(logits, labels, reduction="none")
    for loss, divisors in (
        (F.cross_entropy(logits, labels), [4]),
        (Named.apply(logits).mean(), [18]),
        (Named.apply(logits.mean()), [1]),  # what it is made of is not known
        ((losses * present).sum() / present.sum(), [4]),
        (losses[present].mean() / 2 + 0.5 * logits.square().sum(), [8, 2]),
        (F.cross_entropy(logits[:0], labels[:0]), [0]),
    ):
        assert [term.divisor for term in terms_of(loss)] == divisors


def test_a_factor_applies_once_to_summands_that_are_one() -> None:
    weight = torch.ones(4, requires_grad=True)
    mean = weight.mean()
    loss = mean + mean + weight.square().sum()
    assert len(terms_of(loss)) == 3
    assert len(scale_terms(loss, {0: 0.5, 1: 0.5, 2: 3.0})) == 2
    loss.backward()
    assert weight.grad.tolist() == [2 / 4 * 0.5 + 2 * 3.0] * 4


def test_numpys_generator_is_told_by_its_state_whatever_it_is() -> None:
    before = np.random.get_bit_generator()
    try:
        for bits in (np.random.MT19937(0), np.random.PCG64(0), np.random.SFC64(0), np.random.Philox(0)):
            np.random.set_bit_generator(bits)
            first = other_generators()
            assert other_generators() == first
            np.random.random()
            assert other_generators()["numpy.random"] != first["numpy.random"]
    finally:
        np.random.set_bit_generator(before)


def test_what_a_loss_is_made_of() -> None:
    x, y = make_data(6)
    model = make_mlp()
    logits = model(x)
    per_example = F.cross_entropy(logits, y, reduction="none")
    penalty = model[0].weight.square().sum()
    for loss, expected in (
        (per_example.mean(), ["the mean of 6 values"]),
        (F.cross_entropy(logits, y) / 2, ["the mean of 6 values, divided by 2"]),
        (per_example.sum() / 6 * 0.5, ["the sum of 6 values, divided by 6, multiplied by 0.5"]),
        (F.mse_loss(logits, torch.zeros(6, 3).double(), reduction="sum"), ["the sum of 18 values"]),
        (per_example.mean() + 0.1 * penalty, ["the mean of 6 values", "the sum of 80 values, multiplied by 0.1"]),
        # As Keras adds up losses, each of which may have been summed up before.
        (torch.stack([per_example.mean(), penalty.sum()]).sum(), ["the mean of 6 values", "the sum of 80 values"]),
        (torch.stack([per_example, per_example]).sum(), ["the sum of 12 values"]),
    ):
        assert [str(term) for term in terms_of(loss)] == expected
        assert not any(term.share for term in terms_of(loss))


@pytest.mark.parametrize("numel", [10, 256, 100_000])
def test_a_sketch_estimates_the_distance(numel: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(numel, generator=generator)
    for size in (1e-5, 1e-2, 1.0):
        b = a + size * torch.randn(numel, generator=generator)
        true = float((a - b).norm())
        assert true / 3 < sketch(a).distance(sketch(b)) < true * 3
    assert sketch(a).distance(sketch(a.clone())) == 0
    b = a.clone()
    b[numel // 2 + 1] += 1  # no sampled place, for the largest
    assert 0.3 < sketch(a).distance(sketch(b)) < 3
    assert sketch(a).distance(sketch(torch.full_like(a, torch.nan))) == float("inf")


def test_digests_tell_examples_apart() -> None:
    x, y = make_data(6)
    whole = example_digests([x, y, torch.tensor(3.0), torch.ones(2)])
    assert len(set(whole)) == 6
    assert example_digests([x[:4], y[:4]]) + example_digests([x[4:], y[4:]]) == whole
    assert example_digests([x, y.flip(0)]) != whole


@pytest.mark.parametrize(
    ("name", "shape", "args"),
    [
        ("rand", (2,), ()),
        ("randn_like", (), ()),
        ("randint", (), (3, 9, (1,))),
        ("uniform_", (3,), (None, 2.0, 5.0)),
        ("normal", (2,), (1.0, 3.0)),
        ("bernoulli", (2,), (None, 0.5)),
    ],
)
def test_random_numbers_of_shares_are_those_of_the_batch(
    name: str, shape: tuple[int, ...], args: tuple[object, ...]
) -> None:
    def draw(local: int, tower: int, towers: int) -> Tensor:
        result = torch.full((local, *shape), -1.0)
        place = GlobalDraw((1, 2), (7, *shape), [(local, 7)], tower, towers)
        assert draw_as_one_tower(name, result, args, {}, place)
        return result

    whole = draw(7, 0, 1)
    parts = [draw(local, tower, 3) for tower, local in enumerate((3, 2, 2))]
    assert torch.equal(torch.cat(parts), whole)
    assert len(set(whole.flatten().tolist())) > 1
    assert (whole != -1).all()


def test_numbers_that_do_not_belong_to_examples_are_the_same_on_all_towers() -> None:
    drawn = [torch.zeros(5), torch.zeros(5)]
    for tower, result in enumerate(drawn):
        assert draw_as_one_tower("randn", result, (5,), {}, GlobalDraw((0,), (5,), [(3 - tower, 5)], tower, 2))
    assert torch.equal(*drawn)
    assert not draw_as_one_tower("randperm", torch.arange(3), (3,), {}, GlobalDraw((0,), (6,), [(3, 6)], 0, 2))
