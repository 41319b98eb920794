"""The model behind scripts/plan: values that can be computed by hand, and what must hold whatever the figures are."""

from __future__ import annotations

import argparse
import itertools
import math

import plan
import planning
import pytest
from planning import Cluster, Link, Model

from towers import options
from towers.gradients import buckets
from towers.health import heartbeat

INSIDE, ACROSS = Link(1e-6, 100e9), Link(10e-6, 10e9)


def one_host(devices: int) -> Cluster:
    """Devices that share one kind of link."""
    return Cluster(1, devices, INSIDE, ACROSS)


def even(backward: float, gradients: float = 4.0 * 2**20, bucket: float = 2.0**20) -> Model:
    """A model whose four buckets of 1 MiB become full at even distances."""
    return Model(gradients, forward=0.010, backward=backward, optimizer=0.004, bucket=bucket)


def test_a_ring_in_one_host() -> None:
    # 2 · 3 messages of 1 MB / 4: 6 · (1 µs + 2.5 µs)
    assert planning.ring(one_host(4), 1e6) == pytest.approx(21e-6)
    assert planning.ring_over(INSIDE, 4, 1e6) == pytest.approx(21e-6)


def test_a_ring_over_two_hosts_goes_at_the_pace_of_the_network() -> None:
    # 2 · 3 messages of 250 KB at 10 GB/s: 150 µs; the longest way has 2 messages across and 1 inside, there and back.
    assert planning.ring(Cluster(2, 2, INSIDE, ACROSS), 1e6) == pytest.approx(150e-6 + 2 * (2 * 10e-6 + 1e-6))
    # Four adapters carry a fourth each.
    quick = planning.ring(Cluster(2, 2, INSIDE, ACROSS, adapters=4), 1e6)
    assert quick == pytest.approx(150e-6 / 4 + 2 * (2 * 10e-6 + 1e-6))


def test_trees() -> None:
    # Without bandwidth to speak of one piece is best: a message up and one down; of 8 devices 3 up, 3 down.
    assert planning.tree(one_host(2), 0.0) == pytest.approx(2e-6)
    assert planning.tree(one_host(8), 0.0) == pytest.approx(6e-6)
    # 100 MB through 8 devices; k pieces take 6 messages and k-1 rounds, each of 1 µs + 2 ms / k.
    best = min((6 + k - 1) * (1e-6 + 2e-3 / k) for k in (2**i for i in range(17)))
    assert planning.tree(one_host(8), 100e6) == pytest.approx(best)


def test_hierarchical_and_leaders() -> None:
    assert planning.hierarchical(one_host(4), 1e6) == pytest.approx(planning.ring(one_host(4), 1e6))
    # Inside 2 · (1 µs + 5 µs); across each device takes 500 KB in two messages of 250 KB, and has half of 10 GB/s.
    cluster = Cluster(2, 2, INSIDE, ACROSS)
    assert planning.hierarchical(cluster, 1e6) == pytest.approx(12e-6 + 2 * (10e-6 + 250e3 / 5e9))
    # An all-reduce inside, 2 · (10 µs + 50 µs) between the leaders, 1 µs + 10 µs to spread it.
    cluster = Cluster(2, 2, INSIDE, ACROSS, adapters=2)
    assert planning.leaders(cluster, 1e6) == pytest.approx(12e-6 + 120e-6 + 11e-6)


def test_a_reduce_scatter_and_an_all_gather_are_a_ring() -> None:
    assert 2 * planning.half(one_host(8), 1e6) == pytest.approx(planning.ring(one_host(8), 1e6))
    # Across 8 hosts recursive halving takes 3 messages for what a ring takes 7.
    alone = Cluster(8, 1, INSIDE, ACROSS)
    assert planning.half(alone, 8e6) == pytest.approx(3 * 10e-6 + 7e6 / 10e9)


@pytest.mark.parametrize("name", planning.ALGORITHMS)
def test_no_algorithm_beats_the_bandwidth_and_more_takes_longer(name: str) -> None:
    algorithm = planning.ALGORITHMS[name]
    for devices, nbytes in itertools.product((2, 8, 64), (1e3, 1e6, 1e9)):
        assert algorithm(one_host(devices), nbytes) >= 2 * (devices - 1) / devices * nbytes / INSIDE.bandwidth
    cluster = Cluster(8, 4, INSIDE, ACROSS)
    for larger in (2e6, 64e6):
        assert algorithm(cluster, larger) > algorithm(cluster, larger / 2)
    times = [algorithm(Cluster(hosts, 4, INSIDE, ACROSS), 1e7) for hosts in (1, 2, 4, 8, 16, 32, 64)]
    assert times == sorted(times)
    assert times[0] < times[-1]
    assert algorithm(Cluster(8, 4, INSIDE, Link(20e-6, 5e9)), 1e7) > algorithm(cluster, 1e7)


def test_buckets_are_full_when_their_part_of_backward_is_done() -> None:
    times, sizes = zip(*even(backward=0.4).buckets(), strict=True)
    assert sizes == (2.0**20,) * 4
    assert times == pytest.approx([0.1, 0.2, 0.3, 0.4])
    # The first one is small; the rest of 25 MiB is its own.
    assert [size / 2**20 for _, size in even(0.4, 30 * 2.0**20, 25 * 2.0**20).buckets()] == [1, 25, 4]


