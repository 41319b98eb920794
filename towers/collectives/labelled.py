"""All-gathers whose messages carry a label, so that a tower's call for another purpose is detected."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator, as_bytes, from_bytes
from towers.errors import DisagreementError
from towers.system import accelerator
from towers.system.tensors import HostCopy, on_device

_WORDS = 16  # words of a message's head: the count, a digest of the purpose, the count as float32, and the text
_TEXT_AT = 3
_WORD = 8  # bytes
_DIGEST_BYTES = 6  # a whole number that float64 holds exactly
_MAX_HEADS = 4096  # kept for the next time
_NO_COUNT = 1e-20  # in place of 0: a sum of counts is not affected, and can be divided by

Check = Callable[[int], None]


class LabelledGather:
    """All-gathers of numbers and a count, each with a purpose that must be the same on all towers.

    The purpose is part of the message, so it costs no collective. Messages are as long as the longest foreseen one,
    because backends abort, or worse, if lengths differ. On the CPU, a disagreement is raised at once. On a GPU, reading
    a head would make the host wait in every call. There, the counts become NaN, and the first call that finds the head
    on the host raises the error.

    Args:
        channel: a communicator for these calls only.
    """

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._heads: dict[tuple[str, int, torch.device], Tensor] = {}
        self._filling: dict[torch.device, Tensor] = {}
        self._unread: deque[tuple[HostCopy, Check | None]] = deque()  # unread heads of messages from GPUs
        self._longest = 0

    def foresee(self, numbers: int) -> None:
        """Prepares for messages of up to ``numbers`` numbers of 8 bytes. All towers do so before the next call."""
        self._longest = max(self._longest, numbers * _WORD)

    def __call__(
        self, purpose: str, values: Tensor, count: int | None = None, check: Check | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns every tower's count and values.

        Args:
            purpose: a description of this tower's call for users; the same on all towers.
            values: float32 or float64, flat, of one length on all towers.
            count: a number of objects of this tower, up to 2**53 (as float32: rounded). None: no tower reads counts.
            check: is called with the sum of all counts, in this call or a later one, and may raise.

        Returns:
            Counts, of shape ``(towers,)``, and values, of shape ``(towers, len(values))``, in tower order, of the
            dtype and on the device of ``values``. A count of 0 is 1e-20.

        Raises:
            DisagreementError: on all towers, if purposes differ; on GPUs in a later call.
        """
        device = values.device
        capturing = accelerator.is_capturing(device)
        while self._unread and not capturing and self._unread[0][0].has_come():
            come, checked_by = self._unread.popleft()
            _read(come.get(), checked_by)
        self._longest = max(self._longest, -(-values.nbytes // _WORD) * _WORD)
        filling = self._zeros(self._longest - values.nbytes, device)
        rows = self._channel.all_gather(torch.cat([self._head(purpose, count or 0, device), as_bytes(values), filling]))
        heads = rows[:, : _WORDS * _WORD]
        words = heads.view(torch.float64)
        counts = words[:, 0] if values.dtype == torch.float64 else heads.view(torch.float32)[:, 4]
        if device.type == "cpu":
            _read(words, check)
        else:
            if count is not None:
                counts = torch.where((words[:, 1] == words[0, 1]).all(), counts, torch.nan)
            if not capturing:  # a graph's heads could not be read between its runs
                self._unread.append((HostCopy(words), check))
        return counts, rows[:, heads.shape[1] : heads.shape[1] + values.nbytes].view(values.dtype)

    def _zeros(self, nbytes: int, device: torch.device) -> Tensor:
        if device not in self._filling or self._filling[device].numel() < nbytes:
            self._filling[device] = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return self._filling[device][:nbytes]

    def _head(self, purpose: str, count: int, device: torch.device) -> Tensor:
        head = self._heads.get((purpose, count, device))
        if head is None:
            text = purpose.encode()
            digest = int.from_bytes(hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest(), "big")
            number = count or _NO_COUNT
            # The end of a long name is more informative than its start.
            shown = text[-_WORD * (_WORDS - _TEXT_AT) :].ljust(_WORD * (_WORDS - _TEXT_AT), b"\0")
            head = on_device(from_bytes(struct.pack("ddf4x", number, digest, number) + shown), device)
            if len(self._heads) >= _MAX_HEADS:  # copies of a model made in every step have new names every time
                self._heads.clear()
            self._heads[purpose, count, device] = head
        return head


def _read(words: Tensor, check: Check | None) -> None:
    counts, digests = zip(*words[:, :2].tolist(), strict=True)
    if len(set(digests)) > 1:
        raise DisagreementError(_difference([_text(row) for row in words]))
    if check is not None:
        check(int(sum(counts)))


def _text(row: Tensor) -> str:
    return row[_TEXT_AT:].contiguous().view(torch.uint8).numpy().tobytes().rstrip(b"\0").decode(errors="replace")


def _difference(purposes: Sequence[str]) -> str:
    first = purposes[0]
    # Texts that differ only at their start look the same here.
    tower, other = next(((i, text) for i, text in enumerate(purposes) if text != first), (1, first))
    return (
        f"the towers made different calls: tower 0 {first}, tower {tower} {other}; every tower must use the same "
        "layers in the same order, forward and backward, with an empty share too"
    )
