"""Variables that towers write: TensorFlow's cases, and those of processes that may disagree.

The cases of TensorFlow's ``vars_test.py`` and ``values_test.py``, and the tests here that prove the same ("alone" is
``test_variables_alone.py``, "saved" is ``tests/checkpoint/test_saved_variables.py``):

OnWriteVariableSync (vars_test)
    testAssign, testAssignPerReplicaVal, testAggregationOnlyFirstReplica, testValueInReplicaContext,
    testValueInReplicaContextAssignDirectValue, testReadValueInReplicaContext: a_mirrored_write_inside_run_is_aggregated
    testAssign and testReadValueInCrossReplicaContext, testAssignOutOfScope (nothing here is in a scope):
    a_mirrored_write_outside_run_is_the_value_on_all_towers
    testAssign with NONE inside, where TensorFlow writes one replica's copy:
    without_an_aggregation_a_mirrored_variable_is_written_outside_run_only
    testAssignOnWriteVar: a_variable_is_a_value_to_write
    testInitializedToSameValueInsideEagerRun, testInitScope: a_variable_begins_as_tower_0s_value
    testOperatorOverride: alone, it_computes_as_its_value
    testSaveAndRestoreOnWrite: saved
OnReadVariableSyncTest (vars_test)
    testAssign, testAssignOnReadVar, testAssignPerReplicaBeforeRead, testReadValueInReplicaContext:
    a_write_inside_run_is_this_towers_own
    testReadValueInCrossReplicaContext, testOperatorOverride: reading_outside_run_aggregates
    testAssign outside, testAssignWithAggregationSum: a_value_assigned_outside_run_is_what_reading_gives
    testAssignAddSubWithAggregationSum: a_sum_is_not_added_to_outside_run
    testReadValueWithAggregationNoneInCrossReplicaContext: without_an_aggregation_nothing_is_read_outside_run
    testAssignDtypeConversion: alone, what_is_written_is_converted_as_far_as_nothing_is_lost
    testAllReduce: a_read_value_can_be_reduced
    testInitializedToSameValueInsideEagerRun: a_variable_begins_as_tower_0s_value
    testSaveAndRestoreOnRead: saved
DistributedDelegateTest, MirroredTest (values_test)
    testGetAttr, testOperatorOverride, testAddOp: alone, it_computes_as_its_value; testCopy: a_copy_is_another_variable
DistributedVariableTest, MirroredVariableTest (values_test)
    testCheckpointing, MirroredVariableSaveRestoreTest: saved
    testDeepCopy: alone, a_copy_is_another_variable; testProperties, testExtendsVariable: alone, properties
    testIsTensorLike, testAssignReturnValueIsTensorLike: alone, it_computes_as_its_value
    testStrategyExtendedUpdate: merge_call_is_outside, as there is no ``extended``
SyncOnReadVariableTest (values_test)
    testProperties: alone; testCanPassToDefFun, testTensorConversion: alone, it_converts_as_its_value
    testValueInCrossReplicaContext: reading_outside_run_aggregates; all others: saved

Without a meaning here are the cases of scatter_add and its like (``assign`` takes what a tensor's own gives),
testAssignSignature (``use_locking``, ``read_value``), testVariableOnAnotherDevice, testSelectReplica (a process has one
device and one value), testAssignPerReplicaVal outside run, testTraceback, testSaveNonDistributed and testUnsaveable
(graphs and SavedModel), and those of packed variables, TPUs, PerReplica and ``distribute_values_from_function``, which
make no variables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mirrored
from mirrored.variables import Variable
from tests.support.jobs import failures, text_of, towers

AGGREGATIONS = ("sum", "mean", "only_first_replica")
METHODS = {"assign": 1.0, "assign_add": 1.0, "assign_sub": -1.0}
"""How a variable of 0 is made 1."""
BEGINS = [("auto",), ("on_write", "sum"), *(("on_read", aggregation) for aggregation in AGGREGATIONS)]
EXACT = [0.1, -1 / 3, 7.0, 0.0, 1e-310, 1.7e308, math.pi, 5e-324]
"""float64 that three towers cannot divide."""


def number_of(strategy: mirrored.Strategy) -> int:
    return strategy.topology.index + 1


def cases(strategy: mirrored.Strategy) -> dict[str, Any]:
    """What towers get; each writes its number, from 1."""
    number, found = number_of(strategy), dict[str, Any]()

    def variable(*options: str, value: Any = 0.0, dtype: torch.dtype | None = torch.float64) -> Variable:
        return strategy.variable(value, *options, dtype=dtype)

    for aggregation in AGGREGATIONS:
        for method, one in METHODS.items():
            written = variable("on_write", aggregation)
            inside = strategy.run(lambda v, m, x: (getattr(v, m)(x), v.value()), (written, method, one * number))
            found[f"write {aggregation} {method}"] = [*map(float, inside), float(written)]
        read = variable("on_read", aggregation)
        strategy.run(read.assign, (torch.tensor(5.0 * number),))
        inside = [strategy.run(read.assign_sub, (4.0 * number,)), strategy.run(read.value)]
        found[f"read {aggregation}"] = [*map(float, inside), float(read.value()), float(read.read_value()), float(read)]
        assigned = [float(read.assign(12.0)), float(strategy.run(read.value))]
        if aggregation != "sum":
            assigned += [float(read.assign_add(1.0)), float(read.assign_sub(3.0))]
        found[f"assigned {aggregation}"] = assigned
    for aggregation in ("none", *AGGREGATIONS):
        outside = {method: variable("auto", aggregation) for method in METHODS}
        found[f"outside {aggregation}"] = [float(getattr(v, m)(METHODS[m])) for m, v in outside.items()]
    exact = variable("on_read", "sum", value=[0.0] * len(EXACT))
    found["exact"] = exact.assign(EXACT).tolist()
    for dtype in (torch.float64, torch.float32):
        rounded = [torch.tensor(value, dtype=dtype).item() for value in EXACT]
        found[f"exact mean {dtype}"] = variable("on_read", "mean", value=rounded, dtype=dtype).tolist() == rounded
    for dtype in (torch.uint16, torch.uint64, torch.float8_e4m3fn):
        found[f"not computed {dtype}"] = (
            variable("on_read", "sum", value=1, dtype=dtype).assign(torch.tensor(3).to(dtype)).item()
        )
    whole = variable("on_read", "sum", value=0, dtype=torch.int64)
    found["integers"] = [int(whole.assign(n)) for n in (7, -7, 2**62 + 1)]
    special = variable("on_read", "sum", value=[0.0] * 3, dtype=None)
    found["special"] = repr(special.assign([math.inf, -math.inf, math.nan]).tolist())
    found["complex"] = variable("on_read", "sum", value=0j, dtype=None).assign(0.1 + 7j).item()
    half = variable("on_read", "sum", dtype=torch.bfloat16)
    found["half"] = [float(half.assign(value)) for value in (0.1, 7.0, 3e38)]
    own = variable("on_read", "none")
    found["own"] = float(strategy.run(own.assign_add, (number,)))
    inside = strategy.run(variable, kwargs={"value": 5.0 * number})
    found["begins"] = [float(inside), *(variable(*options, value=5.0 * number).item() for options in BEGINS)]
    flag = variable("auto", "only_first_replica", value=False, dtype=None)
    found["flag"] = strategy.run(lambda: flag.assign(number == 1)).item()
    narrow = variable("auto", "sum", value=[1, 2], dtype=torch.int32)
    found["narrow"] = [narrow.dtype, strategy.run(narrow.assign_add, ([number, 0],)).tolist()]
    mean = variable("auto", "mean", value=2.0)
    twice = strategy.run(lambda: mirrored.get_replica_context().all_reduce("sum", mean.value()))  # type: ignore[union-attr]
    found["all_reduce"] = float(twice) / strategy.num_replicas_in_sync
    merged = variable("on_write", "none")
    context = mirrored.get_replica_context
    strategy.run(lambda: context().merge_call(lambda strategy: merged.assign(3.0)))  # type: ignore[union-attr]
    found["merged"] = float(merged)
    other = variable("on_write", "mean", value=2.0)
    found["of another"] = [float(strategy.run(merged_in.assign_add, (other,))) for merged_in in (mean, other)]
    found["refused"] = refusals(strategy)
    return found


def refusals(strategy: mirrored.Strategy) -> dict[str, str]:
    """What each tower alone is told at once."""
    none, read = strategy.variable(0.0, name="none"), strategy.variable(0.0, "on_read", name="read")
    total = strategy.variable(0.0, "on_read", "sum", name="total")
    return {
        "write inside": strategy.run(lambda: text_of(ValueError, none.assign_add, 1.0)),
        "write outside": text_of(ValueError, read.assign, 1.0),
        "read outside": text_of(ValueError, read.value),
        "add outside": text_of(ValueError, total.assign_add, 1.0) + text_of(ValueError, total.assign_sub, 1.0),
        "shape inside": strategy.run(lambda: text_of(ValueError, total.assign, [1.0])),
    }


Job = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[1, 2, 3])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    return towers(cases, count=request.param)


def aggregate(aggregation: str, count: int) -> float:
    """What the towers' numbers make."""
    return {"sum": count * (count + 1) / 2, "mean": (count + 1) / 2, "only_first_replica": 1.0}[aggregation]


