"""Which public calls are allowed inside ``run`` and outside: docs/concepts/towers.md shows this table."""

from __future__ import annotations

import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any

import torch

import mirrored
from mirrored.evaluation import Evaluator
from mirrored.variables import Variable
from tests.support.jobs import ROOT, text_of, towers

CLASSES: dict[str, type] = {
    "strategy": mirrored.Strategy,
    "CheckpointManager": mirrored.CheckpointManager,
    "Monitor": mirrored.Monitor,
    "Variable": Variable,
    "DistributedDataset": mirrored.DistributedDataset,
    "Evaluator": Evaluator,
}

OUTSIDE: dict[str, Callable[..., Any]] = {
    "strategy.scope": lambda s, m, c: s.scope().__enter__(),
    "strategy.mirror": lambda s, m, c: s.mirror(torch.nn.Linear(1, 1)),
    "strategy.shard": lambda s, m, c: s.shard(torch.nn.Linear(1, 1)),
    "strategy.distribute_dataset": lambda s, m, c: s.distribute_dataset(torch.ones(4, 1), 2),
    "strategy.distribute_datasets_from_function": lambda s, m, c: s.distribute_datasets_from_function(lambda _: [1]),
    "strategy.check_mirrored": lambda s, m, c: s.check_mirrored(),
    "strategy.synchronize": lambda s, m, c: s.synchronize(),
    "strategy.trace": lambda s, m, c: s.trace("trace.json").__enter__(),
    "CheckpointManager.step": lambda s, m, c: c.step(),
    "CheckpointManager.save": lambda s, m, c: c.save(),
    "CheckpointManager.restore": lambda s, m, c: c.restore("best"),
    "CheckpointManager.restore_newest": lambda s, m, c: c.restore_newest(),
    "CheckpointManager.resume": lambda s, m, c: c.resume().__enter__(),
    "Monitor.step": lambda s, m, c: m.step(),
    "DistributedDataset.__iter__": lambda s, m, c: next(iter(s.known)),
    "Evaluator.run": lambda s, m, c: Evaluator(s, "run", {"model": torch.nn.Linear(1, 1)}, dict).run(),
}
"""Refused inside ``run``: they concern all towers and the whole training."""

INSIDE: dict[str, Callable[..., Any]] = {
    "strategy.backward": lambda s: s.backward(lambda x: x.sum(1), torch.ones(2, 1, requires_grad=True)),
    "compute_average_loss": lambda s: mirrored.compute_average_loss(torch.ones(2)),
    "scale_regularization_loss": lambda s: mirrored.scale_regularization_loss(torch.ones(())),
}
"""Refused outside ``run``: they belong to one global batch."""

BOTH = {
    *("strategy.variable", "strategy.run", "strategy.reduce", "strategy.gather", "strategy.barrier"),
    *("strategy.grad", "strategy.average_gradients", "strategy.no_sync", "strategy.state_dict"),
    *("strategy.load_state_dict", "Variable.value", "Variable.read_value", "Variable.assign", "Variable.assign_add"),
    *("Variable.assign_sub", "Variable.state_dict", "Variable.load_state_dict", "DistributedDataset.state_dict"),
    *("DistributedDataset.load_state_dict", "DistributedDataset.epochs", "CheckpointManager.wait", "Monitor.paused"),
    *("Monitor.close", "Monitor.stop", "Monitor.state_dict", "Monitor.load_state_dict", "Evaluator.evaluate_one"),
    *("Evaluator.of_chief", "strategy.summary_writer"),
}
"""Allowed in both places, on all towers."""

ALONE = {
    *("strategy.print", "strategy.say_once", "strategy.is_mirrored", "strategy.local_results"),
    "strategy.distribute_values_from_function",
}
"""Allowed in both places, even on one tower alone."""


def test_every_public_method_is_in_the_table() -> None:
    found = {
        f"{name}.{method}"
        for name, owner in CLASSES.items()
        for method, value in inspect.getmembers(owner, callable)
        if (method == "__iter__" and name == "DistributedDataset")
        or (not method.startswith(("_", "experimental_")) and not hasattr(torch.Tensor, method) * (owner is Variable))
    }
    known = {*OUTSIDE, *INSIDE, *BOTH, *ALONE}
    assert {call for call in known if "." in call} - found == set()
    assert found - known == set()


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/concepts/towers.md").read_text().partition("## Where calls are allowed")[2]
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+ \| [^|]+ \| [^|]+) \|$", page.partition("\n## ")[0], re.MULTILINE))
    for calls, allowed in ((OUTSIDE, "no | yes | no"), (INSIDE, "yes | no | no")):
        text = "".join(names for names, places in rows.items() if places == allowed)
        for call in calls:
            name = call.removeprefix("strategy.").removeprefix("DistributedDataset.").partition(".")[2] or call
            name = {"__iter__": "for batch in", "Evaluator.run": "Evaluator"}.get(call.partition(".")[2], name)
            assert name.removeprefix("strategy.") in text, (call, text)


def try_all(strategy: Any, folder: str) -> None:
    monitor = mirrored.Monitor(strategy, show=False)
    manager = mirrored.CheckpointManager(strategy, folder, {"model": torch.nn.Linear(1, 1)})
    strategy.known = strategy.distribute_dataset(torch.ones(4, 1), 2)

    def step() -> None:
        for name, call in OUTSIDE.items():
            words = text_of(RuntimeError, call, strategy, monitor, manager)
            assert "was called inside strategy.run(...): " in words, (name, words)
        for call in INSIDE.values():
            call(strategy)

    strategy.run(step)
    for name, call in INSIDE.items():
        assert "strategy.run(...)" in text_of(RuntimeError, call, strategy), name


def test_calls_are_refused_where_they_are_not_allowed(tmp_path: pathlib.Path) -> None:
    towers(try_all, str(tmp_path / "run"))
