"""What the model says about a machine and a model, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import bookkeeping
import failures
from cluster import Cluster
from collectives import ALGORITHMS, leaders
from steptime import Model, Step, buckets, sharded_step, step
from units import as_duration, as_size, in_ms


@dataclass(frozen=True)
class Plan:
    """What is planned.

    Attributes:
        clusters: one row of each table for each.
        unit: what the batch counts.
        global_batch: None: each device keeps its share.
        device_mtbf: mean seconds until one device, or what belongs to it, stops the job.
        save, restart: seconds of a checkpoint, and from a failure to the first step after it.
    """

    model: Model
    clusters: Sequence[Cluster]
    unit: str = "examples"
    global_batch: float | None = None
    overlapped: bool = True
    device_mtbf: float = 0.0
    save: float = 60.0
    restart: float = 600.0

    def model_on(self, cluster: Cluster) -> Model:
        """The model with its share on this cluster."""
        if self.global_batch is None:
            return self.model
        return self.model.with_batch(self.global_batch / cluster.size)


def best(plan: Plan, cluster: Cluster) -> tuple[str, Step]:
    """The algorithm with the shortest step, and that step."""
    model = plan.model_on(cluster)
    return min(
        ((name, step(model, cluster, name, overlapped=plan.overlapped)) for name in ALGORITHMS),
        key=lambda found: found[1].total,
    )


def all_reduces(plan: Plan) -> None:
    """Print the time of all buckets' all-reduces, one after the other, by algorithm."""
    print("\nAll-reduce of all gradients, bucket by bucket, ms (hidden or not):")
    rows = [["hosts", "devices", *ALGORITHMS, "leaders", "bytes ÷ bandwidth"]]
    for cluster in plan.clusters:
        queue = buckets(plan.model)
        times = [sum(find(cluster, b.nbytes) for b in queue) for find in (*ALGORITHMS.values(), leaders)]
        if cluster.size == 1:
            times = [0.0] * len(times)
        rows.append([str(cluster.hosts), str(cluster.size), *map(in_ms, times), in_ms(_floor(cluster, plan.model))])
    _print(rows)


def _floor(cluster: Cluster, model: Model) -> float:
    """What no algorithm can beat: 2(N-1)/N of the bytes through each device, 2(W-1)/W through each host."""
    inside = 2 * (cluster.devices - 1) / cluster.devices * model.gradients / cluster.inside.bandwidth
    across = 2 * (cluster.hosts - 1) / cluster.hosts * model.gradients / cluster.host_across.bandwidth
    return max(inside, across)


def step_times(plan: Plan) -> None:
    """Print the step with the best algorithm, and with NCCL pinned to its ring, and sharded."""
    print("\nA step, ms:")
    head = [
        "hosts",
        "devices",
        "best",
        "compute",
        "exposed",
        "slowest",
        "step",
        "efficiency",
        "ring: step",
        "ring: eff.",
    ]
    rows = [[*head, "sharded"]]
    for cluster in plan.clusters:
        name, found = best(plan, cluster)
        model = plan.model_on(cluster)
        ring = step(model, cluster, "ring", overlapped=plan.overlapped)
        sharded = sharded_step(model, cluster, overlapped=plan.overlapped)
        row = [str(cluster.hosts), str(cluster.size), name if cluster.size > 1 else "–"]
        row += [in_ms(value) for value in (found.compute, found.exposed, found.straggling, found.total)]
        row += [f"{found.efficiency:.3f}", in_ms(ring.total), f"{ring.efficiency:.3f}", in_ms(sharded.total)]
        rows.append(row)
    _print(rows)


def limits(plan: Plan, memory: float) -> None:
    """Print what else grows: the batch, the memory, failures, start-up and announcements."""
    model = plan.model
    whole = model.gathered + model.gradients + model.state
    print(f"\nWhat else grows (state: {as_size(whole)} a device, without activations):")
    head = ["devices", f"batch, {plan.unit}", "state, sharded", "failure every", "save every", "useful"]
    rows = [[*head, "messages at the store", "of bytes", "heartbeats", "announcement", "by hosts", "reading it"]]
    for cluster in plan.clusters:
        batch = plan.global_batch or model.batch * cluster.size
        sharded = model.gathered + model.gradients + model.state / cluster.size
        row = [str(cluster.size), f"{batch:,.0f}", as_size(sharded)]
        if plan.device_mtbf:
            mtbf = plan.device_mtbf / cluster.size
            every = failures.interval(plan.save, mtbf)
            row += [as_duration(mtbf), as_duration(every), f"{failures.useful(plan.save, mtbf, plan.restart):.3f}"]
        else:
            row += ["–"] * 3
        row.append(as_duration(bookkeeping.handshake_seconds(cluster.size)))
        row.append(as_size(bookkeeping.handshake_bytes(cluster.size)))
        row.append(f"{bookkeeping.heartbeats(cluster.size):.1%}")
        row.append(as_duration(bookkeeping.announcement(cluster)) if cluster.size > 1 else "–")
        row.append(as_duration(bookkeeping.announcement_by_hosts(cluster)) if cluster.size > 1 else "–")
        row.append(as_duration(bookkeeping.reading(cluster.size)))
        rows.append(row)
    _print(rows)
    if whole > memory:
        print(f"The whole state does not fit into the {as_size(memory)} of one device.")


def _print(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    align: Callable[[str, int], str] = str.rjust
    for row in rows:
        print("  ".join(align(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip())
