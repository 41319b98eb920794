"""How workers (machines) find each other: torchrun's rendezvous, with a deadline and names.

The chief worker serves a store at its own address of the cluster; everyone lays down what it believes the
cluster is, and all compare. The same store then serves the agents and the towers, so one address is enough.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from towers.errors import StartupError
from towers.joining import handshake
from towers.joining.messages import Card
from towers.launching.job import Job
from towers.system import machine, network

_STORE_TIMEOUT = timedelta(minutes=10)


class Rendezvous(RendezvousHandler):
    """Meets the workers that :class:`towers.launching.job.Job` lists; one alone is met at once, on loopback.

    Args:
        token: the job's, which workers and towers must have.
    """

    def __init__(self, job: Job, run_id: str, token: str) -> None:
        self._job = job
        self._host, self._port = network.split_address(job.addresses[0]) if job.addresses else ("127.0.0.1", 0)
        self._run_id = run_id
        self._token = token
        self._round = 0
        self._store: TCPStore | None = None
        self._doubt = ""

    def get_backend(self) -> str:
        return "towers"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet all workers.

        Raises:
            StartupError: the address cannot be used, the chief does not answer, or workers are missing.
            HandshakeError: the workers' clusters, versions or job tokens differ, or two claim one index.
        """
        job = self._job
        deadline = time.monotonic() + job.startup_seconds
        chief = job.worker == 0
        if self._store is None:
            if chief:
                others = [network.split_address(address)[0] for address in job.addresses[1:]]
                self._store = handshake.serve_store(
                    self._host, self._port, _STORE_TIMEOUT, job.origin, self._token, others
                )
                if job.addresses and not machine.is_led_to(self._host, self._port):
                    self._doubt = (
                        f"the address of worker 0, {job.addresses[0]} (from {job.origin}), does not lead to this "
                        "machine, which is worker 0"
                    )
                    print(f"towers: {self._doubt}: no other worker will find it there", file=sys.stderr, flush=True)
            else:
                self._store = handshake.join_store(
                    self._host,
                    self._port,
                    _STORE_TIMEOUT,
                    deadline,
                    "the chief (worker 0)",
                    job.origin,
                    self._token,
                    f"worker {job.worker}",
                )
        store = PrefixStore(f"round{self._round}", self._store)
        self._round += 1
        if job.workers > 1:
            try:
                handshake.meet(
                    store,
                    {"addresses": list(job.addresses), "origin": job.origin},
                    kind="worker",
                    index=job.worker,
                    names=job.addresses,
                    deadline=deadline,
                    origin=job.origin,
                    token=self._token,
                    compare=compare_clusters,
                    serves=chief,
                )
            except StartupError as error:
                raise StartupError(f"{error}; {self._doubt}") if self._doubt else error from None
        where = RendezvousStoreInfo(self._store.host, self._store.port)
        return RendezvousInfo(store, job.worker, job.workers, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close: the store ends with the chief's agent."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def compare_clusters(index: int, card: Card, other: int, reference: Card) -> str | None:
    """What differs between two workers' descriptions of their cluster, or None."""
    if other > index:
        return compare_clusters(other, reference, index, card)
    here, there = card["addresses"], reference["addresses"]
    text = f"the workers were given different clusters (worker {index} by {card['origin']}): "
    if len(here) != len(there):
        return f"{text}worker {index} knows {len(here)} workers {here}, worker {other} knows {len(there)} {there}"
    for i, (a, b) in enumerate(zip(here, there, strict=True)):
        if network.canonical(a) != network.canonical(b):
            return f"{text}the address of worker {i} is {a} for worker {index} and {b} for worker {other}"
    return None
