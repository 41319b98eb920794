"""How workers (machines) find each other: torchrun's rendezvous, with a deadline and names.

The chief worker serves a store at its own address of the cluster; everyone lays down what it believes the
cluster is, and all compare. The same store then serves the agents and the towers, so one address is enough.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from towers import handshake
from towers.job import Job

_STORE_TIMEOUT = timedelta(minutes=10)


class Rendezvous(RendezvousHandler):
    """Meets the workers that :class:`towers.job.Job` lists; one alone is met at once, on loopback."""

    def __init__(self, job: Job, host: str, port: int, run_id: str) -> None:
        self._job = job
        self._host = host
        self._port = port
        self._run_id = run_id
        self._round = 0
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "towers"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet all workers.

        Raises:
            StartupError: the address cannot be used, the chief does not answer, or workers are missing.
            HandshakeError: the workers' clusters differ, or two claim one index.
        """
        job = self._job
        deadline = time.monotonic() + job.startup_seconds
        chief = job.worker == 0
        if self._store is None:
            if chief:
                self._store = handshake.serve_store(self._host, self._port, _STORE_TIMEOUT, job.origin)
                self._port = self._store.port
            else:
                self._store = handshake.join_store(
                    self._host, self._port, _STORE_TIMEOUT, deadline, "the chief (worker 0)", job.origin
                )
        store = PrefixStore(f"round{self._round}", self._store)
        self._round += 1
        if job.workers > 1:
            handshake.meet(
                store,
                {"addresses": list(job.addresses), "origin": job.origin, "torch": torch.__version__},
                kind="worker",
                index=job.worker,
                names=job.addresses,
                deadline=deadline,
                origin=job.origin,
                compare=compare_clusters,
                serves=chief,
            )
        where = RendezvousStoreInfo(self._host, self._port)
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


def compare_clusters(index: int, card: handshake.Card, other: int, reference: handshake.Card) -> str | None:
    """What differs between two workers' descriptions of their cluster, or None."""
    if other > index:
        return compare_clusters(other, reference, index, card)
    here, there = card["addresses"], reference["addresses"]
    text = f"the workers were given different clusters (worker {index} by {card['origin']}): "
    if len(here) != len(there):
        return f"{text}worker {index} knows {len(here)} workers {here}, worker {other} knows {len(there)} {there}"
    for i, (a, b) in enumerate(zip(here, there, strict=True)):
        if a != b:
            return f"{text}the address of worker {i} is {a} for worker {index} and {b} for worker {other}"
    if card["torch"] != reference["torch"]:
        return (
            f"the workers run different versions of torch: {card['torch']} on worker {index} "
            f"({card['host']}), {reference['torch']} on worker {other} ({reference['host']})"
        )
    return None


def create_handler(job: Job, run_id: str) -> Rendezvous:
    """The handler of a job: its workers meet at the first one's address."""
    host, port = parse_rendezvous_endpoint(job.addresses[0] if job.addresses else "127.0.0.1:0", -1)
    return Rendezvous(job, host, port, run_id)
