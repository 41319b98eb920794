"""Runs a function on several towers, from a test or a notebook.

[Note: launched towers forget the fork server] A process from multiprocessing's fork server inherits the server's start
method. Worker processes of data loaders would each import torch, which takes 3.4 s per epoch instead of 0.06, and
datasets would have to be picklable. Therefore towers use the caller's start method. The objects that the server has
loaded are frozen: otherwise, each full garbage collection of a small job would search them for 0.15 s of a core.

[Note: launched towers end as programs do] Before Python 3.13, multiprocessing ends its processes without exit handlers.
A tower that ends during a collective that it has started breaks the connections of the others. Its exit handlers wait
for such collectives, so a tower runs them. It also flushes its files, which multiprocessing does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import multiprocessing
import os
import pathlib
import pickle
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from towers.errors import CannotStartError, TowerFailedError
from towers.health import failure
from towers.health.failure import EXIT_PREEMPTED, FailureReport
from towers.joining.store import serve_store
from towers.launching import console
from towers.launching.supervising.attempt import Attempt, unhandled
from towers.system import devices, machine
from towers.system.timeouts import Deadline, wait_until
from towers.system.torch_private import is_in_bad_fork
from towers.topology import DEVICES, JOB_TOKEN, MEMORY, STARTED_BY

DEFAULT_TIMEOUT = 3600.0
"""Seconds after which :func:`launch` gives up without a timeout of the caller's."""

_GRACE = 2.5  # seconds for the other towers to report why they failed, after the first failure
_STARTING = 60.0  # seconds for a new process to load torch and to end
_DONE, _EXITED = 0.5, 30.0  # seconds until processes of towers that are done have ended; until an exit code is known


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of one tower.

    Attributes:
        tower: its index.
        exception: the exception; None if the tower ended in another way or the exception cannot be pickled.
        traceback: the traceback as text, or a sentence on how the tower ended.
        consequence: whether it failed only because another tower had ended.
    """

    tower: int
    exception: BaseException | None
    traceback: str
    consequence: bool = False


def launch(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    towers: int | None = None,
    devices: Sequence[devices.Device] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Calls ``fn(*args, **kwargs)`` in N new processes, one per tower, and returns the results in tower order.

    Inside ``fn``, ``MirroredStrategy()`` finds the towers as under torchrun. A fork server that has loaded torch starts
    the processes: the first call takes seconds, later calls a few hundredths of a second.

    Args:
        fn: a picklable function (at module level; in a notebook with cloudpickle installed, also a function of a cell).
            A script that calls ``launch`` needs ``if __name__ == "__main__":``.
        args, kwargs: its arguments. Tensors are sent by value; each tower receives its own copy.
        towers: the number of towers. Default: the number of ``devices``, or 2.
        devices: one device per tower. Default: GPUs, or CPUs if there are none.
        timeout: seconds for the call, 3,600 by default; ``float("inf")`` for no limit.

    Returns:
        The results of ``fn``, one per tower. They must be picklable.

    Raises:
        TowerFailedError: a tower raised an exception, was killed or exceeded the timeout. The message ends with that
            tower's traceback, ``__cause__`` is its exception, and ``failures`` describes all towers. All towers have
            ended.
        SystemExit: this process received SIGTERM or SIGHUP and forwarded it, and the towers have saved and ended with
            exit code 75, which is also the exit code of this process. (Otherwise the signal ends this process.)
        ValueError: ``towers`` is not positive or does not match ``devices``.
        TypeError: ``fn`` or its arguments cannot be pickled.
        CannotStartError: called inside a tower.
    """
    names = _device_names(towers, devices)
    count = towers if towers is not None else len(names) or 2
    if "RANK" in os.environ:
        raise CannotStartError("launch was called inside a tower (RANK is set); towers cannot have towers")
    payload = _dump((fn, tuple(args), dict(kwargs or {})))
    limit = DEFAULT_TIMEOUT if timeout is None else timeout
    start_method = multiprocessing.get_start_method(allow_none=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["towers.launching.starting.preloaded"])
    token = secrets.token_hex()
    store = serve_store("127.0.0.1", 0, "launch", token)
    with console.Relay() as relay:
        attempt = _Towers(relay.directory)
        stop_forwarding = attempt.forward(unhandled(signal.SIGTERM, signal.SIGHUP))
        try:
            for tower in range(count):
                variables = _environment(tower, count, store.port, token, names) | attempt.file_variables(tower)
                attempt.start(tower, context, (variables, os.getcwd(), _streams(relay, tower), start_method, payload))
            deadline = Deadline(limit)
            attempt.wait(limit)
            failures = attempt.failures or attempt.unfinished(limit)
            first = min(failures, key=lambda failed: failed.consequence, default=None)
            status = attempt.status_of(first.tower) if first is not None else None
            if first is None:  # threads may still be working, as in any program
                wait_until(lambda: not attempt.living(), deadline.remaining())
        finally:
            if start_method is None:  # starting a process has set a start method
                multiprocessing.set_start_method(None, force=True)
            wait_until(lambda: not attempt.living(), _DONE)
            attempt.end()
            stop_forwarding()
    if attempt.forwarded is not None:
        if EXIT_PREEMPTED in attempt.endings.values():
            sys.exit(EXIT_PREEMPTED)
        os.kill(os.getpid(), attempt.forwarded)
    if first is not None:
        where = "" if status is None else f", {status}"
        text = f"tower {first.tower} of {count} failed{where}:\n{first.traceback.rstrip()}"
        raise TowerFailedError(text, first.tower, tuple(failures)) from first.exception
    return [attempt.results[tower] for tower in range(count)]


