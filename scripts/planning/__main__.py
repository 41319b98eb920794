"""Step time on paper: scripts/plan --hardware nvlink-400g --model resnet50 --hosts 8,128,2048

A model of latency, bandwidth and overlap; docs/scaling.md says what it assumes. --hardware and --model are presets,
every figure of which can be set. With --measure it is fitted to this machine and compared with it instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import presets
import tables
import units


def main(arguments: Sequence[str]) -> None:
    options = _parser().parse_args(arguments)
    if options.measure:
        # The steps that are measured are those of the benchmarks.
        sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
        import measure

        measure.check(options.turns, options.seconds, options.cases.split(","))
        return
    hardware, preset = presets.HARDWARE[options.hardware], presets.MODELS[options.model]
    inside = replace(hardware.inside, **_given(latency=options.inside_latency, bandwidth=options.inside_bandwidth))
    across = replace(hardware.across, **_given(latency=options.across_latency, bandwidth=options.across_bandwidth))
    own = _given(devices=options.devices, adapters=options.adapters, memory=options.memory)
    hardware = replace(hardware, inside=inside, across=across, **own)
    names = ("gradients", "forward", "backward", "optimizer", "batch", "bucket", "state", "noise")
    model = replace(preset.model, **_given(**{name: getattr(options, name) for name in names}))
    plan = tables.Plan(
        model,
        [hardware.cluster(int(hosts)) for hosts in options.hosts.split(",")],
        preset.unit,
        options.global_batch,
        hardware.overlapped and not options.no_overlap,
        options.device_mtbf,
        options.save,
        options.restart,
    )
    print(f"hardware: {hardware.about}{' (changed)' if hardware != presets.HARDWARE[options.hardware] else ''}")
    print(f"model: {preset.about}{' (changed)' if model != preset.model else ''}")
    print(f"one device alone: {units.in_ms(model.compute)} ms a step, {units.in_ms(model.backward)} of it backward")
    tables.all_reduces(plan)
    tables.step_times(plan)
    tables.limits(plan, hardware.memory)


def _given(**values: Any) -> dict[str, Any]:
    """Those that were set."""
    return {name: value for name, value in values.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Callable[..., Any] = parser.add_argument
    add("--hardware", choices=presets.HARDWARE, default="nvlink-400g")
    add("--model", choices=presets.MODELS, default="resnet50")
    add("--hosts", default="1,8,128,2048", help="comma-separated; one row for each")
    add("--devices", type=int, help="devices of a host")
    add("--adapters", type=int, help="network adapters of a host")
    add("--memory", type=units.nbytes, help="of a device, such as 80GB")
    for where in ("inside", "across"):
        add(f"--{where}-latency", type=units.seconds, help="of a message, such as 14us")
        add(f"--{where}-bandwidth", type=units.rate, help="in one direction, such as 40GB/s or 400Gb/s")
    add("--gradients", type=units.nbytes, help="such as 100MB")
    add("--bucket", type=units.nbytes, help="such as 25MiB")
    for phase in ("forward", "backward", "optimizer"):
        add(f"--{phase}", type=units.seconds, help="on one device, such as 35ms")
    add("--state", type=units.nbytes, help="of the optimizer, such as 200MB")
    add("--batch", type=float, help="of one device, for which forward and backward hold")
    add("--global-batch", type=float, help="fixed, shared by all devices; default: each keeps its share")
    add("--noise", type=float, help="standard deviation of forward + backward between devices, as a share of it")
    add("--no-overlap", action="store_true", help="all collectives follow backward")
    add("--device-mtbf", type=units.seconds, default="50700h", help="mean time until one device stops the job")
    add("--save", type=units.seconds, default="60s", help="how long a checkpoint stops training")
    add("--restart", type=units.seconds, default="10min", help="from a failure to the next step")
    add("--measure", action="store_true", help="fit the model to this machine and compare; takes three minutes")
    add("--turns", type=int, default=5, help="of --measure")
    add("--seconds", type=float, default=0.1, help="of --measure: length of one turn")
    add("--cases", default="mlp-64,resnet-64", help="of --measure: models of scripts/bench step")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
