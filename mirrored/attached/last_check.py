"""The last checks, when the towers end: of their parameters (rule R1, docs/concepts/towers.md) and of their backwards.

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
from collections.abc import Callable, Sequence

from mirrored.attached.mirror_check import MirrorCheck, in_words
from towers.collectives.agreement import digest_of
from towers.errors import DisagreementError, MirrorError
from towers.gradients.flags import ADVICE
from towers.health import failure
from towers.health.status import Health
from towers.joining.store import LARGEST, Message
from towers.mirroring.equality import Difference, Held, describe, differences, groups_of, who_differs
from towers.topology import STARTED_BY

_WHAT = "held"


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
        messages = heartbeat.leave(_WHAT, {**_message(values), "backwards": self._backwards()})
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
