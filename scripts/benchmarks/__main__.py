"""``scripts/bench NAME``: runs one of the benchmarks beside this file."""

from __future__ import annotations

import sys

import allreduce
import checkpoint
import device
import fit
import memory
import mirror
import parts
import scaling
import step
import virtual

BENCHMARKS = {
    "allreduce": allreduce.main,
    "checkpoint": checkpoint.main,
    "device": device.main,
    "fit": fit.main,
    "memory": memory.main,
    "mirror": mirror.main,
    "parts": parts.main,
    "scaling": scaling.main,
    "step": step.main,
    "virtual": virtual.main,
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        print(f"usage: scripts/bench {{{','.join(BENCHMARKS)}}} [--help]", file=sys.stderr)
        return 2
    BENCHMARKS[sys.argv[1]](sys.argv[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
