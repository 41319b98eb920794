"""The command ``mirrored``. Each subcommand imports what it needs, so that ``--help`` does not load torch."""

from __future__ import annotations

import argparse
import gc
import os
import pathlib
import shlex
import sys
from collections.abc import Sequence

import mirrored


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line ``mirrored …``, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="mirrored", description="Train one PyTorch model on many devices, with the losses of one."
    )
    parser.add_argument("--version", action="version", version=f"mirrored {mirrored.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        aliases=["evaluate"],
        help="run a script on several towers of this machine; evaluate: as the evaluator of its training",
        usage="mirrored run|evaluate [options] [-m] SCRIPT [ARGUMENT …]",
        description="Runs a script once per tower, as MirroredStrategy() does when it finds several GPUs; use it for "
        "CPU towers and to choose devices. 'mirrored evaluate' runs the script as the task 'evaluator' of a cluster, "
        "in parallel with its training, on one tower unless the options name more.",
    )
    run.add_argument(
        "--towers", type=int, help=("number of towers; default: one per device, or one per visible GPU, or one")
    )
    run.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cuda:2,cuda:3")
    run.add_argument("--restarts", type=int, default=0, help="how often all towers restart after a failure (default 0)")
    run.add_argument(
        "--min-towers", type=int, help="restart with so many at least where devices are lost; default: all"
    )
    run.add_argument("--from-the-start", action="store_true", help="restart even if no checkpoint is restored")
    run.add_argument("--log-dir", help="keep the output of the towers other than the first in files there")
    _add_script(run)
    _add_cluster(commands)
    _add_verify(commands)
    _add_trace(commands)
    _add_checkpoint(commands)
    _add_doctor(commands)
    _add_new(commands)
    parsed = parser.parse_args(arguments)
    if parsed.command == "verify":
        return _verify(parser, parsed)
    if parsed.command == "trace":
        return _trace(parser, parsed)
    if parsed.command == "doctor":
        return _doctor(parsed)
    if parsed.command == "checkpoint":
        return _inspect(parsed.path)
    if parsed.command == "new":
        return _new(parser, parsed.folder)
    return _simulate_cluster(parser, parsed) if parsed.command == "cluster" else _run(parser, parsed)


def _add_script(command: argparse.ArgumentParser, script: str = "the script, or with -m the module") -> None:
    command.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    command.add_argument("script", help=script)
    arguments = command.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="the script's own")
    arguments.required = False  # Python 3.11 would require it


def _arguments_of_script(parsed: argparse.Namespace) -> list[str]:
    """Returns the arguments after SCRIPT. If the command has options of the same names, a note is printed."""
    rest: list[str] = parsed.rest[parsed.rest[:1] == ["--"] :]  # argparse of some Python versions keeps it
    own = {f"--{name.replace('_', '-')}" for name in vars(parsed)} - {"--rest", "--script", "--command", "--module"}
    both = [word for word in rest if word.split("=")[0] in own]
    if both:
        print(
            f"mirrored: {', '.join(both)} after {parsed.script} is passed to the script; options of mirrored "
            f"{parsed.command} come before it",
            file=sys.stderr,
        )
    return rest


