"""All-gathers whose messages carry a label, so that a tower that calls for another purpose is found out."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator
from towers.errors import DisagreementError
from towers.system import cuda
from towers.system.host_copy import HostCopy, on_device

_WORDS = 16  # of a message's head: the count, a digest of the purpose, and its text
_TEXT_BYTES = 8 * (_WORDS - 2)
_DIGEST_BYTES = 6  # a whole number that float64 holds exactly
_MAX_HEADS = 4096  # kept for the next time

Check = Callable[[int], None]


class LabelledGather:
    """All-gathers of float64 numbers and a count, each with a purpose that has to be the same on all towers.

    The purpose is part of the message, so it costs no collective. Messages are as long as the longest that was
    foreseen: backends answer different lengths with an abort or worse. On the CPU a disagreement is raised at once.
    Reading a head from a GPU would make the host wait for it in every call; there the counts become NaN, and the error
    is raised by the first call that finds the head on the host.

    Args:
        channel: a communicator of its own.
    """

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._heads: dict[tuple[str, torch.device], Tensor] = {}
        self._unread: deque[tuple[HostCopy, Check | None]] = deque()  # heads of messages from GPUs
        self._longest = 0

    def foresee(self, numbers: int) -> None:
        """Prepare for messages of up to so many numbers; all towers do so before the next call."""
        self._longest = max(self._longest, numbers)

    def __call__(
        self, purpose: str, values: Tensor, count: int = 0, check: Check | None = None
    ) -> tuple[Tensor, Tensor]:
        """Every tower's count and values.

        Args:
            purpose: what this tower does, as a person would say it; the same on all towers.
            values: float64, flat, of one length on all towers.
            count: a number of things of this tower, up to 2**53.
            check: is called with the sum of all counts, sooner or later, and may raise.

        Returns:
            Counts, float64 of shape ``(towers,)``, and values, of shape ``(towers, len(values))``, in tower order and
            on the device of ``values``.

        Raises:
            DisagreementError: on all towers, when purposes differ; on GPUs by a later call.
        """
        capturing = cuda.is_capturing(values.device)
        while self._unread and not capturing and self._unread[0][0].has_come():
            heads, checked_by = self._unread.popleft()
            _read(heads.get(), checked_by)
        self.foresee(values.numel())
        filling = values.new_zeros(self._longest - values.numel())
        packet = torch.cat([self._head(purpose, values.device), values, filling])
        packet[:1].fill_(count)  # packet[0] = count would wait for a GPU
        rows = self._channel.all_gather(packet)
        counts = rows[:, 0]
        if rows.device.type == "cpu":
            _read(rows, check)
        else:
            counts = torch.where((rows[:, 1] == rows[0, 1]).all(), counts, torch.nan)
            if not capturing:  # a graph's heads could not be read between its runs
                self._unread.append((HostCopy(rows[:, :_WORDS]), check))
        return counts, rows[:, _WORDS : _WORDS + values.numel()]

    def _head(self, purpose: str, device: torch.device) -> Tensor:
        head = self._heads.get((purpose, device))
        if head is None:
            text = purpose.encode()
            digest = int.from_bytes(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(), "big")
            # Of a long name the end tells more than the beginning.
            shown = torch.frombuffer(bytearray(text[-_TEXT_BYTES:].ljust(_TEXT_BYTES, b"\0")), dtype=torch.float64)
            numbers = torch.tensor([0, digest], dtype=torch.float64, device="cpu")
            head = on_device(torch.cat([numbers, shown]), device)
            if len(self._heads) >= _MAX_HEADS:  # copies of a model made in every step have ever new names
                self._heads.clear()
            self._heads[purpose, device] = head
        return head


def _read(rows: Tensor, check: Check | None) -> None:
    counts, digests = zip(*rows[:, :2].tolist(), strict=True)
    if len(set(digests)) > 1:
        raise DisagreementError(_difference([_text(row) for row in rows]))
    if check is not None:
        check(int(sum(counts)))


def _text(row: Tensor) -> str:
    return row[2:_WORDS].view(torch.uint8).numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def _difference(purposes: Sequence[str]) -> str:
    first = purposes[0]
    # Texts of which only the beginnings differ look the same here.
    tower, other = next(((i, text) for i, text in enumerate(purposes) if text != first), (1, first))
    return (
        f"the towers made different calls: tower 0 {first}, tower {tower} {other}; every tower must use the same "
        "layers in the same order, forward and backward, with an empty share too"
    )