def launch_from_new_process(
    variables: Mapping[str, str], fn: Callable[..., Any], args: Sequence[Any], **options: Any
) -> list[Any]:
    """Calls :func:`launch` in a new process, and returns its results.

    Args:
        variables: environment variables that Python reads when it starts.
        fn, args, options: arguments of :func:`launch`.

    Raises:
        TowerFailedError: the process has ended without results, and has printed the reason; or it has exceeded the
            timeout of ``options`` by a minute.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_results, args=(sender, fn, args, options))
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        process.start()
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update(before)
    sender.close()
    limit = options.get("timeout") or DEFAULT_TIMEOUT
    try:
        if not receiver.poll(limit + _STARTING if math.isfinite(limit) else None):
            raise TowerFailedError(f"the process that starts the towers was not done after {limit:g} s", 0)
        results: list[Any] = receiver.recv()
        process.join(_EXITED)
    except EOFError:
        raise TowerFailedError("the process that starts the towers has ended", 0) from None
    finally:
        receiver.close()
        process.kill()
        process.join()
    return results


def _send_results(sender: Connection, fn: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> None:
    sender.send(launch(fn, args, **options))


class _Towers(Attempt):
    """Towers that the fork server has started. A tower has ended when it has replied or its pipe is closed.

    Attributes:
        results: the results of ``fn``, by tower.
        failures: the other towers' failures, in order of time.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        super().__init__(directory, grace=_GRACE)
        self.results: dict[int, Any] = {}
        self.failures: list[Failure] = []
        self._started: dict[int, ForkServerProcess] = {}
        self._pipes: dict[int, Connection] = {}

    def start(self, tower: int, context: ForkServerContext, arguments: tuple[Any, ...]) -> None:
        """Starts a tower, with the arguments of :func:`_be_tower` after its pipe."""
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_be_tower, args=(sender, *arguments), name=f"tower{tower}")
        with _importable_main():
            process.start()
        sender.close()
        self._started[tower], self._pipes[tower] = process, receiver
        self.processes[tower] = process.pid or 0

    def exit_code_of(self, tower: int) -> int | None:
        if not self._pipes[tower].poll():
            return None
        failed: Failure | None
        try:
            self.results[tower], failed = pickle.loads(self._pipes[tower].recv_bytes())
        except EOFError:  # the process is gone without a reply
            failed = self._death(tower)
        except Exception as error:
            failed = Failure(tower, error, f"the result of tower {tower} cannot be read here: {error}")
        if failed is None:
            return 0
        self.failures.append(failed)
        preempted = isinstance(failed.exception, SystemExit) and failed.exception.code == EXIT_PREEMPTED
        return EXIT_PREEMPTED if preempted else 1

    def _death(self, tower: int) -> Failure:
        process = self._started[tower]
        process.join(_EXITED)  # on a busy machine, its exit code is available only after seconds
        if (report := self.report_of(tower)) is not None:
            return Failure(tower, None, report.trace, report.consequence)
        code = process.exitcode
        how = f"by {failure.signal_name(-code)}" if code is not None and code < 0 else f"with exit code {code}"
        guard = "; a script needs `if __name__ == '__main__':` around mirrored.launch and mirrored.verify"
        hint = guard if code == 1 else ""
        return Failure(tower, None, f"the process of tower {tower} ended {how} before fn had returned{hint}")

    def living(self) -> list[int]:
        return [tower for tower, process in self._started.items() if process.is_alive()]

    def unfinished(self, seconds: float) -> list[Failure]:
        """Returns the failure of the first tower that has not replied in time."""
        missing = [tower for tower in self.processes if tower not in self.endings]
        towers = ", ".join(map(str, missing))
        text = f"it was not done after {seconds:.0f} s (not done: towers {towers}); see launch's timeout"
        return [Failure(tower, TimeoutError(text), text) for tower in missing[:1]]


