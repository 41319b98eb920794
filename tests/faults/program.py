"""The script that the faults happen to: trains on CPU towers, and prints what came out as one line of JSON."""

from __future__ import annotations

import argparse
import json

import mirrored
from tests.faults.faults import Fault
from tests.faults.training import EPOCHS, train


def main() -> None:
    arguments = _parse()
    if arguments.launch:
        mirrored.launch(_run, (arguments,), towers=arguments.launch)
    else:
        _run(arguments)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--towers", type=int, default=3, help="of this worker; 0: as the launcher says")
    parser.add_argument("--launch", type=int, default=0, help="start so many towers by mirrored.launch")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--every", type=int, default=4, help="steps between two checkpoints")
    parser.add_argument("--deadline", type=float, help="seconds that a collective may take after it")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds between being told to end and ending")
    parser.add_argument("--fault", type=Fault.parse)
    return parser.parse_args()


def _run(arguments: argparse.Namespace) -> None:
    strategy = mirrored.MultiWorkerMirroredStrategy(
        devices=[f"cpu:{i}" for i in range(arguments.towers)] if arguments.towers else None,
        seed=0,
    )
    result = train(
        strategy,
        arguments.folder,
        epochs=arguments.epochs,
        fault=arguments.fault,
        deadline=arguments.deadline,
        every_steps=arguments.every,
        grace_seconds=arguments.grace,
    )
    digests = [text.decode() for text in strategy.communicator.all_gather_bytes(result["digest"].encode())]
    strategy.print(json.dumps({key: result[key] for key in ("losses", "seen", "steps")} | {"digests": digests}))


if __name__ == "__main__":
    main()