def equal(job: Job, key: str) -> Any:
    """What all towers have."""
    first, *others = (tower[key] for tower in job)
    assert all(other == first for other in others), (key, job)
    return first


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("method", METHODS)
def test_a_mirrored_write_inside_run_is_aggregated(job: Job, aggregation: str, method: str) -> None:
    assert equal(job, f"write {aggregation} {method}") == [aggregate(aggregation, len(job))] * 3


def test_a_mirrored_write_outside_run_is_the_value_on_all_towers(job: Job) -> None:
    assert [equal(job, f"outside {aggregation}") for aggregation in ("none", *AGGREGATIONS)] == [[1.0] * 3] * 4


def test_a_variable_is_a_value_to_write(job: Job) -> None:
    assert equal(job, "of another") == [4.0, 4.0]


def test_without_an_aggregation_a_mirrored_variable_is_written_outside_run_only(job: Job) -> None:
    text = equal(job, "refused")["write inside"]
    assert "assign_add() of variable 'none' inside strategy.run: you must specify an aggregation" in text


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_write_inside_run_is_this_towers_own(job: Job, aggregation: str) -> None:
    assert [tower[f"read {aggregation}"][:2] for tower in job] == [[i + 1.0] * 2 for i in range(len(job))]
    assert [tower["own"] for tower in job] == [i + 1.0 for i in range(len(job))]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_reading_outside_run_aggregates(job: Job, aggregation: str) -> None:
    assert [tower[f"read {aggregation}"][2:] for tower in job] == [[aggregate(aggregation, len(job))] * 3] * len(job)


