"""A c10d process group in Python: all of one that is not a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from towers.c10d.calls import Calls
from towers.c10d.mail import Mail
from towers.c10d.other_devices import of_any_device
from towers.c10d.tensors import one, plain
from towers.c10d.works import Done, Line, Receiving
from towers.collectives.agreement import announce
from towers.collectives.communicator import as_bytes
from towers.collectives.shared_memory.communicator import SharedMemoryCommunicator
from towers.errors import ArgumentError, CollectiveTimeoutError, DisagreementError, PeerLostError, TowersError


class Group(dist.ProcessGroup):
    """What ``torch.distributed`` calls, without collectives; users call ``torch.distributed``.

    A call without ``async_op`` runs in the caller. One with it runs in a thread of the group's, since the others may
    wait for what its caller does next: collectives of two groups in another order, or a message. Sends are never waited
    for (:mod:`towers.c10d.mail`); a message is received by whoever waits for it.

    After a rank was lost or waited for in vain, the group cannot be used any more, and every call says so.

    A Python class can stand for a whole process group, not for one of a group's backends, which c10d takes from C++
    only (seen with torch 2.13). For tensors on other devices than the CPU the group therefore has a second, plain group
    of the backends that were named beside ours, which ``elsewhere`` makes when the first such tensor comes.

    Args:
        ranks: global ranks of the members; for messages.
        elsewhere: makes the group for tensors on other devices.
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
        elsewhere: Callable[[Group], dist.ProcessGroup],
    ) -> None:
        super().__init__(comm.index, comm.size)  # type: ignore[call-arg]  # with a store it is no class of Python's
        self._backend_name = name
        self._comm: SharedMemoryCommunicator | None = comm
        self._called = Calls(comm)
        self._mail: Mail | None = Mail(comm, seconds)
        self._line = Line()
        self._ranks, self._store, self._seconds = list(ranks), store, seconds
        self._elsewhere = elsewhere
        self._beside: dist.ProcessGroup | None = None
        self._broken: str | None = None
        self._name, self._purpose = "", ""

    # -- collectives -------------------------------------------------------------------------------------

    def do(
        self,
        call: str,
        opts: Any,
        task: Callable[[SharedMemoryCommunicator], None],
        result: Sequence[Tensor] = (),
        alike: str = "",
        meets: bool = True,
    ) -> Done:
        """Run ``task``, now or in its turn.

        Args:
            alike: what else must be the same on all ranks. It is compared when the collective is over; with
                TORCH_DISTRIBUTED_DEBUG=DETAIL before it begins, too, so that nothing is overwritten.
            meets: whether the ranks meet in ``task``, which without anything to send they do not.
        """
        comm = self._comm
        if self._broken or comm is None:
            raise TowersError(f"{call}: {self._broken or 'the process group was destroyed'}")

        def run() -> None:
            if self._broken:
                raise TowersError(f"{call}: {self._broken}")
            calls = self._called
            calls.enter(f"{call} {alike}")
            agreed = False
            try:
                with torch.inference_mode():  # in which any tensor may be written
                    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
                        announce(comm, f"{call} {alike}")
                    agreed = True
                    if not meets:
                        comm.barrier()
                    task(comm)
                calls.compare()
            except (PeerLostError, CollectiveTimeoutError) as error:
                raise self._fatal(call, error) from None
            except Exception as error:
                raise (self._examined(call, error) if agreed else error) from None
            except BaseException:
                self._broken = f"{call} was interrupted"
                raise

        return (self._line.start if getattr(opts, "asyncOp", True) else self._line.run)(run, result)

    def _fatal(self, call: str, error: Exception) -> Exception:
        text = f"rank {self.rank()} of the group of ranks {self._ranks} in {call}: "
        if isinstance(error, CollectiveTimeoutError):
            text += f"Timed out after {self._seconds:.0f} s ({str(error).split('. ')[0]}); "
            text += f"last called: {self._called.last()}"
        else:
            text += str(error)
        self._broken = f"the group has failed before ({text})"
        return type(error)(text)

    def _examined(self, call: str, error: Exception) -> Exception:
        """What an error means: towers that do different things may each see another."""
        try:
            self._called.compare()
        except DisagreementError as reason:
            return self._fatal(call, reason)
        return error

    def root(self, call: str, opts: Any) -> int:
        """The rank in the group that ``opts`` (options, or a rank) names.

        Raises:
            ArgumentError: there is no such rank.
        """
        root = int(getattr(opts, "rootRank", opts))
        if not 0 <= root < self.size():
            raise ArgumentError(f"{call}: there is no rank {root} in a group of {self.size()}")
        return root

    def barrier(self, opts: Any = None) -> Done:
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            return cast(Done, self.beside().barrier(opts))
        return self.do("barrier", opts, lambda comm: comm.barrier())

    # -- messages ----------------------------------------------------------------------------------------

    @of_any_device
    def send(self, tensors: Any, rank: int, tag: int = 0) -> Done:
        tensor = one("send", tensors)
        self._mail_to("send", rank).send(as_bytes(plain(tensor)), rank, tag)
        return Done([tensor])

    @of_any_device
    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Done:
        return self._receive(self._mail_to("recv", rank), tensors, rank, tag)

    @of_any_device
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Done:
        return self._receive(self._mail_to("recv", None), tensors, None, tag)

    def _mail_to(self, call: str, rank: int | None) -> Mail:
        if self._mail is None:
            raise TowersError(f"{call}: the process group was destroyed")
        if rank is not None and (not 0 <= rank < self.size() or rank == self.rank()):
            raise ArgumentError(
                f"{call}: rank {self.rank()} of a group of {self.size()} has no messages with rank {rank}"
            )
        return self._mail

    def _receive(self, mail: Mail, tensors: Any, rank: int | None, tag: int) -> Done:
        tensor = one("recv", tensors)
        dense = (
            tensor.detach() if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        )

        def arrived() -> None:
            if dense.data_ptr() != tensor.data_ptr():
                with torch.inference_mode():
                    tensor.detach().copy_(dense)

        return Receiving(mail.expect(as_bytes(dense), rank, tag), [tensor], arrived)

    # -- what c10d asks a group --------------------------------------------------------------------------

    def beside(self) -> dist.ProcessGroup:
        """The group for tensors that are not on the CPU."""
        if self._beside is None:
            self._beside = self._elsewhere(self)
        return self._beside

    @property
    def store(self) -> dist.Store:
        """Whose keys are this group's."""
        return self._store

    @property
    def seconds(self) -> float:
        """How long a collective may take."""
        return self._seconds

    def get_group_store(self) -> dist.Store:
        return self._store

    def getBackendName(self) -> str:
        return self._backend_name

    def _get_backend_name(self) -> str:
        return self._backend_name

    def name(self) -> str:
        return self._backend_name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupDesc(self) -> str:
        return self._purpose

    def _set_group_desc(self, description: str) -> None:
        self._purpose = description

    @property
    def group_desc(self) -> str:
        return self._purpose

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *(self._beside._device_types if self._beside is not None else ())]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self.beside()._get_backend(device)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._called.number

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self.beside()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return Done() if device.type == "cpu" else self.beside()._end_coalescing(device)

    def shutdown(self) -> None:
        """Do what was started, and leave."""
        comm, mail = self._comm, self._mail
        if comm is None or mail is None:
            return
        self._line.close()
        self._comm = self._mail = None
        mail.close(0.0 if self._broken else None)
        comm.close()
        if self._beside is not None:
            self._beside.shutdown()

    def abort(self) -> None:
        """Leave without waiting for anybody."""
        self._broken = self._broken or "the process group was aborted"
        if self._beside is not None:
            self._beside.abort()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._backend_name}, rank {self.rank()} of {self.size()})"
