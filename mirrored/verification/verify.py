"""``mirrored.verify``: runs a script on one tower and on N, compares the traces, and explains the differences."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import inspect
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.machinery import PathFinder

import torch

from mirrored import seeds
from mirrored.interceptor import intercept
from mirrored.verification import draws, facts, files
from mirrored.verification.causes import Cause, Explanation, plural
from mirrored.verification.compare import compare
from mirrored.verification.explain import explain
from mirrored.verification.interventions import Interventions
from mirrored.verification.record import StepLimit, StopRecording, TraceRecorder
from mirrored.verification.report import VerificationReport, make_report
from mirrored.verification.trace import Raised, Trace, mentions_in
from towers import errors
from towers.health import failure
from towers.launching.starting.launch import launch, launch_from_new_process
from towers.system import devices as towers_devices
from towers.system import machine

_SEED = 0
_KEPT = "kept-files"


def verify(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    towers: int = 2,
    steps: int = 5,
    exact: bool = False,
    float64: bool = False,
    tolerance: float | None = None,
    devices: Sequence[str] | None = None,
    module: bool = False,
    timeout: float = 600.0,
    show_output: bool = False,
) -> VerificationReport:
    """Runs a training script, unchanged, on one tower and on several, and reports where and why the runs differ.

    It compares the losses, gradients, parameters and buffers of the first steps, the examples of each batch, and the
    optimizers' settings. It also compares the values that ``strategy.reduce`` and ``gather`` return, the numbers that
    the chief prints, writes into text files, TensorBoard or Weights & Biases, or saves in a dictionary, and the
    evaluation after these steps. A cause that the traces do not show is proved by another run with one change. Each run
    is a real one: the script writes its usual files. Only the checkpoints of a ``CheckpointManager`` are written to a
    temporary folder.

    The script runs from its start, with the same seed on tower 0 in both runs. The loop over a distributed dataset
    ends after the last of the ``steps``, which uses the epoch's last batch. The evaluation that follows runs
    completely, and the next step of an optimizer ends the script. If no evaluation ran, each further epoch ends
    after one step, which is not compared. Dropout is disabled, ``torch.compile`` runs eagerly, and ``devices`` in
    the script are ignored.

    Args:
        script: a file, or with ``module`` a module's name.
        args: its command line arguments.
        towers: the number of towers of the second run, at least 2.
        steps: the number of compared steps of each optimizer.
        exact: whether bits are compared (virtual towers).
        float64: whether all runs compute in float64. Otherwise, only those that decide about a difference that may be
            rounding do.
        tolerance: the largest relative difference that counts as equal. Default: 1e-4 for float32, 1e-8 for float64,
            1e-3 for half precision and autocast. Larger differences count only if they are well above the effect of
            rounding in another run on one tower. Settings of optimizers and integers must be equal.
        devices: one for each tower. Default: GPUs if there are enough, otherwise CPU towers.
        timeout: seconds for each run.
        show_output: whether to show the chief's output.

    Returns:
        A report. The command prints ``str(report)``.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: ``devices`` is a single name.
        FileNotFoundError: the script or module does not exist.
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
    kind = towers_devices.accelerator_kind()
    kind = kind if towers_devices.count_of(kind) >= towers else "cpu"
    chosen = towers_devices.for_worker([f"{kind}:{i}" for i in range(towers)] if devices is None else devices)
    if len(chosen) != towers:
        raise ValueError(f"towers is {towers}, but devices names {len(chosen)}")
    name = os.fspath(script)
    if not module and not os.path.isfile(name):
        raise FileNotFoundError(f"the file {name} does not exist")
    file, threads = _module_file(name) if module else name, machine.threads_per_tower(towers)
    job = ScriptJob(file, tuple(args), name if module else None, steps, chosen, threads, timeout, show_output)

    def rerun(count: int, interventions: Interventions) -> Sequence[Trace] | None:
        double = float64 or interventions.double
        changed = dataclasses.replace(interventions, double=double, shapes=shapes if count > 1 else None)
        try:
            traces = job.run(count, changed)
        except errors.TowerFailedError:
            return None
        harmless = interventions.recorded  # an exception after a loop that ended early
        failed = any(trace.raised is not None and not (trace.end.cut and harmless) for trace in traces)
        return None if failed else traces

    count, shapes = 1, None
    try:
        [one] = job.run(1, Interventions(double=float64))
        count, shapes = towers, draws.shapes_of(one)
        many = job.run(towers, Interventions(shapes=shapes, double=float64))
    except errors.TowerFailedError as error:
        nothing = compare(Trace(), [Trace()] * towers, tolerance, exact)
        return make_report(name, nothing, [_ended(count, error, timeout)])
    comparison, explanations = compare(one, many, tolerance, exact), list[Explanation]()
    if float64:
        comparison = dataclasses.replace(comparison, double=True)
    if not job.kept:
        comparison, explanations = explain(comparison, rerun)
    if job.kept:  # read in the first runs, or in another run
        failed = facts.failure(comparison)
        explanations = [files.not_comparable(job.kept), *([failed] if failed is not None else [])]
    return make_report(name, comparison, explanations)