def _run(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    if parsed.command == "evaluate":
        os.environ["MIRRORED_TASK"] = "evaluator"
        parsed.towers = parsed.towers or (None if parsed.devices else 1)
        parsed.from_the_start = True  # it restores no checkpoint, but its table has the evaluations that are done
    try:
        names = _devices(parsed.towers, parsed.devices)
        if parsed.restarts or parsed.min_towers is not None:
            from towers.launching.restarting.policy import check_restarts

            check_restarts(parsed.restarts, parsed.min_towers, None, towers=len(names))
    except ValueError as error:
        parser.error(str(error))
    program = _program(parser, parsed)
    gc.disable()  # [Note: no garbage while loading] of towers/launching/starting/fork_server.py
    from towers.launching.job import Job
    from towers.launching.starting import agent

    kind, by = names[0].partition(":")[0], f"mirrored {parsed.command}"
    again = {name: getattr(parsed, name) for name in ("restarts", "min_towers", "from_the_start")}
    job = Job(towers=len(names), devices=tuple(names), kind=kind, started_by=by, log_dir=parsed.log_dir, **again)
    agent.run(job, program, sys.path[not getattr(sys.flags, "safe_path", False) :])


def _program(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> list[str]:
    if not parsed.module and not os.path.exists(parsed.script):
        parser.error(f"the file {parsed.script} does not exist")
    return [sys.executable, *(["-m"] if parsed.module else []), parsed.script, *parsed.rest]


def _add_cluster(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cluster = commands.add_parser(
        "cluster",
        help="simulate a TF_CONFIG cluster on this machine",
        usage="mirrored cluster [--workers N] [--ps N] [-m] SCRIPT [ARGUMENT …]",
        description="Starts a script once per worker, each with its own TF_CONFIG. With --ps, the cluster has a chief "
        "and this number of parameter servers, too. The terminal shows the first task's output unchanged, and the "
        "other tasks' lines with a prefix. GPUs are divided among the workers; if there are too few, each worker is "
        "one CPU tower. The exit code is the largest of all tasks.",
    )
    cluster.add_argument("--workers", type=int, default=2, help="how many (default 2)")
    cluster.add_argument("--ps", type=int, default=0, help="parameter servers, and a chief (default: neither)")
    _add_script(cluster, "the script; its strategy reads TF_CONFIG. With -m: the module")


def _simulate_cluster(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    if parsed.workers < 1:
        parser.error(f"--workers is {parsed.workers}, but must be at least 1")
    if parsed.ps < 0:
        parser.error(f"--ps is {parsed.ps}, but must be at least 0")
    from towers.launching.starting import simulate_cluster

    return simulate_cluster.simulate(_program(parser, parsed), parsed.workers, parsed.ps)


def _add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = commands.add_parser(
        "verify",
        help="does a script compute the same on several towers as on one, and if not, why",
        usage="mirrored verify [options] [-m] SCRIPT [ARGUMENT …]",
        description="Runs a script on one tower and on several, compares losses, gradients, parameters, buffers, data "
        "and reported values, and names the cause of the first difference. Exit code 0: they are the same; 1: they "
        "differ; 2: verify cannot tell, or wrong usage; 3: the script fails on one tower. Options come before SCRIPT. "
        "Arguments after SCRIPT are passed to the script.",
        allow_abbrev=False,
    )
    verify.add_argument("--towers", type=int, default=2, help="of the second run (default 2)")
    verify.add_argument("--steps", type=int, default=5, help="of each optimizer that are compared (default 5)")
    verify.add_argument("--exact", action="store_true", help="every bit counts (virtual towers)")
    verify.add_argument("--float64", action="store_true", help="compute in float64, in which rounding hides less")
    verify.add_argument("--tolerance", type=float, help="largest relative difference (default 1e-4 for float32)")
    verify.add_argument(
        "--devices", type=lambda text: text.split(","), help=("one per tower; default: GPUs, or CPUs if there are none")
    )
    verify.add_argument("--timeout", type=float, default=600.0, help="seconds for each run (default 600)")
    verify.add_argument("--show-output", action="store_true", help="show the script's output of each run")
    _add_script(verify)


def _add_checkpoint(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    checkpoint = commands.add_parser("checkpoint", help="look at checkpoints")
    actions = checkpoint.add_subparsers(dest="action", required=True)
    inspect = actions.add_parser(
        "inspect",
        help="show the contents of a checkpoint, and whether it is complete",
        description="Prints the contents of a checkpoint, after reading all of it and comparing its checksums. Exit "
        "code 1: it is damaged or incomplete.",
    )
    inspect.add_argument("path", help="a checkpoint's folder, or a folder of checkpoints, of which the newest is taken")


def _inspect(path: str) -> int:
    from mirrored.checkpoint.errors import CheckpointError
    from mirrored.checkpoint.reading import inspect

    try:
        print(inspect(path), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except CheckpointError as error:
        print(f"mirrored: {error}", file=sys.stderr)
        return 1
    return 0


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trace = commands.add_parser(
        "trace",
        help="one trace of all towers for Perfetto, and where each tower's time went",
        usage="mirrored trace [options] [-m] SCRIPT [ARGUMENT …]",
        description="Runs a script as 'python SCRIPT' does, traces some of its training steps on all towers, and ends "
        "it after them. All workers of a TF_CONFIG cluster, and all ranks of torchrun or srun, run the same command. "
        "Options come before SCRIPT. Arguments after SCRIPT are passed to the script.",
        allow_abbrev=False,
    )
    trace.add_argument("--steps", default="10:13", help="START:STOP, from 1; default 10:13, which are 10, 11 and 12")
    trace.add_argument("--output", default="trace.json", help="the file (default trace.json); .gz compresses it")
    trace.add_argument("--towers", type=int, help="start so many, as 'mirrored run' does; default: the script decides")
    trace.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cuda:2,cuda:3")
    _add_script(trace)


def _trace(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    """Traces a script. Without towers or devices, the script replaces this process."""
    parsed.rest = _arguments_of_script(parsed)
    start, _, stop = parsed.steps.partition(":")
    if not (start.isdecimal() and stop.isdecimal() and 1 < int(start) < int(stop)):
        parser.error(f"--steps is {parsed.steps}, but must be START:STOP with 1 < START < STOP, such as 10:13")
    output = pathlib.Path(parsed.output).absolute()
    folder = next(parent for parent in output.parents if parent.exists())  # those below it will be created
    if output.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        parser.error(f"--output is {parsed.output}, but no file can be written there")
    os.environ["MIRRORED_TRACE"] = f"{start}:{stop}:{os.path.abspath(parsed.output)}"
    if parsed.towers is None and parsed.devices is None:
        program = _program(parser, parsed)
        os.execv(program[0], program)
    vars(parsed).update(restarts=0, from_the_start=False, min_towers=None, log_dir=None)
    return _run(parser, parsed)


def _verify(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> int:
    from mirrored.verification import verify

    arguments = _arguments_of_script(parsed)
    options = {name: value for name, value in vars(parsed).items() if name not in ("command", "script", "rest")}
    try:
        report = verify(parsed.script, arguments, **options)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(report)
    return report.exit_code


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="find problems of this machine, and how to fix them",
        description="Looks at the versions, devices, limits, network and variables that towers depend on, and lets two "
        "towers work together. Run it where, and with the environment in which, the training is to run. Exit code 0: "
        "no problem; 1: at least one; 2: wrong usage.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _doctor(parsed: argparse.Namespace) -> int:
    from mirrored.doctor import examine

    report = examine(os.environ)
    print(report.as_json() if parsed.json else report)
    return report.exit_code


def _add_new(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    new = commands.add_parser(
        "new",
        help="create a project to start from",
        description="Makes a folder with a training script, a test of it on two CPU towers, and files for GitHub's CI, "
        "for Docker and for pip. The folder's name becomes the project's.",
    )
    new.add_argument("folder", metavar="FOLDER", help="the new project: one that is not there yet, or is empty")


def _new(parser: argparse.ArgumentParser, folder: str) -> int:
    from mirrored.starter import create

    try:
        names = create(folder)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{folder} has {', '.join(names)}. Next:\n")
    print(f"    cd {shlex.quote(folder)} && python -m pytest\n    mirrored run --towers 2 train.py")
    return 0


_MOST_PER_CORE = 16  # towers


def _devices(towers: int | None, requested: list[str] | None) -> list[str]:
    """Returns ``towers`` devices: the requested ones, or otherwise accelerators, or otherwise CPUs.

    Raises:
        ValueError: the arguments contradict each other, or there are too few accelerators.
    """
    from towers.system import devices, machine

    chosen = [str(device) for device in devices.for_worker(requested)]
    if towers is None or towers == len(chosen):
        return chosen
    if requested is not None:
        raise ValueError(f"--towers is {towers}, but --devices names {len(chosen)}")
    if towers < 1:
        raise ValueError(f"--towers is {towers}, but must be at least 1")
    kind = devices.accelerator_kind()
    if kind == "cpu" and towers > (most := _MOST_PER_CORE * machine.cores()):
        raise ValueError(f"--towers is {towers}, but this machine has {machine.cores()} cores: at most {most} towers")
    if kind != "cpu" and towers > len(chosen):
        cpus = ",".join(f"cpu:{i}" for i in range(towers))
        raise ValueError(
            f"--towers is {towers}, but this machine has {devices.seen(kind, len(chosen))}; for CPU towers pass "
            f"--devices {cpus}"
        )
    return [f"{kind}:{i}" for i in range(towers)]
