"""The core does not load annexes. The walls are import-linter's."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from collections.abc import Iterator

import grimp
import pytest

from tests.support.jobs import ROOT
from tests.support.programs import run_program
from tests.verification.template import Script

ASSEMBLERS = {
    *("mirrored", "mirrored.cli", "mirrored.__main__", "towers"),  # what users call
    *("mirrored.strategy.base", "mirrored.strategy.engine", "mirrored.strategy.gradients"),
    "mirrored.strategy.records",
    *("mirrored.losses", "mirrored.data.examples"),  # what a tower without examples needs
    *("mirrored.cluster", "mirrored.data.distribute", "towers.collectives.connecting"),  # one of several kinds
    "mirrored.strategy.kinds",  # what starting again needs
    "towers.launching.starting.agent",  # what several workers and restarts need
    "towers.system.accelerator",  # what one kind of device needs
}
"""The modules of the core that may import annexes, when a script asks for them."""

DEFAULT_RUN = Script(
    strategy='mirrored.MirroredStrategy(devices=["cpu:0", "cpu:1"])',
    examples=7,
    data="(inputs, targets)",
    train="strategy.distribute_dataset(data, 3, shuffle=True)",
    epochs="1",
    run='strategy.reduce("sum", strategy.run(train_step, args=batch))',
    end="import sys\n\nstrategy.print(*sys.modules)",
)
"""What most scripts do, on two CPU towers."""

DEFAULT_AGENT = (
    "import sys; from towers.launching import job; from towers.launching.starting import agent; "
    "agent.leave = lambda _: print(*sys.modules); agent.run(job.Job(towers=2), [sys.executable, sys.argv[1]])"
)
"""The agent that such a script becomes, which lists its modules after those of the script."""


def modules(folders: tuple[str, ...] = ("mirrored", "towers")) -> Iterator[pathlib.Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@functools.cache
def core() -> frozenset[str]:
    """The core: the modules that two towers of a script with default options load, and their agent, until they end."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "script.py")
        script.write_text(DEFAULT_RUN.text())
        towers = run_program([str(script)], code=0)
        agent = run_program(["-c", DEFAULT_AGENT, str(script)], code=0)
    names = towers.stdout.split() + [name for name in agent.stdout.split() if name.partition(".")[0] == "towers"]
    return frozenset(names) & {name_of(path) for path in modules()}


def name_of(path: pathlib.Path) -> str:
    """A module's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.extended
def test_the_core_imports_annexes_in_its_assemblers_only() -> None:
    graph = grimp.build_graph("mirrored", "towers", cache_dir=None)
    assert len(graph.modules) == len(list(modules()))
    importers = {name for name in core() if graph.find_modules_directly_imported_by(name) - core()}
    assert importers <= ASSEMBLERS
    assert not core() & {"towers.launching.restarting.restarts", "towers.launching.supervising.failure_broadcast"}
    assert importers >= {"mirrored.strategy.engine", "towers.collectives.connecting"}