def test_a_value_assigned_outside_run_is_what_reading_gives(job: Job) -> None:
    assert equal(job, "assigned sum") == [12.0, 12.0 / len(job)]
    assert equal(job, "assigned mean") == equal(job, "assigned only_first_replica") == [12.0, 12.0, 13.0, 10.0]


def test_a_sum_is_divided_exactly(job: Job) -> None:
    assert equal(job, "exact") == EXACT
    assert equal(job, "integers") == [7, -7, 2**62 + 1]
    assert equal(job, "special") == "[inf, -inf, nan]"
    assert equal(job, "complex") == torch.tensor(0.1 + 7j).item()
    assert equal(job, "half") == torch.tensor([0.1, 7.0, 3e38], dtype=torch.bfloat16).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_mean_of_one_value_is_that_value(job: Job, dtype: torch.dtype) -> None:
    assert equal(job, f"exact mean {dtype}")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn])
def test_what_torch_cannot_divide_is_assigned(job: Job, dtype: torch.dtype) -> None:
    assert equal(job, f"not computed {dtype}") == 3


def test_a_sum_is_not_added_to_outside_run(job: Job) -> None:
    assert equal(job, "refused")["add outside"].count("of variable 'total' outside strategy.run does not name") == 2


def test_without_an_aggregation_nothing_is_read_outside_run(job: Job) -> None:
    assert "value() of variable 'read' outside strategy.run: you must specify" in equal(job, "refused")["read outside"]
    assert "assign() of variable 'read' outside strategy.run does not name" in equal(job, "refused")["write outside"]


