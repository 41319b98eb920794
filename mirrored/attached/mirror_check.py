"""Checks that parameters are equal on all towers (rule R1), at intervals, and a last time when the towers end.

[Note: runs are counted] Runs are counted, not optimizer steps, so that all towers reach a check together, even if one
of them has stepped alone. Fingerprints cover all bits: words are summed by columns and rows (with a prime number of
columns), with plain integer additions on any device, and only these sums are mixed. Between GPUs, the stream computes
the fingerprints, gathers them and copies them to the host. All towers read them in the same later run, at most 10 runs
later. Only objects that all towers have are compared, because garbage is collected at different times. Settings of
optimizers are also compared, so a learning rate that only one tower has lowered is reported as such. Parameters that no
optimizer steps are compared, too: a frozen layer that was replaced outside the scope computes another function on every
tower.

``docs/project/benchmarks.md`` contains the cost (``scripts/bench mirror``).

[Note: no tower waits at the end] A collective at exit would hang if one tower ended in another way. Instead, a tower
stores fingerprints of its parameters in the towers' store when its interpreter ends, and the last tower compares them.
``mirrored.launch`` runs functions. A model exists after its function's end until garbage is collected, or not at all,
so nothing is compared there.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from towers.collectives.communicator import Communicator
from towers.errors import DisagreementError, MirrorError
from towers.gradients.flags import ADVICE
from towers.health import failure
from towers.health.status import Health
from towers.joining.store import LARGEST, Message
from towers.mirroring import (
    Comparison,
    Difference,
    Held,
    describe,
    differences,
    groups_of,
    start_comparison,
    who_differs,
)
from towers.system.messages import digest_of, get_logger, name_towers
from towers.system.profiling import range_
from towers.system.tensors import HostCopy, Named, extremes, is_dtensor, what_is_not_finite
from towers.topology import STARTED_BY

_LAST_MESSAGE = "held"

log = get_logger("mirrored")

_EARLY = (2, 10, 100)  # the runs that reveal scripts that are wrong from the start
_READ_AFTER = 10  # runs, after which a GPU has finished its earlier work

_PARAMETER, _STRANGE, _STATE, _SETTING = "parameter", "parameter that is not mirrored", "optimizer state", "setting"
_BUFFER, _STEPS = "buffer", "number of steps"


_SEVERAL = {
    _PARAMETER: "parameters",
    _STRANGE: "parameters that are not mirrored",
    _STATE: "optimizer states",
    _SETTING: "settings",
    _STEPS: "numbers of steps",
}

_LOOK_FOR = (
    "Look for an operation that one tower runs alone or differently: optimizer.step(), an average of parameters "
    "(EMA), a scheduler or a loaded state under `if strategy.is_chief:`; a scheduler or an optimizer "
    "(ReduceLROnPlateau, LBFGS) that received this tower's loss instead of the reduced one; gradients that no "
    "backward() has averaged; parameters or averaged gradients changed with this tower's random numbers or "
    "data; a forward that changes parameters by the examples of its share (Embedding(max_norm=…), initialization that "
    "depends on data); a faulty GPU or memory. Create state that one tower alone keeps outside the scope."
)

_PUT_IN_LATER = (
    "It was added to a mirrored model after the first run, and every tower has created its own: call "
    "strategy.mirror(module) on all towers for new modules."
)


class MirrorCheck:
    """Compares parameters, optimizer state and optimizer settings between the towers.

    Args:
        comm: collectives over the towers.
        interval: runs between complete comparisons; None checks only on request.
        unmirrored: returns parameters of mirrored modules that are not mirrored, because a script added them later.
        buffers: returns buffers that a script may expect to be equal. A difference is a warning.
        parts: returns fingerprints of this host's parts of sharded parameters, if hosts replicate them. All towers call
            it together.
        with_state: whether optimizer state must be equal on all towers.
        apart: returns whether towers may have different parameters now. Then only settings are compared.
        barrier: is called before each check, with its purpose. It is necessary if towers that step alone wait outside
            ``comm``.

    Attributes:
        due: the number of the next run in which the check has work; 0 for none.
    """

    def __init__(
        self,
        comm: Communicator,
        interval: int | None,
        unmirrored: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        buffers: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
        parts: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
        with_state: bool = True,
        apart: Callable[[], bool] = lambda: False,
        barrier: Callable[[str], None] | None = None,
    ) -> None:
        self._comm = comm
        self._unmirrored = unmirrored
        self._buffers = buffers
        self._parts = parts
        self._barrier = barrier
        self._every = interval
        self._with_state = with_state
        self._apart = apart
        self._parameters: list[tuple[str, weakref.ref[Tensor]]] = []
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._class_names: Counter[str] = Counter()
        self._under_way: _Check | None = None
        self._last_equal = ""  # the time of the last check without a difference
        self._warned: set[str] = set()
        self._read_later = comm.device.type != "cpu"
        self._runs = 0
        self.due = self._next(0)

    def add(self, parameters: Sequence[Named]) -> None:
        """Adds parameters that are mirrored from now on."""
        self._parameters += [(named.name, weakref.ref(named.tensor)) for named in parameters]

    def notice(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer of mirrored or sharded parameters, and adds the optimizer before its first."""
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if optimizer not in self._optimizers:
            name = type(optimizer).__name__
            number = self._class_names[name]
            self._class_names[name] += 1
            self._optimizers[optimizer] = f"{name}[{number}]" if number else name
            log.debug("%s steps for the first time", self._optimizers[optimizer])

    # -- when --------------------------------------------------------------------------------------------

    def _next(self, run: int) -> int:
        """Returns the run of the first check after ``run``."""
        if self._every is None:
            return 0
        regular = (run // self._every + 1) * self._every
        return min([regular, *(early for early in _EARLY if early > run)])

    def begin_run(self) -> None:
        """Starts and reads the checks that are due at the start of a run.

        Raises:
            MirrorError, DisagreementError: see :meth:`come_to`.
        """
        self._runs += 1
        if self._runs == self.due:
            with range_("mirrored::mirror-check"):
                self.come_to(self._runs)

    def come_to(self, run: int) -> None:
        """Starts and reads the checks that are due at the start of ``run``.

        Raises:
            MirrorError: on all towers, with one message: the towers differ.
            DisagreementError: on all towers: some are not at this run.
        """
        earlier, self._under_way = self._under_way, None
        self.due = self._next(run)
        if earlier is not None:
            self._judge(earlier)
        if self._next(run - 1) == run:
            check = self._start(f"run() number {run}", f"at the start of run {run}")
            if self._read_later:
                self._under_way = check
                self.due = min(self.due, run + _READ_AFTER)
            else:
                self._judge(check)

    def check(self, call: str) -> None:
        """Checks all objects at once.

        Args:
            call: describes the operation in progress in messages.

        Raises:
            MirrorError, DisagreementError: on all towers, with one message.
        """
        when = f"after the start of run {self._runs}" if self._runs else "before the first run"
        with range_("mirrored::mirror-check"):
            self._judge(self._start(call, when))

    # -- what --------------------------------------------------------------------------------------------

    def held(self) -> list[Held]:
        """Returns all objects that must be equal on all towers."""
        optimizers = list(self._optimizers.items())
        living = self._living()
        held = [setting for optimizer, label in optimizers for setting in _settings(optimizer, label)]
        # No two towers have the same part of a sharded parameter, so the steps are compared instead.
        held += [Held(f"of {label}", _STEPS, self._steps[one]) for one, label in optimizers if _is_sharded(one)]
        if self._apart():
            return held
        held += [Held(name, _PARAMETER, p.detach()) for name, p in living]
        held += [Held(name, _STRANGE, p.detach()) for name, p in self._unmirrored() if _has_bits(p)]
        if self._with_state:
            names = {id(p): name for name, p in living}
            held += [state for optimizer, label in optimizers for state in _states(optimizer, label, names)]
        return held

    def _living(self) -> list[tuple[str, Tensor]]:
        self._parameters = [(name, reference) for name, reference in self._parameters if reference() is not None]
        return [(name, p) for name, reference in self._parameters if _has_bits(p := reference())]

    def _start(self, call: str, when: str) -> _Check:
        held = self.held()
        if not self._apart() and _BUFFER not in self._warned:
            held += [Held(name, _BUFFER, buffer.detach()) for name, buffer in self._buffers() if _has_bits(buffer)]
        if self._barrier is not None:
            self._barrier(f"reaches {call}")
        if not self._apart():
            held += [Held(name, _PARAMETER, fingerprint) for name, fingerprint in self._parts()]
        log.debug("%s: comparing %d tensors and settings with the other towers", call, len(held))
        comparison = start_comparison(self._comm, call, held)
        stepped = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        trained = [(name, p.detach()) for name, p in self._living() if id(p) in stepped]
        highest = HostCopy(extremes([p for _, p in trained]))
        return _Check(when, comparison, [name for name, _ in trained], highest)

    def _judge(self, check: _Check) -> None:
        found = check.comparison.differences()
        self._warn_of_buffers([one for one in found if one.kinds[0] == _BUFFER])
        if differences := [one for one in found if one.kinds[0] != _BUFFER]:
            before = f"; the towers were equal {self._last_equal}" if self._last_equal else ""
            raise MirrorError(in_words(differences, f"This is how it was {check.when}{before}"))
        self._last_equal = check.when
        self._say_if_not_finite(check)

    def _warn_of_buffers(self, differences: Sequence[Difference]) -> None:
        """Logs once which buffers differ: each tower computes them from its own share, and tower 0's are saved."""
        if not differences or _BUFFER in self._warned:
            return
        self._warned.add(_BUFFER)
        if self._comm.index:
            return
        first, *others = differences
        more = f" and {len(others)} more are" if others else " is"
        log.warning(
            "buffer %s%s not the same on all towers: each tower computes it from its own share, so models differ, and "
            "a file of tower 0 contains only its own. To have one value, reduce the numbers from which it is computed "
            "(mirrored.get_replica_context().all_reduce), or use strategy.variable. If each tower is to have its "
            "own, register it with persistent=False, or ignore this warning",
            first.name,
            more,
        )

    def _say_if_not_finite(self, check: _Check) -> None:
        if "not finite" in self._warned:
            return
        not_finite = what_is_not_finite(check.names, check.highest.get())
        if not_finite:
            self._warned.add("not finite")
            if self._comm.index:  # it is equal on all towers, so tower 0 logs it
                return
            name, kind = next(iter(not_finite.items()))
            more = f", and {len(not_finite) - 1} more parameters are not finite" if len(not_finite) > 1 else ""
            log.warning(
                "parameter %s contains %s on all towers%s, found %s. "
                'MirroredStrategy(nonfinite_gradients="raise") names the tower and the gradient that cause it',
                name,
                kind,
                more,
                check.when,
            )


class _Check(NamedTuple):
    """A check that was started.

    Attributes:
        when: the time of the check, in words.
        names, highest: parameters that an optimizer steps, and their extremes.
    """

    when: str
    comparison: Comparison
    names: Sequence[str]
    highest: HostCopy


def in_words(differences: Sequence[Difference], when: str) -> str:
    """Returns the error message for towers that differ.

    Args:
        when: a sentence without its full stop.
    """
    first, *others = differences
    kind = first.kinds[0]
    values = ""
    if first.values is not None:
        by_towers = (f"{first.values[towers[0]]} on {name_towers(towers)}" for towers in first.groups)
        values = f" ({', '.join(by_towers)})"
    counts = Counter(other.kinds[0] for other in others)
    counted = ", ".join(f"{count} {_SEVERAL[kind] if count > 1 else kind}" for kind, count in counts.items())
    also = f" Also different: {counted}." if others else ""
    return (
        f"{kind} {first.name} is no longer the same on all towers: {who_differs(first.groups)}{values}.{also} "
        f"{when}. {(_PUT_IN_LATER if kind == _STRANGE else _LOOK_FOR)} Then restart from the last checkpoint"
    )


def _settings(optimizer: Optimizer, label: str) -> Iterator[Held]:
    """Yields the settings of an optimizer, which schedulers and scripts may have changed since it was created."""
    for number, group in enumerate(optimizer.param_groups):
        where = label if len(optimizer.param_groups) == 1 else f"group {number} of {label}"
        for name in optimizer.defaults:
            value = group.get(name)
            if isinstance(value, Tensor) or _is_plain(value):
                yield Held(f"{name} of {where}", _SETTING, value)


def _is_sharded(optimizer: Optimizer) -> bool:
    return any(is_dtensor(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _has_bits(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(entry) for entry in value)
    return isinstance(value, (int, float))


def _states(optimizer: Optimizer, label: str, names: dict[int, str]) -> Iterator[Held]:
    """Yields the tensors that an optimizer stores for mirrored parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                if _has_bits(value):
                    yield Held(f"{key} of {names[id(parameter)]} ({label})", _STATE, value.detach())


class LastCheck:
    """Compares the parameters and backwards of one strategy's towers when their programs end without an error.

    Args:
        check: the parameters to compare.
        backwards: returns a number that depends on all averaged backwards. Between GPUs, the last ones are not yet
            compared (:mod:`towers.gradients.flags`).
        health: this tower's position.
    """

    def __init__(self, check: MirrorCheck, backwards: Callable[[], int], health: Health) -> None:
        self._check = check
        self._backwards = backwards
        self._health = health
        self._pid = os.getpid()
        this = weakref.ref(self)

        def at_exit() -> None:
            if (living := this()) is not None:
                living._leave()

        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit)

    def _leave(self) -> None:
        """Stores this tower's fingerprints. The last tower compares all, and ends with an error if they differ."""
        heartbeat = self._health.heartbeat
        launched = os.environ.get(STARTED_BY) == "launch"
        if launched or os.getpid() != self._pid or heartbeat is None or getattr(sys, "last_value", None) is not None:
            return
        failure.flush_output()  # the last tower's error may end this process before its interpreter flushes
        values = self._check.held()
        messages = heartbeat.leave(_LAST_MESSAGE, {**_message(values), "backwards": self._backwards()})
        if messages is None:
            return
        error: Exception | None = None
        if differences := _differences(messages, values):
            error = MirrorError(
                in_words(differences, f"This is how it was when the towers ended, {self._health.status}")
            )
        elif len(backwards := groups_of([message["backwards"] for message in messages])) > 1:
            error = DisagreementError(
                f"gradients of different backwards were averaged in the last steps: {who_differs(backwards)}. {ADVICE}"
            )
        if error is not None:
            failure.leave_report(error, "")
            failure.leave(1)


def _message(values: Sequence[Held]) -> Message:
    description = describe(values)
    digest = digest_of(description)
    # For tens of thousands of tensors, the message is too large, and can only report whether all are equal.
    fits = len(json.dumps(description)) < LARGEST // 2
    return {"digest": digest, "names": digest_of(sorted(description)), "held": description if fits else None}


def _differences(messages: Sequence[Message], values: Sequence[Held]) -> list[Difference]:
    digests = [message["digest"] for message in messages]
    if len(set(digests)) == 1:
        return []
    if all(message["held"] is not None for message in messages):
        return differences([message["held"] for message in messages], values)
    if len({message["names"] for message in messages}) > 1:  # some towers have dropped parameters of others
        return []
    return [Difference("of a model (which of several models is unknown),", ["parameter"], groups_of(digests))]
