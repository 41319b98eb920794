"""Runs a script on a number of towers and brings back what was seen on each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import inspect
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.export

from mirrored import seeds
from mirrored.observer import observe
from mirrored.verification.cut import Cutter, Enough
from mirrored.verification.interventions import Repairs
from mirrored.verification.randomness import Shapes
from mirrored.verification.record import Recorder
from mirrored.verification.trace import Raised, Seen
from towers import errors
from towers.health import failure
from towers.launching.launch import launch

_SEED = 0


@dataclasses.dataclass(frozen=True)
class Play:
    """A script and how it is run.

    Attributes:
        script: its path, or a module's name.
        arguments: its command line arguments.
        module: whether ``script`` names a module, as after ``python -m``.
        steps: how many steps of each optimizer are recorded.
        devices: one for each tower of the larger run.
        threads: of each tower, in both runs: another number adds up in another order.
        timeout: seconds for each run.
        show: whether the script's output is shown.
    """

    script: str
    arguments: tuple[str, ...]
    module: bool
    steps: int
    devices: tuple[str, ...]
    threads: int
    timeout: float
    show: bool

    def on(
        self,
        towers: int,
        repairs: Repairs | None = None,
        shapes: Shapes | None = None,
        unrest: bool = False,
        watched: bool = True,
    ) -> list[Seen]:
        """Run the script on so many towers; what each has seen.

        Args:
            repairs: what is changed in this run.
            shapes: of the random numbers that one tower has drawn.
            unrest: whether the results of modules are moved by rounding.
            watched: whether anything is recorded; else the script is only ended when it has made the steps.

        Raises:
            TowerFailedError: a tower died, or the time was over.
        """
        with tempfile.TemporaryDirectory(prefix="mirrored-verify-") as folder:
            arguments = (self, folder, repairs or Repairs(), shapes, unrest, watched)
            return launch(_play, arguments, devices=self.devices[:towers], timeout=self.timeout)


def _play(play: Play, folder: str, repairs: Repairs, shapes: Shapes | None, unrest: bool, watched: bool) -> Seen:
    """What each tower's process runs."""
    if not play.show:
        _silence()
    os.environ.setdefault("OMP_NUM_THREADS", str(play.threads))
    seeds.seed_all(_SEED)
    sys.argv = [play.script, *play.arguments]
    sys.path.insert(0, os.getcwd() if play.module else os.path.dirname(os.path.abspath(play.script)))
    torch.compiler.set_stance("force_eager")  # hooks see what a compiled step does
    gc.freeze()  # the recorder searches what the script makes, and nothing older
    recorder = Recorder(play.steps, folder, repairs, shapes, unrest) if watched else Cutter(play.steps, folder)
    observe(recorder)
    if isinstance(recorder, Recorder):
        _export_unwatched(recorder)
    recorder.seen.counted = _lines_with(play, "num_replicas_in_sync")
    try:
        with recorder.watcher if isinstance(recorder, Recorder) else contextlib.nullcontext():
            if play.module:
                runpy.run_module(play.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(play.script, run_name="__main__")
    except Enough:
        pass
    except SystemExit as error:
        if error.code not in (None, 0):
            recorder.seen.raised = _raised(error, play.script)
    except Exception as error:
        recorder.seen.raised = _raised(error, play.script)
    return recorder.seen


def _export_unwatched(recorder: Recorder) -> None:
    """Let ``torch.export.export``, by which ``torch.onnx`` goes, too, know nothing of the recorder."""
    export = torch.export.export

    @functools.wraps(export)
    def unwatched(*args: Any, **kwargs: Any) -> Any:
        with recorder.unwatched():
            return export(*args, **kwargs)

    torch.export.export = unwatched


def _lines_with(play: Play, text: str) -> list[int]:
    """The numbers of the script's lines that contain a text."""
    path: str | None = play.script
    if play.module:
        spec = importlib.util.find_spec(play.script)
        path = spec.origin if spec is not None else None
    with contextlib.suppress(OSError), open(path or "", encoding="utf-8", errors="replace") as file:
        return [number for number, line in enumerate(file, start=1) if text in line]
    return []


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)


def _raised(error: BaseException, script: str) -> Raised:
    frames = traceback.extract_tb(error.__traceback__)
    packages = tuple(
        os.path.dirname(path) + os.sep for path in (seeds.__file__, errors.__file__, inspect.getfile(torch))
    )
    own = [frame for frame in frames if not frame.filename.startswith((*packages, "<frozen", runpy.__file__))]
    kind = type(error).__name__
    text = "".join(traceback.format_list(own or frames))
    line = own[-1].lineno if own and own[-1].filename == script else None
    return Raised(kind, str(error), f"{text}{kind}: {error}", line, failure.is_peer_lost(error))


def devices_for(towers: int, requested: Sequence[str] | None) -> tuple[str, ...]:
    """The devices of a comparison: those named, else as many GPUs where there are enough, else CPU towers."""
    if requested is not None:
        return tuple(requested)
    kind = "cuda" if torch.cuda.device_count() >= towers else "cpu"
    return tuple(f"{kind}:{i}" for i in range(towers))
