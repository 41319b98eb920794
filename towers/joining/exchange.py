"""Where the cards of one meeting lie, and how those who lay them down know that they are there together."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

from torch.distributed import Store

from towers.errors import HandshakeError, StartupError, TowersError
from towers.joining import messages
from towers.joining.messages import Card, NotACardError, OtherJobError, plain

_ATTEMPTS = 20  # to lay a card down where strangers write


class Table:
    """The table of a meeting, as the process with index ``index`` sees it.

    A card may have been read at an earlier meeting of the same job token, and be laid down again by somebody else. So
    whoever has found all cards says so by a checksum of them all, in which its own, newly made one is. The first says
    it last, when all others have: then everybody knows that all are there.
    """

    def __init__(self, store: Store, kind: str, index: int, token: str) -> None:
        self._store = store
        self._kind = kind
        self._index = index
        self._token = token
        self._texts: dict[int, bytes] = {}  # of the cards that were found, and of this process's own
        self._here: set[int] = set()  # who has found the same cards
        self._strangers: dict[int, str] = {}

    def claim(self, card: Card) -> Card:
        """Take this process's place.

        Raises:
            HandshakeError: another process of this job has it.
        """
        place = self._place(self._index)
        text = messages.seal(self._token, place, card)
        found = lay_down(self._store, self._token, place, card, text)
        if found is not card:
            other = plain(found.get("host"), 64)
            raise HandshakeError(
                f"{self._kind} {self._index} is already taken by a process on {other}; this one, on {card['host']}, "
                f"claims the same index: give each {self._kind} an index of its own"
            )
        self._texts[self._index] = text.encode()
        return card

    def stay(self) -> None:
        """Lay this process's card down again if somebody else has written there."""
        place, mine = self._place(self._index), self._texts[self._index]
        if self._read(place) != mine:
            self._store.set(place, mine.decode())

    def card(self, index: int) -> Card | None:
        """The card of ``index``; None when it has not come, or only a stranger in its place."""
        place = self._place(index)
        text = self._read(place)
        if text is None:
            return None
        try:
            card = messages.unseal(self._token, place, text)
        except NotACardError as stranger:
            self._strangers[index] = str(stranger)
            return None
        self._texts[index] = text
        return card

    def not_here(self, count: int, *, late: bool) -> list[int]:
        """Who has not yet said to have found the same cards, when all ``count`` have been found.

        Args:
            late: ask all; else all but the first wait for the first only.
        """
        digest = hashlib.sha256(b"\0".join(self._texts[i] for i in range(count))).hexdigest()
        others = [other for other in range(1, count) if other != self._index]
        if self._index == 0:
            missing = self._without(others, digest)
            if not missing:
                self._say(digest)
        else:
            self._say(digest)
            missing = self._without([0], digest)
            if missing and late:
                missing = self._without(others, digest) or missing
        for other in missing:
            self._strangers[other] = "a card of an earlier meeting, or of a process that has ended"
        return missing

    def _without(self, others: Sequence[int], digest: str) -> list[int]:
        """Those of ``others`` who have not said to have found the same cards."""
        self._here.update(other for other in others if other not in self._here and self._says(other) == digest)
        return [other for other in others if other not in self._here]

    def _say(self, digest: str) -> None:
        place = self._place(f"found{self._index}")
        self._store.set(place, messages.seal(self._token, place, {"found": digest}))

    def _says(self, other: int) -> object:
        place = self._place(f"found{other}")
        text = self._read(place)
        try:
            return None if text is None else messages.unseal(self._token, place, text).get("found")
        except NotACardError:
            return None

    def instead_of(self, index: int) -> str:
        """What a message adds about who came in the place of ``index``, if anybody did."""
        return f", in whose place lies {self._strangers[index]}" if index in self._strangers else ""

    def judge(self, wrong: str | None, error: type[TowersError] = HandshakeError) -> None:
        """Tell everybody that something is wrong, and fail with whatever was told first."""
        if wrong is not None:
            said = {"error": error.__name__, "text": plain(wrong)}
            self._fail(lay_down(self._store, self._token, self._place("verdict"), said))

    def read_verdict(self) -> None:
        """Fail if somebody of this job has found something wrong."""
        place = self._place("verdict")
        if (text := self._read(place)) is not None:
            try:
                said = messages.unseal(self._token, place, text)
            except NotACardError:
                return
            self._fail(said)

    def wait_until_read(self, others: Sequence[int]) -> None:
        """Give the others a moment to read the verdict."""
        end = time.monotonic() + 2.0
        while others and time.monotonic() < end and not self._store.check([self._place(f"read{i}") for i in others]):
            time.sleep(0.02)

    def _fail(self, verdict: Card) -> None:
        self._store.set(self._place(f"read{self._index}"), "")
        error = StartupError if verdict.get("error") == StartupError.__name__ else HandshakeError
        raise error(plain(verdict.get("text")))

    def _read(self, place: str) -> bytes | None:
        return self._store.get(place) if self._store.check([place]) else None

    def _place(self, what: int | str) -> str:
        return f"{self._kind}/{what}"


def lay_down(store: Store, token: str, place: str, card: Card, text: str = "", *, refuses_others: bool = False) -> Card:
    """Lay ``card`` down where no card of this job lies, and return what lies there then.

    Args:
        text: ``card``, sealed; it is sealed here where this is empty.
        refuses_others: leave another job's card there.

    Raises:
        OtherJobError: it was left.
        HandshakeError: somebody writes there without end.
    """
    text = text or messages.seal(token, place, card)
    expected: str | bytes = ""
    for _ in range(_ATTEMPTS):
        found = store.compare_set(place, expected, text)  # type: ignore[arg-type]  # takes bytes as well
        if found == text.encode():
            return card
        try:
            return messages.unseal(token, place, found)
        except NotACardError as stranger:
            if refuses_others and isinstance(stranger, OtherJobError):
                raise
            expected = "" if found == expected else found  # equal: it was there, and is gone
    raise HandshakeError(f"a stranger keeps writing to {place} in the store where this job meets")
