"""``mirrored.verify``: is N towers the same as one?"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from importlib.machinery import PathFinder

import torch

from mirrored.verification.causes import Cause, Finding
from mirrored.verification.compare import Comparison
from mirrored.verification.explain import explain
from mirrored.verification.interventions import Repairs
from mirrored.verification.randomness import Shapes, shapes_of
from mirrored.verification.report import Report, make_report
from mirrored.verification.runs import Play, devices_for
from mirrored.verification.trace import Seen
from towers.errors import TowerFailedError
from towers.system import devices as towers_devices
from towers.system import machine


def verify(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    towers: int = 2,
    steps: int = 5,
    exact: bool = False,
    tolerance: float | None = None,
    devices: Sequence[str] | None = None,
    module: bool = False,
    timeout: float = 600.0,
    show_output: bool = False,
) -> Report:
    """Run a training script unchanged on one tower and on several, and say where and why they part.

    Losses, gradients, parameters and buffers of the first steps are compared, the examples of each batch, learning
    rates, the values that ``strategy.reduce`` and ``gather`` return, and the evaluation after these steps. A cause that
    cannot be seen directly is proved by a further run with one thing changed. Each run is a real one: what the script
    writes, it writes; checkpoints of a ``CheckpointManager`` go to a folder of our own.

    The script runs from its beginning; both runs start from one seed. The loop over a distributed dataset ends after
    the last of the ``steps``, which takes the epoch's last batch; the evaluation that follows runs in whole, and the
    next step of an optimizer ends the script. Where no evaluation has come, further epochs end after a step each that
    is not compared. Dropout is left out, ``torch.compile`` runs eagerly, and ``devices`` in the script count for
    nothing.

    Args:
        script: a file, or with ``module`` a module's name.
        args: its command line arguments.
        towers: how many the second run has, at least 2.
        steps: how many steps of each optimizer are compared.
        exact: every bit counts (virtual towers).
        tolerance: largest relative difference that counts as equal. Default: 1e-4 for float32, 1e-8 for float64,
            1e-3 for half precision and autocast. Larger ones count only where they are well above what rounding
            makes of a further run on one tower. Learning rates and integers must be equal.
        devices: one per tower; default GPUs where there are enough, else CPU towers.
        timeout: seconds for each run.
        show_output: whether the chief's output is shown.

    Returns:
        A report; ``str(report)`` is what the command prints.

    Raises:
        ValueError: an argument that cannot be.
        FileNotFoundError: there is no such script, or no such module.
        CannotStartError: called inside a tower.
    """
    if towers < 2:
        raise ValueError(f"towers is {towers}, but one tower is compared with at least 2")
    if steps < 1:
        raise ValueError(f"steps is {steps}, but must be at least 1")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}, but must not be negative")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}, but must be more than 0")
    chosen = devices_for(towers, devices)
    towers_devices.check_exist(towers_devices.parse_all(chosen), torch.cuda.device_count())
    if len(chosen) != towers:
        raise ValueError(f"towers is {towers}, but devices names {len(chosen)}")
    name = os.fspath(script)
    if module and not _has_module(name):
        raise FileNotFoundError(f"there is no module {name}")
    if not module and not os.path.isfile(name):
        raise FileNotFoundError(f"there is no file {name}")
    play = Play(name, tuple(args), module, steps, chosen, machine.threads_per_tower(towers), timeout, show_output)
    runs: list[list[Seen]] = []
    for count in (1, towers):
        try:
            runs.append(play.on(count, shapes=shapes_of(runs[0][0]) if runs else None))
        except TowerFailedError as error:
            return make_report(name, Comparison(Seen(), [Seen()] * towers, tolerance, exact), [_ended(count, error)])
    [one], many = runs

    shapes = shapes_of(one)

    def replay(repairs: Repairs) -> Sequence[Seen] | None:
        return _unless_it_fails(play, towers, repairs, shapes)

    def alone(unrest: bool, repairs: Repairs) -> Seen | None:
        found = _unless_it_fails(play, 1, repairs, unrest=unrest)
        return found[0] if found is not None else None

    def fails_unwatched(count: int) -> bool:
        return _unless_it_fails(play, count, watched=False) is None

    return make_report(name, *explain(Comparison(one, many, tolerance, exact), replay, alone, fails_unwatched))


def _has_module(name: str) -> bool:
    """Whether there is a module; finds out without importing the packages that it is in."""
    top, *inner = name.split(".")
    importlib.invalidate_caches()
    spec = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    for at in range(len(inner)):
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(".".join([top, *inner[: at + 1]]), spec.submodule_search_locations)
    return spec is not None


def _unless_it_fails(
    play: Play,
    towers: int,
    repairs: Repairs | None = None,
    shapes: Shapes | None = None,
    unrest: bool = False,
    watched: bool = True,
) -> list[Seen] | None:
    try:
        found = play.on(towers, repairs, shapes, unrest, watched)
    except TowerFailedError:
        return None
    return None if any(seen.raised is not None and (not seen.cut or not watched) for seen in found) else found


def _ended(towers: int, error: TowerFailedError) -> Finding:
    """A tower died, or the time was over: nothing was seen."""
    return Finding(
        Cause.FAILS_ON_ONE if towers == 1 else Cause.FAILS_ON_TOWERS,
        f"the run on {towers} tower{'s' if towers > 1 else ''} ended before its time: {str(error).splitlines()[-1]}",
        "see that the script ends by itself, or give it more time (timeout)",
    )
