"""Launchers that wait for towers and other workers as long as a test does.

Once a tower has failed or was preempted, a launcher waits some seconds for what the others have to say, and then says
how the job ended without it. In the tests that are marked ``seconds`` it does; in all others it waits for all of them,
so that what it says does not depend on how soon they come.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from tests.support.waiting import HANG, wait_until
from towers.launching.starting import launch

PATIENT_AGENTS = "TESTS_PATIENT_AGENTS"
"""Is set where towers of agents that tests fork may be forks; not empty: these agents are to wait."""


@contextlib.contextmanager
def patient_launch() -> Iterator[None]:
    """Inside, ``mirrored.launch`` waits until all towers have failed or returned: for jobs where all of them do."""
    with mock.patch.object(launch, "_GRACE", HANG):
        yield


def make_agent_patient() -> None:
    """In the process of an agent, before it starts any tower."""
    if not os.environ.get(PATIENT_AGENTS):
        return
    from towers.launching.supervising import attempt, failure_broadcast

    def await_failure(broadcast: failure_broadcast.FailureBroadcast) -> attempt.Failed | None:
        """What another worker has published, a failure or that its towers have ended well; None for the latter."""
        wait_until(lambda: broadcast._store is None or broadcast.received is not None or bool(broadcast.ends()))
        return broadcast.received

    attempt._TOGETHER = attempt._OTHERS_TOGETHER = HANG
    failure_broadcast._SECONDS = failure_broadcast._ANSWER_SECONDS = HANG
    failure_broadcast.FailureBroadcast._await_failure = await_failure  # type: ignore[method-assign]