def test_a_wrong_value_of_this_towers_own_is_its_own_error(job: Job) -> None:
    assert equal(job, "refused")["shape inside"] == "a value of shape (1,) for a variable of shape ()"


def test_a_variable_begins_as_tower_0s_value(job: Job) -> None:
    assert equal(job, "begins") == [5.0] * (1 + len(BEGINS))


def test_integers_and_booleans_stay_so(job: Job) -> None:
    assert equal(job, "flag") is True
    assert equal(job, "narrow") == [torch.int32, [1 + aggregate("sum", len(job)), 2]]


def test_a_read_value_can_be_reduced(job: Job) -> None:
    assert equal(job, "all_reduce") == 2.0


def test_merge_call_is_outside(job: Job) -> None:
    assert equal(job, "merged") == 3.0


# -- towers that disagree --------------------------------------------------------------------------------

ALONE = "tower 1 {} of variable 'count', tower 0 {} of variable 'count'; every tower must make the same calls"
DISAGREEMENTS = {
    "only the chief writes": ALONE.format("value()", "assign_add()"),
    "only the chief reads": ALONE.format("state_dict()", "value()"),
    "other values": "the towers pass different values; reduce them first, or write inside run",
    "other first shapes": "shape is 'torch.Size([1])' on tower 0, but 'torch.Size([2])' on tower 1",
    "no first value": "strategy.variable() of 'Variable_1' on tower 1: ",
    "no data": "strategy.variable() of 'Variable_2' on tower 0: Cannot copy out of meta tensor",
    "a sparse first value": "'Variable_3' on tower 0: a value of layout torch.sparse_coo: make it dense first",
    "another shape": "'count' on tower 1: a value of shape (2,) for a variable of shape ()",
    "another dtype": "on tower 1: a value of torch.float32 for a variable of torch.int64: convert it first",
}


def disagree(strategy: mirrored.Strategy) -> list[str]:
    """What each tower is told when they made different calls, in turn."""
    count, second = strategy.variable(0, "on_read", "sum", name="count"), not strategy.is_chief
    mirror = strategy.variable(0, aggregation="sum", name="count")
    texts = [
        text_of(mirrored.DisagreementError, lambda: count.value() if second else mirror.assign_add(1)),
        text_of(mirrored.DisagreementError, lambda: count.state_dict() if second else float(count)),
        text_of(mirrored.DisagreementError, mirror.assign, int(second)),
        text_of(mirrored.DisagreementError, strategy.variable, [0.0] * number_of(strategy)),
        text_of(TypeError, strategy.variable, "nothing" if second else 0.0),
        text_of(ValueError, strategy.variable, torch.ones(3, device="cpu" if second else "meta")),
        text_of(TypeError, strategy.variable, torch.eye(3) if second else torch.eye(3).to_sparse()),
        strategy.run(lambda: text_of(ValueError, mirror.assign_add, [1, 2] if second else 1)),
        strategy.run(lambda: text_of(TypeError, mirror.assign_add, 0.5 if second else 1)),
    ]
    assert [mirror.item(), count.item(), strategy.run(mirror.assign_add, (1,))] == [0, 0, 2]  # still in step
    return texts


@pytest.mark.row(51)
def test_what_towers_disagree_on_is_an_error_on_all() -> None:
    first, second = towers(disagree)
    assert first == second
    for text, (what, words) in zip(first, DISAGREEMENTS.items(), strict=True):
        assert words in text, what


def write_alone(strategy: mirrored.Strategy) -> None:
    steps = strategy.variable(0, aggregation="sum", name="steps")
    with strategy.scope():
        model = nn.Linear(2, 1)

    def step() -> None:
        if strategy.is_chief:
            steps.assign_add(1)
        mirrored.compute_average_loss(model(torch.ones(2, 2))[:, 0], global_batch_size=4).backward()

    strategy.run(step)


@pytest.mark.extended
@pytest.mark.row(51)
def test_a_write_of_one_tower_alone_ends_all() -> None:
    deadlock, *_ = [error for error in failures(write_alone) if isinstance(error, mirrored.DeadlockError)]
    assert "tower 0 is in step 1, in the step's function, at assign_add() of variable 'steps'" in str(deadlock)
