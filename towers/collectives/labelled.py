"""All-gathers whose messages carry a label, so that a tower's call for another purpose is detected."""

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

_WORDS = 16  # words of a message's head: the count, a digest of the purpose, and its text
_TEXT_BYTES = 8 * (_WORDS - 2)
_DIGEST_BYTES = 6  # a whole number that float64 holds exactly
_MAX_HEADS = 4096  # kept for the next time

Check = Callable[[int], None]


class LabelledGather:
    """All-gathers of float64 numbers and a count, each with a purpose that must be the same on all towers.

    The purpose is part of the message, so it costs no collective. Messages are as long as the longest foreseen one,
    because backends abort, or worse, if lengths differ. On the CPU, a disagreement is raised at once. On a GPU, reading
    a head would make the host wait in every call. There, the counts become NaN, and the first call that finds the head
    on the host raises the error.

    Args:
        channel: a communicator for these calls only.
    """

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._heads: dict[tuple[str, torch.device], Tensor] = {}
        self._unread: deque[tuple[HostCopy, Check | None]] = deque()  # unread heads of messages from GPUs
        self._longest = 0

    def foresee(self, numbers: int) -> None:
        """Prepares for messages of up to ``numbers`` numbers. All towers do so before the next call."""
        self._longest = max(self._longest, numbers)

    def __call__(
        self, purpose: str, values: Tensor, count: int = 0, check: Check | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns every tower's count and values.

        Args:
            purpose: a description of this tower's call for users; the same on all towers.
            values: float64, flat, of one length on all towers.
            count: a number of objects of this tower, up to 2**53.
            check: is called with the sum of all counts, in this call or a later one, and may raise.

        Returns:
            Counts, float64 of shape ``(towers,)``, and values, of shape ``(towers, len(values))``, in tower order and
            on the device of ``values``.

        Raises:
            DisagreementError: on all towers, if purposes differ; on GPUs in a later call.
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
            # The end of a long name is more informative than its start.
            shown = torch.frombuffer(bytearray(text[-_TEXT_BYTES:].ljust(_TEXT_BYTES, b"\0")), dtype=torch.float64)
            numbers = torch.tensor([0, digest], dtype=torch.float64, device="cpu")
            head = on_device(torch.cat([numbers, shown]), device)
            if len(self._heads) >= _MAX_HEADS:  # copies of a model made in every step have new names every time
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
    # Texts that differ only at their start look the same here.
    tower, other = next(((i, text) for i, text in enumerate(purposes) if text != first), (1, first))
    return (
        f"the towers made different calls: tower 0 {first}, tower {tower} {other}; every tower must use the same "
        "layers in the same order, forward and backward, with an empty share too"
    )
