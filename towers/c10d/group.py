"""A c10d process group in Python: ordered calls, messages, and the properties that c10d reads.

[Note: a whole group in Python] c10d accepts a Python class for a whole process group. Since torch 2.14, it also accepts
backends within a group in Python. But it wraps their results in a holder that passes on ``wait`` and ``get_future``
only: ``is_completed()`` stays False forever, and ``recv`` from any source cannot report the source (torch 2.15). So
this class is a whole group on every version. A group can still combine it with NCCL. At the first tensor of another
device, it makes a second, plain group of the other named backends, and passes such calls to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from towers.c10d.mailbox import Mailbox
from towers.c10d.tensors import of_any_device, single
from towers.c10d.works import CompletedWork, WorkQueue
from towers.collectives.agreement import announce
from towers.collectives.communicator import as_bytes
from towers.collectives.shared_memory.communicator import SharedMemoryCommunicator
from towers.errors import ArgumentError, CollectiveTimeoutError, DisagreementError, PeerLostError, TowersError
from towers.system.torch_private import name_backend


class Group(dist.ProcessGroup):
    """The methods that ``torch.distributed`` calls, without collectives. Users call ``torch.distributed``.

    A call without ``async_op`` runs in the caller. A call with it runs in a thread of the group, because the other
    ranks may wait for the caller's next call: collectives of two groups in another order, or a message. Sends never
    block (:mod:`towers.c10d.mailbox`). A message is received in the thread that waits for it.

    After a rank was lost or a call timed out, the group cannot be used any more, and every call raises an error.

    Args:
        ranks: global ranks of the members, for error messages.
        seconds: the deadline of a collective.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(
        self,
        name: str,
        comm: SharedMemoryCommunicator,
        ranks: Sequence[int],
        store: dist.Store,
        seconds: float,
    ) -> None:
        super().__init__(comm.index, comm.size)  # type: ignore[call-arg]  # with a store, torch treats it as a C++ group
        self._backend_name = name
        self._comm: SharedMemoryCommunicator | None = comm
        self._tags = comm.regions.barrier.tags
        self._number = 0
        self._mailbox: Mailbox | None = Mailbox(comm, seconds)
        self._queue = WorkQueue()
        self._ranks, self._store, self._seconds = list(ranks), store, seconds
        self._other: dist.ProcessGroup | None = None
        self._broken: str | None = None
        self._name = ""
        name_backend(self, name)

    def do(
        self,
        call: str,
        opts: Any,
        task: Callable[[SharedMemoryCommunicator], None],
        result: Sequence[Tensor] = (),
        signature: str = "",
    ) -> CompletedWork:
        """Runs a collective, now or in the thread of the group.

        Args:
            call: its name.
            opts: c10d's options, which contain whether the call is asynchronous.
            task: the collective.
            result: the tensors that it writes.
            signature: arguments that must be the same on all ranks. They are compared after the collective. With
                TORCH_DISTRIBUTED_DEBUG=DETAIL, they are also compared before it starts, so that no tensor is
                overwritten.
        """
        comm = self._comm
        if self._broken or comm is None:
            raise TowersError(f"{call}: {self._broken or 'the process group was destroyed'}")

        def run() -> None:
            if self._broken:
                raise TowersError(f"{call}: {self._broken}")
            self._number += 1
            self._tags.write(self._number, f"{call} {signature}")
            agreed = False
            try:
                with torch.inference_mode():  # inside, any tensor may be written
                    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
                        announce(comm, f"{call} {signature}")
                    agreed = True
                    count = comm.regions.barrier.count
                    task(comm)
                    if comm.regions.barrier.count == count:  # without elements to send, no rank waits
                        comm.barrier()
                self._check_calls()
            except (PeerLostError, CollectiveTimeoutError) as error:
                raise self._fatal(call, error) from None
            except Exception as error:
                raise (self._explained(call, error) if agreed else error) from None
            except BaseException:
                self._broken = f"{call} was interrupted"
                raise

        return (self._queue.start if getattr(opts, "asyncOp", True) else self._queue.run)(run, result)

    def _fatal(self, call: str, error: Exception) -> Exception:
        text = f"rank {self.rank()} of the group of ranks {self._ranks} in {call}: "
        if isinstance(error, CollectiveTimeoutError):
            text += f"Timed out after {self._seconds:.0f} s ({str(error).split('. ')[0]}); "
            text += "last called: " + ", ".join(
                f"rank {rank} {last} (call {number})" if number else f"rank {rank} nothing"
                for rank, (number, last) in enumerate(self._tags.last())
            )
        else:
            text += str(error)
        self._broken = f"the group has failed before ({text})"
        return type(error)(text)

    def _explained(self, call: str, error: Exception) -> Exception:
        """Returns the cause of an error, because ranks that make different calls may see any error."""
        try:
            self._check_calls()
        except DisagreementError as reason:
            return self._fatal(call, reason)
        return error

    def _check_calls(self) -> None:
        """Checks that all ranks that are in this call have made the same call.

        Raises:
            DisagreementError: another rank has made a different call.
        """
        calls = self._tags.differing()
        for rank, other in enumerate(calls):
            if other not in (None, local := calls[self.rank()]):
                raise DisagreementError(
                    f"the ranks made different calls: rank {rank} {other}, rank {self.rank()} {local}; every rank "
                    "must make the same calls in the same order"
                )

    def root(self, call: str, opts: Any) -> int:
        """Returns the root rank in ``opts`` (options, or a rank), within the group.

        Raises:
            ArgumentError: there is no such rank.
        """
        root = int(getattr(opts, "rootRank", opts))
        if not 0 <= root < self.size():
            raise ArgumentError(f"{call}: a group of {self.size()} has no rank {root}")
        return root

    def barrier(self, opts: Any = None) -> CompletedWork:
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            return cast(CompletedWork, self.other_devices(device).barrier(opts))
        return self.do("barrier", opts, lambda comm: comm.barrier())

    @of_any_device
    def send(self, tensors: Any, rank: int, tag: int = 0) -> CompletedWork:
        tensor = single("send", tensors)
        self._mailbox_for("send", rank).send(as_bytes(tensor), rank, tag)
        return CompletedWork([tensor])

    @of_any_device
    def recv(self, tensors: Any, rank: int, tag: int = 0) -> CompletedWork:
        return self._mailbox_for("recv", rank).receive(single("recv", tensors), rank, tag)

    @of_any_device
    def recv_anysource(self, tensors: Any, tag: int = 0) -> CompletedWork:
        return self._mailbox_for("recv", None).receive(single("recv", tensors), None, tag)

    def _mailbox_for(self, call: str, rank: int | None) -> Mailbox:
        if self._mailbox is None:
            raise TowersError(f"{call}: the process group was destroyed")
        if rank is not None and (not 0 <= rank < self.size() or rank == self.rank()):
            raise ArgumentError(
                f"{call}: rank {self.rank()} of a group of {self.size()} cannot exchange messages with rank {rank}"
            )
        return self._mailbox

    def other_devices(self, device: torch.device) -> dist.ProcessGroup:
        """Returns the group of the other named backends, for tensors that are not on the CPU.

        All ranks of the group make the first call together; see [Note: a whole group in Python].

        Args:
            device: this rank's; bound to the group if it has an index.

        Raises:
            ArgumentError: there are no other backends.
        """
        if self._other is None:
            name = self._backend_name
            others = [entry for entry in dist.get_backend_config(self).split(",") if not entry.endswith(f":{name}")]
            if not others:
                raise ArgumentError(
                    f"the backend {name} takes tensors on the CPU; name a second backend for other tensors, as "
                    f"in init_process_group('cpu:{name},cuda:nccl')"
                )
            self._other = dist.new_group(
                dist.get_process_group_ranks(self),
                timedelta(seconds=self._seconds),
                ",".join(others),
                use_local_synchronization=True,  # only the ranks of the group call this
                device_id=device if device.index is not None else None,
            )
            # Otherwise, a rank that leaves at once would fail others that Gloo has not connected to it yet.
            self.do("barrier", None, lambda comm: comm.barrier()).wait()
        return self._other

    def get_group_store(self) -> dist.Store:
        return self._store

    # The C++ class calls these for its ``name()``, ``group_name``, …; it stores the description itself.

    def getBackendName(self) -> str:
        return self._backend_name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *(self._other._device_types if self._other is not None else ())]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self.other_devices(device)._get_backend(device)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._number

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self.other_devices(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return CompletedWork() if device.type == "cpu" else self.other_devices(device)._end_coalescing(device)

    def shutdown(self) -> None:
        """Completes all queued calls, and leaves."""
        comm, mailbox = self._comm, self._mailbox
        if comm is None or mailbox is None:
            return
        self._queue.close()
        self._comm = self._mailbox = None
        mailbox.close(0.0 if self._broken else None)
        comm.close()
        if self._other is not None:
            self._other.shutdown()

    def abort(self) -> None:
        """Leaves without waiting for other ranks."""
        self._broken = self._broken or "the process group was aborted"
        if self._other is not None:
            self._other.abort()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._backend_name}, rank {self.rank()} of {self.size()})"
