"""The model behind scripts/plan: values that can be computed by hand, and what must hold whatever the figures are."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import bookkeeping
import collectives
import cpu
import failures
import presets
import pytest
import steptime
import units
from cluster import Cluster, Link

from tests.support.jobs import ROOT
from towers import options
from towers.gradients import buckets
from towers.health import heartbeat

INSIDE, ACROSS = Link(1e-6, 100e9), Link(10e-6, 10e9)


def one_host(devices: int) -> Cluster:
    """Devices that share one kind of link."""
    return Cluster(1, devices, INSIDE, ACROSS)


def even(backward: float, gradients: float = 4.0 * 2**20, bucket: float = 2.0**20) -> steptime.Model:
    """A model whose four buckets of 1 MiB become full at even distances."""
    return steptime.Model(gradients, forward=0.010, backward=backward, optimizer=0.004, bucket=bucket)


def test_a_ring_in_one_host() -> None:
    # 2 · 3 messages of 1 MB / 4: 6 · (1 µs + 2.5 µs)
    assert collectives.ring(one_host(4), 1e6) == pytest.approx(21e-6)
    assert collectives.ring_over(INSIDE, 4, 1e6) == pytest.approx(21e-6)


def test_a_ring_over_two_hosts_goes_at_the_pace_of_the_network() -> None:
    # 2 · 3 messages of 250 KB at 10 GB/s: 150 µs; the longest way has 2 messages across and 1 inside, there and back.
    assert collectives.ring(Cluster(2, 2, INSIDE, ACROSS), 1e6) == pytest.approx(150e-6 + 2 * (2 * 10e-6 + 1e-6))
    # Four adapters carry a fourth each.
    quick = collectives.ring(Cluster(2, 2, INSIDE, ACROSS, adapters=4), 1e6)
    assert quick == pytest.approx(150e-6 / 4 + 2 * (2 * 10e-6 + 1e-6))


def test_two_devices_make_a_tree_of_depth_one() -> None:
    # Without bandwidth to speak of one piece is best: a message up and one down.
    assert collectives.tree(one_host(2), 0.0) == pytest.approx(2e-6)
    # 8 devices: 3 up, 3 down.
    assert collectives.tree(one_host(8), 0.0) == pytest.approx(6e-6)


def test_a_tree_cuts_into_pieces() -> None:
    # 100 MB through 8 devices; k pieces take 6 messages and k-1 rounds, each of 1 µs + 2 ms / k.
    best = min((6 + k - 1) * (1e-6 + 2e-3 / k) for k in (2**i for i in range(17)))
    assert best < 0.25 * 6 * (1e-6 + 2e-3)
    assert collectives.tree(one_host(8), 100e6) == pytest.approx(best)


def test_hierarchical_in_one_host_is_a_ring() -> None:
    assert collectives.hierarchical(one_host(4), 1e6) == pytest.approx(collectives.ring(one_host(4), 1e6))


def test_hierarchical_over_two_hosts() -> None:
    # Inside 2 · (1 µs + 5 µs); across each device takes 500 KB in two messages of 250 KB, and has half of 10 GB/s.
    cluster = Cluster(2, 2, INSIDE, ACROSS)
    ring_across = 2 * (10e-6 + 250e3 / 5e9)
    assert collectives.tree(Cluster(2, 1, ACROSS, Link(10e-6, 5e9)), 500e3) > ring_across
    assert collectives.hierarchical(cluster, 1e6) == pytest.approx(12e-6 + ring_across)


def test_leaders_take_everything_across_alone() -> None:
    # An all-reduce inside, 2 · (10 µs + 50 µs) between the leaders, 1 µs + 10 µs to spread it.
    cluster = Cluster(2, 2, INSIDE, ACROSS, adapters=2)
    assert collectives.leaders(cluster, 1e6) == pytest.approx(12e-6 + 120e-6 + 11e-6)
    assert collectives.leaders(cluster, 1e6) > collectives.hierarchical(cluster, 1e6)


def test_a_reduce_scatter_and_an_all_gather_are_a_ring() -> None:
    assert 2 * collectives.half(one_host(8), 1e6) == pytest.approx(collectives.ring(one_host(8), 1e6))
    # Across 8 hosts recursive halving takes 3 messages for what a ring takes 7.
    alone = Cluster(8, 1, INSIDE, ACROSS)
    assert collectives.half(alone, 8e6) == pytest.approx(3 * 10e-6 + 7e6 / 10e9)


def test_no_algorithm_beats_the_bandwidth() -> None:
    for devices, nbytes in itertools.product((2, 8, 64), (1e3, 1e6, 1e9)):
        least = 2 * (devices - 1) / devices * nbytes / INSIDE.bandwidth
        for name, algorithm in collectives.ALGORITHMS.items():
            assert algorithm(one_host(devices), nbytes) >= least, name


@pytest.mark.parametrize("name", collectives.ALGORITHMS)
def test_more_bytes_more_hosts_and_slower_links_take_longer(name: str) -> None:
    algorithm = collectives.ALGORITHMS[name]
    cluster = Cluster(8, 4, INSIDE, ACROSS)
    for larger in (2e6, 64e6):
        assert algorithm(cluster, larger) > algorithm(cluster, larger / 2)
    times = [algorithm(Cluster(hosts, 4, INSIDE, ACROSS), 1e7) for hosts in (1, 2, 4, 8, 16, 32, 64)]
    assert times == sorted(times)
    assert times[0] < times[-1]
    slow = Cluster(8, 4, INSIDE, Link(20e-6, 5e9))
    assert algorithm(slow, 1e7) > algorithm(cluster, 1e7)


def test_the_flat_ring_loses_at_scale_and_wins_where_it_should() -> None:
    large = presets.HARDWARE["nvlink-400g"].cluster(2048)
    assert collectives.ring(large, 25e6) > 20 * collectives.hierarchical(large, 25e6)
    assert collectives.ring(one_host(8), 1e9) < collectives.tree(one_host(8), 1e9)


def test_buckets_are_full_when_their_part_of_backward_is_done() -> None:
    found = steptime.buckets(even(backward=0.4))
    assert [bucket.nbytes for bucket in found] == [2.0**20] * 4
    assert [bucket.ready for bucket in found] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    # The first one is small; the rest of 25 MiB is its own.
    sizes = [bucket.nbytes / 2**20 for bucket in steptime.buckets(even(0.4, 30 * 2.0**20, 25 * 2.0**20))]
    assert sizes == [1, 25, 4]


def test_backward_need_not_bring_gradients_evenly() -> None:
    # Half of the time without a gradient, then all of them.
    late = steptime.Model(4e6, 0, 1.0, spread=((0.5, 0.0), (0.5, 1.0)))
    assert steptime.ready(late, 1e6) == pytest.approx(0.5 + 0.5 / 4)
    # All of them at once, at the very end.
    last = steptime.Model(4e6, 0, 1.0, spread=((1.0, 0.0), (0.0, 1.0)))
    assert steptime.ready(last, 1e6) == pytest.approx(1.0)


def test_a_short_all_reduce_is_hidden_but_for_the_last_bucket() -> None:
    # 1 MiB over 2 devices: 2 · (1 µs + 5.24 µs), far less than the 100 ms between two buckets.
    cluster, model = one_host(2), even(backward=0.4)
    one = collectives.ring(cluster, 2.0**20)
    found = steptime.step(model, cluster, "ring")
    assert found.communication == pytest.approx(4 * one)
    assert found.exposed == pytest.approx(one)
    assert found.total == pytest.approx(0.414 + one)


def test_nothing_is_hidden_where_backward_is_over_at_once() -> None:
    cluster, model = one_host(2), even(backward=0.0)
    found = steptime.step(model, cluster, "ring")
    assert found.exposed == pytest.approx(found.communication)
    assert found.total == pytest.approx(0.014 + found.communication)


def test_nothing_is_hidden_where_collectives_need_the_core() -> None:
    found = steptime.step(even(backward=0.4), one_host(2), "ring", overlapped=False)
    assert found.exposed == pytest.approx(found.communication)


def test_collectives_queue_behind_each_other() -> None:
    queue = [steptime.Bucket(0.1, 1), steptime.Bucket(0.2, 1), steptime.Bucket(1.0, 1)]
    # 0.1 to 0.4, then to 0.7 (the second waited since 0.2), a gap, 1.0 to 1.3.
    assert steptime.finish(queue, lambda nbytes: 0.3 * nbytes) == pytest.approx(1.3)
    # Longer than the distances: one after the other from the first on.
    assert steptime.finish(queue, lambda nbytes: 2.0 * nbytes) == pytest.approx(0.1 + 6.0)


def test_one_device_exchanges_nothing() -> None:
    alone = Cluster(1, 1, INSIDE, ACROSS)
    for found in (steptime.step(even(0.4), alone, "tree"), steptime.sharded_step(even(0.4), alone)):
        assert found.total == pytest.approx(0.414)
        assert found.efficiency == 1.0


def test_a_sharded_optimizer_trades_its_time_for_an_all_gather() -> None:
    cluster, model = one_host(4), even(backward=0.4)
    last, gather = collectives.half(cluster, 2.0**20), collectives.half(cluster, model.gradients)
    found = steptime.sharded_step(model, cluster)
    assert found.compute == pytest.approx(0.410 + 0.001)
    assert found.exposed == pytest.approx(last + gather)
    # It is worth it where the optimizer takes longer than that, and not where it takes nothing.
    assert found.total < steptime.step(model, cluster, "ring").total


def test_a_fixed_global_batch_leaves_each_device_less_to_hide_behind() -> None:
    smaller = steptime.Model(4e6, 0.010, 0.020, 0.004, batch=32).with_batch(8)
    assert (smaller.forward, smaller.backward, smaller.optimizer) == pytest.approx((0.0025, 0.005, 0.004))


def test_the_slowest_of_many() -> None:
    assert steptime.slowest_of(1) == pytest.approx(0.0)
    # Exact: 1 / sqrt(pi) of two, 1.5388 of ten, 2.5076 of a hundred.
    for count, exact in ((2, 1 / math.sqrt(math.pi)), (10, 1.5388), (100, 2.5076)):
        assert steptime.slowest_of(count) == pytest.approx(exact, abs=0.03)
    for count in (2, 64, 16384):
        assert steptime.slowest_of(count) < math.sqrt(2 * math.log(count))
    model = steptime.Model(0.0, 0.3, 0.7, noise=0.1)
    assert steptime.step(model, one_host(2), "ring").straggling == pytest.approx(0.1 * steptime.slowest_of(2))


def test_checkpoints_and_failures() -> None:
    # Saving takes 50 s, a failure every 10,000 s: sqrt(2 · 50 · 10,000)
    assert failures.interval(50, 10_000) == pytest.approx(1000)
    # To first order: 50/1000 for saving, 500/10,000 lost, 100/10,000 for restarting.
    assert failures.useful(50, 10_000, 100) == pytest.approx(1 - 0.05 - 0.05 - 0.01, abs=0.01)
    assert failures.useful(50, 1_000, 100) < failures.useful(50, 10_000, 100)
    assert failures.useful(60, 0.01, 600) == 0.0
    # No interval is better than Young's by much.
    assert failures.useful(1, 10_000, 0) > 0.98


def test_what_the_start_up_costs_grows_with_the_square() -> None:
    assert bookkeeping.handshake_requests(8) == 128
    assert bookkeeping.handshake_seconds(16) == pytest.approx(4 * bookkeeping.handshake_seconds(8))
    assert bookkeeping.heartbeats(16384) == pytest.approx(2 * 16384 * bookkeeping.REQUEST)
    # 3 messages of 256 bytes, as slow as the network's.
    assert bookkeeping.announcement(Cluster(2, 2, INSIDE, ACROSS)) == pytest.approx(3 * (10e-6 + 256 / 10e9))


def test_figures_of_the_project_are_those_of_its_code() -> None:
    assert buckets.FIRST_BUCKET_BYTES == steptime.FIRST_BUCKET
    assert all(preset.model.bucket == options.DEFAULT_BUCKET_BYTES for preset in presets.MODELS.values())
    assert heartbeat.INTERVAL * bookkeeping.HEARTBEATS == 2.0  # a heartbeat, and a look for queries


MACHINE = cpu.Machine(cores=2, cache=2.0**25)


def test_towers_take_turns_on_cores() -> None:
    # 3 posts in each of 2 meetings, twice as long on half as many cores; 4 MB fit into the cache, 16 MB four times not.
    assert cpu.shared_memory(4, 4e6, MACHINE) == [0, 12, 8e6, 0]
    assert cpu.shared_memory(4, 16e6, MACHINE) == [0, 12, 0, 32e6]
    assert cpu.shared_memory(2, 4e6, MACHINE) == [2, 0, 4e6, 0]
    assert cpu.shared_memory(1, 4e6, MACHINE) == [0, 0, 0, 0]
    # 6 messages of 1 MB; what waits does not take turns.
    assert cpu.gloo(4, 4e6, MACHINE) == [6, 12, 6e6, 12e6]


@pytest.mark.parametrize("terms", [cpu.shared_memory, cpu.gloo])
def test_a_fit_finds_what_made_the_points(terms: cpu.Terms) -> None:
    true = [5e-6, 1e-5, 1e-10, 3e-10] if terms is cpu.shared_memory else [4e-4, 1e-4, 2e-10, 1e-10]
    points = [
        cpu.Point(towers, nbytes, cpu.predict(true, terms, towers, nbytes, MACHINE))
        for towers, nbytes in itertools.product((2, 4), (4e3, 1e6, 16e6))
    ]
    found = cpu.fit(points, terms, MACHINE)
    assert found == pytest.approx(true, rel=1e-6)
    assert cpu.predict(found, terms, 8, 4e6, MACHINE) == pytest.approx(cpu.predict(true, terms, 8, 4e6, MACHINE))


def test_a_fit_gives_no_negative_time() -> None:
    # Small ones that take no longer than none: without the rule, a message would take less than nothing.
    points = [cpu.Point(2, nbytes, 1e-9 * nbytes - 1e-7) for nbytes in (1e3, 2e3, 1e6)]
    assert min(cpu.fit(points, cpu.shared_memory, MACHINE)) >= 0.0


def test_quantities_are_read_with_their_units() -> None:
    assert units.nbytes("100MB") == 1e8
    assert units.nbytes("25MiB") == 25 * 2**20
    assert units.rate("400Gb/s") == pytest.approx(50e9) == units.rate("50GB/s")
    assert units.seconds("14us") == pytest.approx(14e-6)
    for wrong in ("100", "100Mb", "MB", "14 parsec"):
        with pytest.raises(ValueError, match="is not a number with one of the units"):
            units.nbytes(wrong)


@pytest.mark.parametrize("model", presets.MODELS.values(), ids=list(presets.MODELS))
def test_presets_are_whole(model: presets.Preset) -> None:
    for share in zip(*model.model.spread, strict=True):
        assert sum(share) == pytest.approx(1.0, abs=0.001)
    assert steptime.buckets(model.model)[-1].ready == pytest.approx(model.model.backward)


def test_the_command_prints_its_tables() -> None:
    cluster = "--hosts 2 --devices 4 --inside-latency 1us --inside-bandwidth 100GB/s"
    cluster += " --across-bandwidth 100Gb/s"
    command = [sys.executable, str(ROOT / "scripts" / "planning"), *cluster.split(), "--gradients", "100MB"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "model: ResNet-50" in text
    assert "(changed)" in text
    row = next(line.split() for line in text.splitlines() if line.split()[:2] == ["2", "8"])
    cluster = Cluster(2, 4, Link(1e-6, 100e9), Link(14e-6, 12.5e9), adapters=8)
    sizes = [2.0**20] + [25 * 2.0**20] * 3
    sizes.append(100e6 - sum(sizes))
    ring = sum(collectives.ring(cluster, size) for size in sizes)
    assert row[2] == units.in_ms(ring)
