"""One long run that is killed again and again, at any time, on any tower; every other time in central storage."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
from typing import Any

import mirrored
from tests.faults.training import train
from tests.support.jobs import strategy_of

TOWERS, EPOCHS = 3, 800  # long enough for 200 kills


def _job(folder: str, processes: str, central: bool = False) -> dict[str, Any]:
    strategy = strategy_of({"central": central})
    place = pathlib.Path(processes, str(strategy.topology.index))
    place.write_text(str(os.getpid()))
    return train(strategy, folder, epochs=EPOCHS, every_steps=2)


def _killer(processes: pathlib.Path, random_numbers: random.Random, ended: threading.Event) -> None:
    """Kill one of the towers, some time after all have begun."""
    while len(list(processes.iterdir())) < TOWERS:
        if ended.wait(0.01):
            return
    ended.wait(random_numbers.uniform(0.0, 1.5))
    victim = processes / str(random_numbers.randrange(TOWERS))
    with contextlib.suppress(ProcessLookupError):
        if not ended.is_set():
            os.kill(int(victim.read_text()), signal.SIGKILL)


def random_kills(count: int, seed: int) -> int:
    """Kill a run ``count`` times, then let it end; returns 0 when it is as one that was never killed."""
    random_numbers = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder, processes = pathlib.Path(place, "run"), pathlib.Path(place, "processes")
        expected = mirrored.launch(_job, (str(folder) + "-whole", _empty(processes)), towers=TOWERS)
        killed, started = 0, time.monotonic()
        while killed < count:
            ended = threading.Event()
            killer = threading.Thread(target=_killer, args=(pathlib.Path(_empty(processes)), random_numbers, ended))
            killer.start()
            try:
                mirrored.launch(_job, (str(folder), str(processes), killed % 2 == 1), towers=TOWERS)
                ended.set()
                print(f"the run came to its end after {killed} kills; raise EPOCHS")
                return 1
            except mirrored.TowerFailedError as error:
                if "SIGKILL" not in str(error) and "checkpoint" in str(error):
                    raise
                killed += 1
            finally:
                ended.set()
                killer.join()
            if killed % 20 == 0:
                newest = max((entry.name for entry in folder.glob("step-*")), default="nothing")
                print(f"{killed} kills, {time.monotonic() - started:.0f} s, {newest}", flush=True)
        found = mirrored.launch(_job, (str(folder), _empty(processes)), towers=TOWERS)
    keys = ("digest", "seen", "losses", "steps")
    wrong = [f"tower {i}: other {k}" for i in range(TOWERS) for k in keys if found[i][k] != expected[i][k]]
    print(f"after {killed} kills: {'; '.join(wrong) or 'the same bits and the same examples as without'}")
    return 1 if wrong else 0


def _empty(processes: pathlib.Path) -> str:
    processes.mkdir(exist_ok=True)
    for entry in processes.iterdir():
        entry.unlink()
    return str(processes)