def test_backward_need_not_bring_gradients_evenly() -> None:
    # Half of the time without a gradient, then all of them.
    late = Model(4e6, 0, 1.0, spread=((0.5, 0.0), (0.5, 1.0)))
    assert late.ready(1e6) == pytest.approx(0.5 + 0.5 / 4)
    # All of them at once, at the very end.
    assert Model(4e6, 0, 1.0, spread=((1.0, 0.0), (0.0, 1.0))).ready(1e6) == pytest.approx(1.0)


def test_a_short_all_reduce_is_hidden_but_for_the_last_bucket() -> None:
    # 1 MiB over 2 devices: 2 · (1 µs + 5.24 µs), far less than the 100 ms between two buckets.
    cluster = one_host(2)
    one = planning.ring(cluster, 2.0**20)
    assert planning.step(even(backward=0.4), cluster, "ring").total == pytest.approx(0.414 + one)
    # A backward that is over at once hides nothing: the collectives queue.
    assert planning.step(even(backward=0.0), cluster, "ring").exposed == pytest.approx(4 * one)


def test_one_device_exchanges_nothing() -> None:
    for algorithm in ("tree", "sharded"):
        found = planning.step(even(0.4), Cluster(1, 1, INSIDE, ACROSS), algorithm)
        assert found.total == pytest.approx(0.414)
        assert found.efficiency == 1.0


def test_a_sharded_optimizer_trades_its_time_for_an_all_gather() -> None:
    cluster, model = one_host(4), even(backward=0.4)
    last, gather = planning.half(cluster, 2.0**20), planning.half(cluster, model.gradients)
    found = planning.step(model, cluster, "sharded")
    assert found.compute == pytest.approx(0.410 + 0.001)
    assert found.exposed == pytest.approx(last + gather)
    # It is worth it where the optimizer takes longer than that.
    assert found.total < planning.step(model, cluster, "ring").total


def test_a_fixed_global_batch_leaves_each_device_less_to_hide_behind() -> None:
    smaller = Model(4e6, 0.010, 0.020, 0.004, batch=32).with_batch(8)
    assert (smaller.forward, smaller.backward, smaller.optimizer) == pytest.approx((0.0025, 0.005, 0.004))


def test_the_slowest_of_many() -> None:
    assert planning.slowest_of(1) == pytest.approx(0.0)
    # Exact: 1 / sqrt(pi) of two, 1.5388 of ten, 2.5076 of a hundred.
    for count, exact in ((2, 1 / math.sqrt(math.pi)), (10, 1.5388), (100, 2.5076)):
        assert planning.slowest_of(count) == pytest.approx(exact, abs=0.03)
    model = Model(0.0, 0.3, 0.7, noise=0.1)
    assert planning.step(model, one_host(2), "ring").straggling == pytest.approx(0.1 * planning.slowest_of(2))


def test_checkpoints_and_failures() -> None:
    # Saving takes 50 s, a failure every 10,000 s: sqrt(2 · 50 · 10,000)
    assert planning.save_interval(50, 10_000) == pytest.approx(1000)
    # To first order: 50/1000 for saving, 500/10,000 lost, 100/10,000 for restarting.
    assert planning.useful(50, 10_000, 100) == pytest.approx(1 - 0.05 - 0.05 - 0.01, abs=0.01)
    assert planning.useful(50, 1_000, 100) < planning.useful(50, 10_000, 100)
    assert planning.useful(60, 0.01, 600) == 0.0


def test_what_the_control_plane_costs() -> None:
    assert planning.handshake_seconds(16) == pytest.approx(2 * planning.handshake_seconds(8)) == 112 * planning.REQUEST
    # 3 messages of 256 bytes, as slow as the network's.
    assert planning.announcement(Cluster(2, 2, INSIDE, ACROSS)) == pytest.approx(3 * (10e-6 + 256 / 10e9))


def test_figures_of_the_project_are_those_of_its_code() -> None:
    assert buckets.FIRST_BUCKET_BYTES == planning.FIRST_BUCKET
    assert all(model.bucket == options.DEFAULT_BUCKET_BYTES for model in planning.MODELS.values())
    assert planning.heartbeat_requests(10**6) == heartbeat.PER_SECOND
    assert planning.heartbeat_requests(8) == 8 / heartbeat.INTERVAL


@pytest.mark.parametrize("model", planning.MODELS.values(), ids=list(planning.MODELS))
def test_presets_are_whole(model: Model) -> None:
    for share in zip(*model.spread, strict=True):
        assert sum(share) == pytest.approx(1.0, abs=0.001)
    assert model.buckets()[-1][0] == pytest.approx(model.backward)


def test_quantities_are_read_with_their_units() -> None:
    assert (plan.quantity("100MB"), plan.quantity("10s"), plan.quantity("2min")) == (1e8, 10.0, 120.0)
    for wrong in ("100", "100Mb", "MB", "14parsec"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a number with one of the units"):
            plan.quantity(wrong)


def test_a_changed_bucket_is_in_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["--hardware", "nvlink-400g", "--hosts", "2", "--bucket", "50MB"])
    text = capsys.readouterr().out
    assert "(changed)" in text
    row = next(line.split() for line in text.splitlines() if line.split()[:2] == ["2", "16"])
    cluster = planning.replace(planning.HARDWARE["nvlink-400g"], hosts=2)
    sizes = (2.0**20, 50e6, 50e6, 102.2e6 - 2**20 - 100e6)
    assert row[2] == plan.shown(1e3 * sum(planning.ring(cluster, size) for size in sizes))
