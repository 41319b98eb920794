"""Step time on paper: scripts/plan --hardware nvlink-400g --model resnet50 --hosts 8,128,2048

docs/project/scaling.md says what the model assumes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace

import planning
from planning import ALGORITHMS, REQUEST, Cluster, Model

SIZES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
TIMES = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def quantity(text: str) -> float:
    """Bytes of "200MB", seconds of "10s" or "2min"."""
    match = re.fullmatch(r"([0-9.]+)(\S+)", text)
    units = SIZES | TIMES
    if match is None or match[2] not in units:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number with one of the units {', '.join(units)}")
    return float(match[1]) * units[match[2]]


def shown(value: float) -> str:
    """Three significant digits, more only before the point."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def in_unit(value: float, units: dict[str, float]) -> str:
    """A value in the largest of the units that it reaches; they are in order of size."""
    name = max(
        (name for name in units if units[name] <= value), key=lambda name: units[name], default=next(iter(units))
    )
    return f"{shown(value / units[name])} {name}"


def print_table(head: str, rows: list[list[str]]) -> None:
    """Print columns, aligned to the right; their titles are two blanks apart in ``head``."""
    rows = [re.split(r"  +", head), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.rjust, row, widths)).rstrip())


def print_all_reduces(model: Model, clusters: Sequence[Cluster]) -> None:
    """The time of all buckets' all-reduces, one after the other, by algorithm, and what no algorithm can beat."""
    print("\nAll-reduce of all gradients, bucket by bucket, ms (hidden or not):")
    rows = []
    for cluster in clusters:
        functions = [*ALGORITHMS.values(), planning.leaders]
        times = [sum(function(cluster, nbytes) for _, nbytes in model.buckets()) for function in functions]
        inside = (cluster.devices - 1) / cluster.devices / cluster.inside.bandwidth
        across = (cluster.hosts - 1) / cluster.hosts / cluster.network(1).bandwidth
        times.append(2 * model.gradients * max(inside, across))
        rows.append([str(cluster.hosts), str(cluster.size), *(shown(time * 1e3) for time in times)])
    print_table("hosts  devices  ring  tree  hierarchical  leaders  bytes ÷ bandwidth", rows)


def print_steps(models: Sequence[Model], clusters: Sequence[Cluster]) -> None:
    """The step with the best algorithm, with NCCL pinned to its ring, and sharded."""
    print("\nA step, ms:")
    rows = []
    for model, cluster in zip(models, clusters, strict=True):
        steps = {name: planning.step(model, cluster, name) for name in (*ALGORITHMS, "sharded")}
        name = min(ALGORITHMS, key=lambda name: steps[name].total)
        best, ring_step = steps[name], steps["ring"]
        row = [str(cluster.hosts), str(cluster.size), name if cluster.size > 1 else "–"]
        row += [shown(value * 1e3) for value in (best.compute, best.exposed, best.straggling, best.total)]
        row += [f"{best.efficiency:.3f}", shown(ring_step.total * 1e3), f"{ring_step.efficiency:.3f}"]
        rows.append([*row, shown(steps["sharded"].total * 1e3)])
    head = "hosts  devices  best  compute  exposed  slowest  step  efficiency"
    print_table(f"{head}  ring: step  ring: eff.  sharded", rows)


def print_limits(models: Sequence[Model], clusters: Sequence[Cluster], save: float, restart: float) -> None:
    """What else grows: the batch, the memory, failures, start-up and announcements."""
    one = models[0]
    state = 2 * one.gradients + one.state
    print(f"\nWhat else grows (state: {in_unit(state, SIZES)} a device, without activations):")
    rows = []
    for model, cluster in zip(models, clusters, strict=True):
        mtbf = planning.DEVICE_MTBF / cluster.size
        row = [str(cluster.size), f"{model.batch * cluster.size:,.0f}"]
        row += [in_unit(2 * one.gradients + one.state / cluster.size, SIZES), in_unit(mtbf, TIMES)]
        row += [in_unit(planning.save_interval(save, mtbf), TIMES), f"{planning.useful(save, mtbf, restart):.3f}"]
        row.append(in_unit(planning.handshake_seconds(cluster.size), TIMES))
        row.append(in_unit(planning.START_BYTES * cluster.size, SIZES))
        row.append(f"{planning.heartbeat_requests(cluster.size) * REQUEST:.1%}")
        row.append(in_unit(planning.announcement(cluster), TIMES) if cluster.size > 1 else "–")
        rows.append([*row, in_unit(planning.READING * cluster.size, TIMES)])
    head = f"devices  batch, {one.unit}  state, sharded  failure every  save every  useful  messages at the store"
    print_table(f"{head}  of bytes  heartbeats  announcement  reading it", rows)
    if state > clusters[0].memory:
        print(f"The whole state does not fit into the {in_unit(clusters[0].memory, SIZES)} of one device.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print three tables, with a row for each number of hosts."""
    parser = argparse.ArgumentParser(
        prog="scripts/plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", choices=planning.HARDWARE, default="nvlink-400g")
    parser.add_argument("--model", choices=planning.MODELS, default="resnet50")
    parser.add_argument("--hosts", default="1,8,128,2048", help="comma-separated; one row for each")
    parser.add_argument("--bucket", type=quantity, help="such as 200MB")
    parser.add_argument("--global-batch", type=float, help="fixed, shared by all devices; default: each keeps its own")
    parser.add_argument("--noise", type=float, help="of forward + backward between devices, as a share of it")
    parser.add_argument("--save", type=quantity, default="60s", help="seconds in which a checkpoint stops training")
    parser.add_argument("--restart", type=quantity, default="10min", help="from a failure to the next step")
    options = parser.parse_args(arguments)
    hardware, model = planning.HARDWARE[options.hardware], planning.MODELS[options.model]
    changes = {name: value for name in ("bucket", "noise") if (value := getattr(options, name)) is not None}
    model = replace(model, **changes)
    clusters = [replace(hardware, hosts=int(hosts)) for hosts in options.hosts.split(",")]
    batch = options.global_batch
    models = [model.with_batch(batch / cluster.size) if batch else model for cluster in clusters]
    print(f"hardware: {hardware.about}")
    print(f"model: {model.about}{' (changed)' if changes else ''}")
    print(f"one device alone: {shown(model.compute * 1e3)} ms a step, {shown(model.backward * 1e3)} of it backward")
    print_all_reduces(model, clusters)
    print_steps(models, clusters)
    print_limits(models, clusters, options.save, options.restart)


if __name__ == "__main__":
    main()
