"""``scripts/bench NAME``: runs one of the benchmarks beside this file."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = (
    *("allreduce", "checkpoint", "control", "counts", "device", "fit", "gradients", "hosts", "local", "memory"),
    *("mirror", "monitor", "parts", "scaling", "servers", "start", "step", "table", "virtual"),
)


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        print(f"usage: scripts/bench {{{','.join(BENCHMARKS)}}} [--help]", file=sys.stderr)
        return 2
    importlib.import_module(sys.argv[1]).main(sys.argv[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