def _module_file(name: str) -> str:
    """Returns the file of a module, without importing the packages that contain it.

    Raises:
        FileNotFoundError: there is no such module.
    """
    top, *inner = name.split(".")
    importlib.invalidate_caches()
    spec = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    for at in range(len(inner)):
        folders = spec.submodule_search_locations if spec is not None else None
        spec = PathFinder.find_spec(".".join([top, *inner[: at + 1]]), folders or ())
    if spec is None:
        raise FileNotFoundError(f"the module {name} does not exist")
    return spec.origin or ""


def _ended(towers: int, error: errors.TowerFailedError, timeout: float) -> Explanation:
    """Explains a run without a trace: a tower died, or the time was over."""
    if isinstance(error.__cause__, TimeoutError):
        problem = f"was not done after {timeout:g} s"
        advice = "make the script end by itself, or give each run more time (timeout)"
    else:
        problem = f"ended before its time: {str(error).splitlines()[-1]}"
        advice = (
            "start the script without verify to see why it ends; a program that calls mirrored.verify needs "
            "`if __name__ == '__main__':`"
        )
    cause = Cause.FAILS_ON_ONE if towers == 1 else Cause.FAILS_ON_TOWERS
    return Explanation(cause, f"the run on {plural(towers, 'tower')} {problem}", advice=advice)


@dataclasses.dataclass(frozen=True)
class ScriptJob:
    """A script and the settings of its runs.

    Attributes:
        script: its path.
        arguments: its command line arguments.
        module: its name if it is run like ``python -m``.
        steps: the number of recorded steps of each optimizer.
        devices: one for each tower of the larger run.
        threads: the number of threads of each tower in both runs, since another number sums in another order.
        timeout: seconds for each run.
        show: whether the script's output is shown.
        begins: the start of each run as Unix time in seconds, by the clock of files.
        kept: files that one run has left and a later run has read.
    """

    script: str
    arguments: tuple[str, ...]
    module: str | None
    steps: int
    devices: Sequence[towers_devices.Device]
    threads: int
    timeout: float
    show: bool
    begins: list[float] = dataclasses.field(default_factory=list)
    kept: list[str] = dataclasses.field(default_factory=list)

    def run(self, towers: int, interventions: Interventions | None = None) -> list[Trace]:
        """Runs the script on a number of towers, and returns the trace of each.

        Raises:
            TowerFailedError: a tower died, or the time was over.
        """
        with tempfile.TemporaryDirectory(prefix="mirrored-verify-") as folder:
            self.begins.append(os.stat(folder).st_mtime)
            arguments = (self, folder, interventions or Interventions())
            if interventions is None or interventions.hash_seed is None:
                traces = launch(_run, arguments, devices=self.devices[:towers], timeout=self.timeout)
            else:
                variables = {"PYTHONHASHSEED": str(interventions.hash_seed)}
                how = {"devices": self.devices[:towers], "timeout": self.timeout}
                traces = launch_from_new_process(variables, _run, arguments, **how)
            with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, _KEPT), encoding="utf-8") as notes:
                self.kept.extend(dict.fromkeys(notes.read().splitlines()))
            return traces


def _run(job: ScriptJob, folder: str, interventions: Interventions) -> Trace:
    """Runs the script in a tower's process, as ``__main__``."""
    if not job.show:
        _silence()
    os.environ.setdefault("OMP_NUM_THREADS", str(job.threads))
    seeds.seed_all(_SEED if interventions.one_seed else _SEED + int(os.environ["RANK"]))
    sys.argv = [job.script, *job.arguments]
    sys.path.insert(0, os.getcwd() if job.module else os.path.dirname(os.path.abspath(job.script)))
    torch.compiler.set_stance("force_eager")  # hooks run inside a compiled step
    if interventions.double:
        torch.set_default_dtype(torch.float64)
    gc.freeze()  # the recorder searches only the script's objects, not older ones
    recorder = (
        TraceRecorder(job.steps, folder, interventions) if interventions.recorded else StepLimit(job.steps, folder)
    )
    intercept(recorder)
    files.report_output(recorder.prints)
    recorder.trace.mentions = mentions_in(job.script)
    if interventions.one_seed:
        draws.note_lines_that_draw(job.script, recorder.trace)
    files.watch(os.path.join(folder, _KEPT), job.begins[0], job.begins[-1])
    try:
        with recorder.watching:
            if job.module:
                runpy.run_module(job.module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(job.script, run_name="__main__")
    except StopRecording:
        recorder.trace.end.by_verify = True
    except SystemExit as error:
        raised = _raised(error, job.script, recorder.refused)
        if error.code in (None, 0):
            recorder.trace.end.line = raised.line
        else:
            recorder.trace.raised = raised
    except Exception as error:
        recorder.trace.raised = _raised(error, job.script, recorder.refused)
    return recorder.trace


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)


def _raised(error: BaseException, script: str, refused: str | None) -> Raised:
    frames = traceback.extract_tb(error.__traceback__)
    modules = seeds, errors, torch
    packages = tuple(os.path.dirname(inspect.getfile(module)) + os.sep for module in modules)
    of_script = [frame for frame in frames if not frame.filename.startswith((*packages, "<frozen", runpy.__file__))]
    kind = type(error).__name__
    text = "".join(traceback.format_list(of_script or frames))
    line = of_script[-1].lineno if of_script and of_script[-1].filename == script else None
    return Raised(kind, str(error), f"{text}{kind}: {error}", line, failure.is_peer_lost(error), refused)
