"""Trains on two hosts with two CPU towers each, while things fail at seeded random moments, and says what came of it.

Hosts are network namespaces with a cable (this needs root and iproute2). A fault is one of: a tower is killed; an agent
is killed with its towers, and started again two seconds later, as a scheduler would; a tower is stopped, and continued;
the cable is cut, and healed. The same job runs once without faults. The parameters' bits at the end have to be equal,
and so have the examples of every step. What is printed: how long it takes from a fault to the next step that had not
been made before, and the share of the time that was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

sys.path.append(str(pathlib.Path(__file__).parent / "benchmarks"))
import cable

_TAKES_EFFECT = 5.0  # seconds in which a fault stops the steps

PROGRAM = """
import hashlib, json, pathlib, sys, time
import torch
from torch import nn
import mirrored

folder, steps, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
strategy = mirrored.MultiWorkerMirroredStrategy(
    devices=["cpu:0", "cpu:1"],
    virtual_towers=4,
    seed=0,
    restarts=100_000,
    communication=mirrored.CommunicationOptions(timeout_seconds=3),
)
with strategy.scope():
    model = nn.Sequential(nn.Linear(32, 256), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
inputs = torch.randn(1024, 32)
data = torch.utils.data.TensorDataset(torch.arange(1024), inputs, inputs.sum(1, keepdim=True))
train = strategy.distribute_dataset(data, global_batch_size=64, shuffle=True)
objects = {"model": model, "optimizer": optimizer, "train": train}
checkpoints = mirrored.CheckpointManager(
    strategy, folder / "run", objects, every_steps=20, memory_every_steps=int(sys.argv[4]) or None
)
log = open(folder / f"steps{strategy.topology.index}", "a")


def train_step(index, x, y):
    optimizer.zero_grad()
    strategy.backward(lambda x, y: (model(x) - y).square().mean(1), x, y)
    optimizer.step()


with checkpoints.resume():
    for _ in train.epochs(steps // 16):
        for batch in train:
            strategy.run(train_step, args=batch)
            print(json.dumps([checkpoints.steps + 1, time.monotonic(), batch[0].tolist()]), file=log, flush=True)
            checkpoints.step()
            time.sleep(pause)
if strategy.is_chief:
    numbers = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    (folder / "end").write_text(hashlib.sha256(numbers).hexdigest())
"""


class Cluster:
    """Two agents on two hosts, each of which is started again when it has ended but well.

    Args:
        folder: for what the job writes.
        words: of its command.
    """

    def __init__(self, folder: pathlib.Path, hosts: list[tuple[str, str]], words: list[str]) -> None:
        self.folder, self.hosts, self._words = folder, hosts, words
        self.agents = [self._start(worker) for worker in range(len(hosts))]
        self._since: dict[int, float] = {}  # when agents have ended

    def _start(self, worker: int) -> subprocess.Popen[bytes]:
        addresses = [f"{address}:29500" for _, address in self.hosts]
        task = {"type": "worker", "index": worker}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        name = self.hosts[worker][0]
        with (self.folder / f"output{worker}").open("a") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *self._words],
                env={**os.environ, "TF_CONFIG": config, "NCCL_HOSTID": name, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def look(self) -> bool:
        """Start agents again two seconds after they have failed; returns whether all have ended well."""
        for worker, agent in enumerate(self.agents):
            if agent.poll() and time.monotonic() - self._since.setdefault(worker, time.monotonic()) > 2:
                del self._since[worker]
                self.agents[worker] = self._start(worker)
        return all(agent.poll() == 0 for agent in self.agents)

    def towers(self) -> list[int]:
        """The ids of the towers' processes: the agents' children, but for the first one, which they are forked from."""
        found = []
        for agent in self.agents:
            with contextlib.suppress(OSError):
                children = pathlib.Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
                found += map(int, children[1:])  # in the order of their birth, which ids are not once they begin anew
        return found

    def kill(self) -> None:
        """End all agents, and with them their towers."""
        for agent in self.agents:
            agent.kill()
            agent.wait()


class Faults:
    """What can happen to a cluster.

    Args:
        chance: chooses when, what and to whom.
    """

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self._cluster, self._chance = cluster, chance
        self.done: list[tuple[float, str]] = []  # when, and what
        self._later: list[tuple[float, Callable[[], object]]] = []

    def cause_one(self) -> None:
        """Cause a fault, at once."""
        name, cause = self._chance.choice(list(self._kinds().items()))
        if cause():
            self.done.append((time.monotonic(), name))

    def look(self) -> None:
        """Undo what is over."""
        for entry in [entry for entry in self._later if entry[0] < time.monotonic()]:
            self._later.remove(entry)
            entry[1]()

    def _kinds(self) -> dict[str, Callable[[], bool]]:
        return {
            "a tower is killed": lambda: self._signal_tower(signal.SIGKILL),
            "an agent is killed": self._kill_agent,
            "a tower is stopped": self._stop_tower,
            "the cable is cut": self._cut_cable,
        }

    def _signal_tower(self, number: int) -> bool:
        towers = self._cluster.towers()
        if towers:
            os.kill(self._chance.choice(towers), number)
        return bool(towers)

    def _kill_agent(self) -> bool:
        self._chance.choice(self._cluster.agents).kill()
        return True

    def _stop_tower(self) -> bool:
        towers = self._cluster.towers()
        if towers:
            tower = self._chance.choice(towers)
            os.kill(tower, signal.SIGSTOP)
            self._undo_in(20, lambda: _continue(tower))
        return bool(towers)

    def _cut_cable(self) -> bool:
        name = self._chance.choice(self._cluster.hosts)[0]
        subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True)
        self._undo_in(8, lambda: subprocess.run(["ip", "-n", name, "link", "set", "eth0", "up"], check=True))
        return True

    def _undo_in(self, most: float, undo: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + self._chance.uniform(0.5, most), undo))


def _continue(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGCONT)


def _steps(folder: pathlib.Path) -> Iterator[tuple[int, int, float, list[int]]]:
    """(tower, step, when, its examples) of each step, of some more than once; no half lines of killed towers."""
    for tower in range(4):
        for line in (folder / f"steps{tower}").read_text().splitlines():
            with contextlib.suppress(ValueError):
                step, when, examples = json.loads(line)
                yield tower, step, when, examples


def _examples(folder: pathlib.Path) -> dict[tuple[int, int], list[list[int]]]:
    """The examples of each step of each tower, all that there were."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    for tower, step, _, examples in _steps(folder):
        known = found.setdefault((step, tower), [])
        if examples not in known:
            known.append(examples)
    return found


def _run(folder: pathlib.Path, hosts: list[tuple[str, str]], options: argparse.Namespace, disturbed: bool) -> Faults:
    """Run the job to its end."""
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    pause = options.pause if disturbed else 0.0
    words = [str(folder / "train.py"), str(folder), str(options.steps), str(pause), str(options.memory)]
    cluster = Cluster(folder, hosts, words)
    faults = Faults(cluster, random.Random(options.seed))
    chance = random.Random(options.seed + 1)
    try:
        steps, wait, end = folder / "steps0", math.inf, time.monotonic() + 60 * options.minutes
        while not cluster.look():
            faults.look()
            if wait == math.inf and steps.exists() and steps.stat().st_size:
                wait, end = time.monotonic() + 5, time.monotonic() + 60 * options.minutes
            if disturbed and wait < time.monotonic() < end:
                faults.cause_one()
                wait = time.monotonic() + chance.expovariate(1 / options.every)
            if time.monotonic() > end + 600:
                sys.exit(f"scripts/soak: the job has not ended 10 minutes after the last fault; see {folder}")
            time.sleep(0.1)
    finally:
        cluster.kill()
    return faults


def _recoveries(folder: pathlib.Path, faults: Faults) -> dict[str, list[float]]:
    """Seconds from each fault to the end of the longest time without a step that was not made before, by kind of fault.

    A killed agent's towers go on for a moment, so what counts begins within some seconds, and before the next fault. A
    fault after the last step cost none.
    """
    news: list[float] = []
    latest = 0
    for when, step in sorted((when, step) for tower, step, when, _ in _steps(folder) if tower == 0):
        if step > latest:
            news.append(when)
            latest = step
    found: dict[str, list[float]] = {}
    ends = [at for at, _ in faults.done[1:]] + [math.inf]
    for (at, name), end in zip(faults.done, ends, strict=True):
        gaps = [(after - before, after) for before, after in itertools.pairwise(news)]
        own = [(gap, after) for gap, after in gaps if after > at and after - gap < min(end, at + _TAKES_EFFECT)]
        if own:
            found.setdefault(name, []).append(max(own)[1] - at)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="for how long there are faults")
    parser.add_argument("--every", type=float, default=15.0, help="seconds from one fault to the next, on average")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that a step waits")
    parser.add_argument("--memory", type=int, default=0, help="steps between snapshots in memory; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=pathlib.Path, help="keep what the jobs write there, in place of a temporary one"
    )
    options = parser.parse_args()
    options.steps = 16 * max(1, round(60 * options.minutes * 0.6 / options.pause / 16))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or pathlib.Path(temporary)
        folder.mkdir(exist_ok=True)
        try:
            with cable.hosts(2, None, 0.0) as hosts:
                _run(folder / "undisturbed", hosts, options, disturbed=False)
                started = time.monotonic()
                faults = _run(folder / "disturbed", hosts, options, disturbed=True)
                seconds = time.monotonic() - started
        except cable.CannotPlayError as error:
            sys.exit(f"scripts/soak: {error}")
        return _report(folder, faults, seconds, options)


def _report(folder: pathlib.Path, faults: Faults, seconds: float, options: argparse.Namespace) -> int:
    """Print what came of it; returns the exit code."""
    ends = [(folder / kind / "end").read_text() for kind in ("undisturbed", "disturbed")]
    same_examples = _examples(folder / "undisturbed") == _examples(folder / "disturbed")
    recoveries = _recoveries(folder / "disturbed", faults)
    everything = [each for kind in recoveries.values() for each in kind]
    print(f"{options.steps} steps in {seconds:.0f} s, seed {options.seed}; from a fault to the next new step:")
    for kind, each in [*sorted(recoveries.items()), ("all", everything)]:
        print(f"  {kind:<20}{len(each):>4} times: median {statistics.median(each):.1f} s, worst {max(each):.1f} s")
    whens = sorted(when for tower, _, when, _ in _steps(folder / "disturbed") if tower == 0)
    step = statistics.median(after - before for before, after in itertools.pairwise(whens))
    print(f"  {1 - options.steps * step / seconds:.0%} of the time was lost")
    print(f"  parameters: {'the same bits' if ends[0] == ends[1] else f'other ones: {ends}'}")
    print(f"  examples of each step: {'the same' if same_examples else 'other ones'}")
    return int(ends[0] != ends[1] or not same_examples)


if __name__ == "__main__":
    sys.exit(main())
