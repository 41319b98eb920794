"""Towers on accelerators that average through their hosts: the numbers of one tower on the CPU, and the same checks."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mirrored
from tests.accelerator import cases, keras_cases, stream_cases
from tests.accelerator.server import Server
from tests.support.jobs import Settings

pytestmark = pytest.mark.extended

SMALL = {"bucket_bytes": 512}  # several buckets
OnBoth = Callable[..., Any]


def numbers_of_the_cpu(server: Server, **settings: Any) -> list[Any]:
    [[_, *numbers]] = server.towers_once(cases.train, SMALL, devices=["cpu:0"], **settings)
    return numbers


@pytest.mark.parametrize(
    "settings",
    [{}, {"shard_optimizer": True}, {"central": True}, {"virtual_towers": 4}, {"compiled": True}],
    ids=str,
)
def test_two_towers_give_the_numbers_of_one_on_the_cpu(
    settings: dict[str, Any], way: str, server: Server, on_both: OnBoth
) -> None:
    ordinary = {name: value for name, value in settings.items() if name != "compiled"}
    backend, *numbers = on_both(cases.train, SMALL, way=way, **settings)
    assert backend == ("shared memory, staged by the host" if way == "host" else server.collectives)
    torch.testing.assert_close(numbers, numbers_of_the_cpu(server, **ordinary), rtol=0, atol=1e-12)


def test_compressed_gradients_are_those_of_two_towers_on_the_cpu(way: str, server: Server, on_both: OnBoth) -> None:
    options = {**SMALL, "compression": mirrored.PowerSGD(rank=1, start_step=2)}
    _, *numbers = on_both(cases.train, options, way=way)
    [_, *expected], _ = server.towers_once(cases.train, options, devices=["cpu:0", "cpu:1"])
    torch.testing.assert_close(numbers, expected, rtol=0, atol=1e-12)


def test_towers_that_use_other_parameters_have_the_numbers_of_the_cpu(
    way: str, server: Server, on_both: OnBoth
) -> None:
    numbers, _ = on_both(cases.use_other_parameters, cases.PHASES, way=way)
    [expected, gathers], _ = server.towers_once(cases.use_other_parameters, cases.PHASES, devices=["cpu:0", "cpu:1"])
    torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=1e-5)
    assert gathers == []  # the flags are in the tails


def test_sharded_towers_that_use_other_parameters_have_the_numbers_of_the_cpu(
    way: str, server: Server, on_both: OnBoth
) -> None:
    numbers, gathers = on_both(cases.use_other_parameters, cases.PHASES, shard_optimizer=True, way=way)
    [expected, _], _ = server.towers_once(cases.use_other_parameters, cases.PHASES, devices=["cpu:0", "cpu:1"])
    torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=1e-5)
    assert gathers[3:5] == [8, 8]  # while all towers use all parameters


def test_sharded_gradients_are_clipped_as_on_the_cpu(way: str, server: Server, on_both: OnBoth) -> None:
    [expected] = server.towers_once(cases.accumulate, devices=["cpu:0"])
    numbers = on_both(cases.accumulate, shard_optimizer=True, way=way)
    torch.testing.assert_close(numbers, expected, rtol=0, atol=1e-12)


def test_a_parameter_that_shares_its_memory_is_sharded_where_it_is(way: str, server: Server, on_both: OnBoth) -> None:
    expected, _ = server.towers_once(cases.step_sharded, "none", devices=["cpu:0", "cpu:1"])
    torch.testing.assert_close(on_both(cases.step_sharded, "none", way=way), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ("looks", "tower 0 uses the averaged gradients, or .* starts, tower 1 steps Adam number 0 with 4 parameters"),
        ("repeats", "before which the tower (steps Adam number 0 with 4 parameters(, )?){2} on tower 0"),
    ],
)
def test_a_chief_that_does_something_alone_with_sharded_parameters_is_an_error(
    who: str, message: str, server: Server, pair: list[str]
) -> None:
    if server.kind == "tpu":
        pytest.skip("TPUs average whole gradients, and announce each step")
    with pytest.raises(AssertionError, match=message):
        server.towers(cases.step_sharded, who, devices=pair, way="collectives")


def test_hosts_do_not_wait_for_each_other_to_repeat_a_reduction(way: str, server: Server, on_both: OnBoth) -> None:
    expected, _ = server.towers_once(cases.reduce_in_steps, "nothing", devices=["cpu:0", "cpu:1"])
    torch.testing.assert_close(on_both(cases.reduce_in_steps, "nothing", way=way), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ("shape", r"tower 0 calls reduce\('sum', axis=None\) of \* \(float32 \[3\]\), tower 1 calls reduce\('sum'"),
        ("operation", r"tower 0 calls reduce\('max', axis=None\) of .*, tower 1 calls reduce\('sum', axis=None\) of"),
    ],
)
def test_a_chief_that_reduces_something_else_is_an_error(
    differs: str, message: str, server: Server, pair: list[str]
) -> None:
    with pytest.raises(AssertionError, match=message):
        server.towers(cases.reduce_in_steps, differs, devices=pair, way="collectives")


def test_a_weight_that_multiplies_a_loss_is_an_error(on_both: OnBoth) -> None:
    assert "is multiplied or divided by a value that has a gradient" in on_both(cases.multiply_a_loss, way="host")


@pytest.mark.parametrize("steps", [2, 6], ids=["while hosts gather", "later"])
def test_a_layer_that_one_tower_thaws_is_an_error(steps: int, way: str, server: Server, pair: list[str]) -> None:
    with pytest.raises(AssertionError, match=r"parameter \S+ is frozen \(requires_grad is False\) on some towers"):
        server.towers(cases.use_other_parameters, {"all": steps, "one": 1}, devices=pair, way=way)


def test_hosts_gather_nothing_in_a_step_if_all_towers_use_all_parameters(way: str, on_both: OnBoth) -> None:
    _, gathers = on_both(cases.use_other_parameters, {"all": 36}, way=way)
    assert gathers == [1, 1, 1, 8, 8, 8, 8]
    _, gathers = on_both(cases.use_other_parameters, {"none": 6}, way=way)
    assert gathers == [1] * 6


def test_a_step_adds_few_operations_and_one_collective(server: Server, on_both: OnBoth) -> None:
    found = on_both(cases.operations_of_a_step, way="collectives")
    assert [found.pop(name) for name in ("aten::_foreach_copy_", "gloo:all_reduce")] == [1, 1]
    if server.kind == "tpu":  # the other backends divide while they sum
        assert found.pop("aten::_foreach_mul_") == 1
    assert not [name for name in found if name.startswith(("gloo:", "c10d::"))]
    assert sum(map(abs, found.values())) <= 20, found


def test_two_towers_share_a_device(server: Server, pair: list[str]) -> None:
    if server.kind == "tpu":
        pytest.skip("a TPU is one process's")
    first, second = server.towers(cases.train, SMALL, devices=[pair[0], pair[0]], way="collectives")
    assert first == second
    backend, *numbers = first
    assert backend == "shared memory, staged by the host"
    torch.testing.assert_close(numbers, numbers_of_the_cpu(server), rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
def test_tables_and_state_stay_in_central_storage(count: int, way: str, server: Server, pair: list[str]) -> None:
    [alone] = server.towers_once(cases.train_a_table, False, devices=["cpu:0"])
    for trained in server.towers(cases.train_a_table, True, devices=pair[:count], way=way):
        assert trained[:3] == ["cpu", True, ["cpu"]]
        torch.testing.assert_close(trained[3], alone[3], rtol=0, atol=1e-12)


def test_accumulated_and_clipped(way: str, server: Server, on_both: OnBoth) -> None:
    [alone] = server.towers_once(cases.accumulate, devices=["cpu:0"])
    torch.testing.assert_close(on_both(cases.accumulate, way=way), alone, rtol=0, atol=1e-12)


def test_values(way: str, on_both: OnBoth) -> None:
    assert on_both(cases.values, way=way) == cases.VALUES


@pytest.mark.parametrize("part", ["all", "unused", "frozen", "number", "weights", "virtual"])
def test_a_step_waits_for_nothing_but_its_gradients(part: str, way: str, on_both: OnBoth) -> None:
    on_both(cases.step_without_waiting, part, way=way)


def test_a_monitor_waits_for_nothing_before_it_reports(way: str, on_both: OnBoth) -> None:
    on_both(cases.watch_without_waiting, way=way)


def test_virtual_towers_give_the_same_bits_on_one_and_two(
    way: str, server: Server, pair: list[str], on_both: OnBoth
) -> None:
    assert [on_both(cases.same_bits, way=way)] == server.towers_once(cases.same_bits, devices=pair[:1])


def test_batch_norm_over_both(way: str, on_both: OnBoth) -> None:
    on_both(cases.batch_norm_over_both, ["torch.float32", "torch.bfloat16"], way=way)


@pytest.mark.parametrize("shard_optimizer", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("who", ["all", "first"])
@pytest.mark.parametrize("seed", range(3))
def test_a_host_may_wait_for_its_device_before_a_batch_norm(
    seed: int, who: str, shard_optimizer: bool, way: str, server: Server, on_both: OnBoth
) -> None:
    numbers = on_both(cases.wait_between_buckets_and_batch_norm, who, shard_optimizer, seed, way=way)
    expected, _ = server.towers_once(cases.wait_between_buckets_and_batch_norm, who, devices=["cpu:0", "cpu:1"])
    torch.testing.assert_close(numbers, expected, rtol=1e-5, atol=1e-5)


def test_a_changed_bit_is_found_later(way: str, server: Server, pair: list[str]) -> None:
    cases.check_changed_bit(server.towers(cases.find_a_changed_bit, devices=pair, way=way))


def test_rows_of_every_kind(way: str, on_both: OnBoth) -> None:
    assert on_both(cases.gather_shapes, way=way) == 9


def test_a_metric_of_the_cpu_is_moved(way: str, on_both: OnBoth) -> None:
    assert on_both(cases.average_by_a_metric, way=way) == 3.0


def test_a_nan_is_named(way: str, on_both: OnBoth) -> None:
    assert "(nan on tower 1)" in on_both(cases.train_into_nan, way=way)


def test_data_in_a_scope(server: Server, pair: list[str]) -> None:
    assert server.towers(stream_cases.data_in_a_scope, devices=pair) == [20, 20]


def test_batches_are_copied_ahead_and_arrive_whole(server: Server, pair: list[str]) -> None:
    assert server.towers(stream_cases.batches_arrive_whole, devices=pair[:1]) == [True]


def test_batches_that_nobody_holds_stay_until_they_are_used(server: Server, pair: list[str]) -> None:
    assert server.towers(stream_cases.batches_kept_by_queued_copies, devices=pair[:1]) == [True]


def test_gradients_of_two_streams(way: str, server: Server, pair: list[str], on_both: OnBoth) -> None:
    [alone] = server.towers_once(stream_cases.gradients_of_two_streams, devices=pair[:1])
    both = on_both(stream_cases.gradients_of_two_streams, way=way)
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-12)


def test_extremes_on_several_devices(server: Server, pair: list[str]) -> None:
    assert server.towers(stream_cases.extremes_on_several_devices, devices=pair[:1]) == [True]


def test_what_cannot_be_pinned_arrives_too(server: Server, pair: list[str]) -> None:
    assert server.towers(stream_cases.what_cannot_be_pinned, devices=pair[:1]) == [3]


@pytest.mark.parametrize("case", [stream_cases.a_checkpoint_is_copied, stream_cases.bytes_are_copied])
def test_a_checkpoint_is_copied_without_waiting_for_each_tensor(
    case: Callable[[], None], server: Server, pair: list[str]
) -> None:
    server.towers(case, devices=pair[:1])


def test_random_numbers(server: Server, pair: list[str]) -> None:
    assert server.towers(stream_cases.random_numbers, devices=pair) == [True, True]


def test_an_interrupted_run_ends_in_the_same_bits(server: Server, pair: list[str], tmp_path: pathlib.Path) -> None:
    """Checkpoints hold a device's tensors and its random numbers."""
    whole = server.towers(cases.train_with_checkpoints, str(tmp_path / "whole"), None, devices=pair)
    server.towers(cases.train_with_checkpoints, str(tmp_path / "parts"), 6, devices=pair)
    resumed = server.towers(cases.train_with_checkpoints, str(tmp_path / "parts"), None, devices=pair)
    for (digest, losses, _), (same_digest, same_losses, step) in zip(whole, resumed, strict=True):
        assert (same_digest, same_losses, step) == (digest, losses, 4)


@pytest.mark.skipif(not importlib.util.find_spec("keras"), reason="needs Keras")
@pytest.mark.parametrize("settings", [{}, {"shard_optimizer": True}, {"central": True}], ids=str)
def test_keras(settings: Settings, way: str, server: Server, pair: list[str], on_both: OnBoth) -> None:
    # Keras draws a GPU's first weights from the GPU's generator.
    devices = pair[:1] if server.kind == "cuda" else ["cpu:0"]
    [alone] = server.towers_once(keras_cases.fit, ["convolutional"], devices=devices)
    found = on_both(keras_cases.fit, ["convolutional"], settings, way=way)
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-9)