def _device_names(towers: int | None, requested: Sequence[devices.Device] | None) -> list[str]:
    if towers is not None and (not isinstance(towers, int) or isinstance(towers, bool) or towers < 1):
        raise ValueError(f"towers must be a positive whole number, not {towers!r}")
    names = [str(device) for device in devices.parse_all(requested)] if requested is not None else []
    if names and towers is not None and towers != len(names):
        raise ValueError(f"towers is {towers}, but devices names {len(names)}: {', '.join(names)}")
    return names


def _environment(tower: int, count: int, port: int, token: str, names: Sequence[str]) -> dict[str, str]:
    """Returns the caller's environment with the variables that torchrun would set."""
    variables = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", MEMORY)}
    variables |= {
        "RANK": str(tower),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(tower),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        STARTED_BY: "launch",
        JOB_TOKEN: token,
        **machine.interface_variables(machine.loopback_interface(), os.environ),
    }
    if names:
        variables[DEVICES] = ",".join(names)
    return variables


def _streams(relay: console.Relay, tower: int) -> tuple[str, str]:
    """Returns the paths to which the tower's standard output and error are written."""
    if tower == 0:
        return relay.pipe("stdout", console.standard("stdout")), relay.pipe("stderr", console.standard("stderr"))
    return os.devnull, relay.prefixed("stderr", f"tower {tower}")


def _dump(call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> bytes:
    """Pickles the call by value (not with multiprocessing's pickler, which would share tensors' memory)."""
    fn = call[0]
    in_notebook = getattr(fn, "__module__", None) == "__main__" and not _main_is_a_file()
    try:
        if not in_notebook:
            return pickle.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"launch cannot send {fn!r} and its arguments to other processes: {error}; define the function at "
            "the top level of a module"
        ) from None
    try:
        import cloudpickle
    except ImportError:
        raise TypeError(
            f"{fn!r} was defined in a notebook cell, which other processes cannot import: install "
            "cloudpickle, or put the function into a .py file"
        ) from None
    return bytes(cloudpickle.dumps(call))


def _main_is_a_file() -> bool:
    """Returns whether other processes can import this program's definitions (not from a notebook or standard input)."""
    return os.path.exists(getattr(sys.modules["__main__"], "__file__", None) or "")


@contextlib.contextmanager
def _importable_main() -> Iterator[None]:
    """Keeps multiprocessing from importing a program that was read from standard input."""
    main = sys.modules["__main__"]
    file = None if _main_is_a_file() else vars(main).pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main.__file__ = file


def _be_tower(
    sender: Connection,
    variables: dict[str, str],
    directory: str,
    streams: tuple[str, str],
    start_method: str | None,
    payload: bytes,
) -> None:
    """Runs in the process of a tower."""
    failure.end_with_parent()
    failure.skip_inherited_finalizers()
    os.register_at_fork(after_in_child=sender.close)  # otherwise this tower's end is not detected while its child lives
    for number, path in enumerate(streams, start=1):
        target = os.open(path, os.O_WRONLY)
        os.dup2(target, number)
        os.close(target)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    multiprocessing.set_start_method(start_method, force=True)  # see [Note: launched towers forget the fork server]
    gc.freeze()
    failed = False
    try:
        _check_accelerators(variables.get(DEVICES, ""))
        fn, args, kwargs = pickle.loads(payload)
        reply = pickle.dumps((fn(*args, **kwargs), None))
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        reply = pickle.dumps((None, _describe(int(variables["RANK"]), error)))
        failed = isinstance(error, Exception)
    failure.flush_files()
    sender.send_bytes(reply)
    if failed:
        failure.end_soon()  # otherwise the others would not detect this tower's end while one of its threads continues
    else:
        failure.run_exit_handlers()  # see [Note: launched towers end as programs do]


def _check_accelerators(names: str) -> None:
    """Checks that this forked process can use GPUs, unless it is for CPUs only.

    Raises:
        CannotStartError: it cannot use GPUs.
    """
    kinds = {devices.parse(name).type for name in names.split(",")} if names else {devices.accelerator_kind()}
    if any(is_in_bad_fork(kind) for kind in kinds):
        raise CannotStartError(
            "the fork server that starts towers has used CUDA, so its children cannot: a module that it loaded "
            "beforehand (multiprocessing's set_forkserver_preload) uses GPUs when it is imported; remove that "
            "module, or pass devices=['cpu:0', …] to launch"
        )


def _describe(tower: int, error: BaseException) -> Failure:
    report = FailureReport.of(error)
    carried: BaseException | None = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # foreign exception classes may raise anything when they are copied
        carried = None
    return Failure(tower, carried, report.trace, report.consequence)
