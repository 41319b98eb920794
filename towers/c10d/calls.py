"""What the towers of one host call, to see that they call the same."""

from __future__ import annotations

import zlib

from towers.collectives.communicator import Communicator
from towers.collectives.shared_memory.sharing import share
from towers.errors import DisagreementError

_CARD = 256  # bytes: the number of the call, then what it is


class Calls:
    """Every tower's last calls; forming it is a collective.

    A tower writes what it calls before it meets the others, who so can read it when the call is over. It has two cards,
    which take turns: nobody can have come to the call after the next one, which needs all to have ended this one.

    Attributes:
        number: how many calls there were.
    """

    def __init__(self, comm: Communicator) -> None:
        segments, _ = share(comm, 2 * _CARD)
        self._index = comm.index
        self._cards = [segment.memory(2 * _CARD, 0) for segment in segments]
        self.number = 0
        self._mine = b""

    def enter(self, call: str) -> None:
        """Write down a call, before its first meeting."""
        self.number += 1
        text = call.encode()
        if len(text) > _CARD - 8:
            text = text[: _CARD - 20] + b" #%08x" % zlib.crc32(text)
        self._mine = self.number.to_bytes(8, "little") + text.ljust(_CARD - 8, b"\0")
        self._cards[self._index][self._place()] = self._mine

    def compare(self) -> None:
        """See that those who have come to this call have called the same.

        Raises:
            DisagreementError: another tower called something else.
        """
        place = self._place()
        for tower, cards in enumerate(self._cards):
            card = bytes(cards[place])
            if card != self._mine and card[:8] == self._mine[:8]:
                raise DisagreementError(
                    f"the ranks called different things: rank {tower} {_text(card)}, rank {self._index} "
                    f"{_text(self._mine)}; every rank must make the same calls in the same order"
                )

    def last(self) -> str:
        """What everybody called last, for a message."""
        cards = [max((bytes(card[:_CARD]), bytes(card[_CARD:])), key=_number) for card in self._cards]
        return ", ".join(
            f"rank {tower} {_text(card)} (call {_number(card)})" if _number(card) else f"rank {tower} nothing"
            for tower, card in enumerate(cards)
        )

    def _place(self) -> slice:
        return slice(_CARD, None) if self.number % 2 else slice(0, _CARD)


def _number(card: bytes) -> int:
    return int.from_bytes(card[:8], "little")


def _text(card: bytes) -> str:
    return card[8:].rstrip(b"\0").decode(errors="replace").strip()
