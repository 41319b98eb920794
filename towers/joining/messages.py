"""What processes tell each other in a store: JSON objects, sealed with the job's token, read with suspicion.

Whoever reaches the store can write there. A seal says that a card comes from a process that has the token, and for
the place where it lies; the token itself is never sent. That proves nothing where no token was given.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import uuid
from typing import Any

Card = dict[str, Any]

JOB_TOKEN = "MIRRORED_JOB_TOKEN"
"""Environment variable with a secret that all processes of one job have, and no others."""

LARGEST = 2**20
"""Bytes; what is longer is no card. The cards of 10,000 workers list their addresses in half of it."""


class NotACardError(ValueError):
    """What lies there was not written by this software. The message says what is wrong with it."""


class OtherJobError(NotACardError):
    """It is a card, but its seal is that of another token."""


def seal(token: str, place: str, card: Card) -> str:
    """The text to lay down at ``place``."""
    text = json.dumps({**card, "nonce": uuid.uuid4().hex})
    return json.dumps({"card": text, "seal": _digest(token, place, text)})


def unseal(token: str, place: str, data: bytes) -> Card:
    """The card that was laid down at ``place``.

    Raises:
        OtherJobError: it was sealed with another token, or for another place.
        NotACardError: it is something else, of whatever kind.
    """
    if len(data) > LARGEST:
        raise NotACardError(f"{len(data)} bytes, too many for a card")
    sealed = _object(data)
    text, claimed = sealed.get("card"), sealed.get("seal")
    if not isinstance(text, str) or not isinstance(claimed, str):
        raise NotACardError("an object without a card and a seal")
    card = _object(text)
    if not hmac.compare_digest(claimed.encode(errors="replace"), _digest(token, place, text).encode()):
        raise OtherJobError(f"the card of a process on {plain(card.get('host'), 64)} with another job token")
    card.pop("nonce", None)
    return card


def plain(text: object, longest: int = 4000) -> str:
    """A stranger's text as it may be shown: on one line, not too long, and nothing that moves a terminal's cursor."""
    if not isinstance(text, str):
        return "?"
    shown = text[:longest]
    return shown if shown.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in shown)


def _object(text: str | bytes) -> Card:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, numbers of thousands of digits, thousands of brackets
        raise NotACardError(f"{len(text)} bytes that are not JSON") from None
    if not isinstance(value, dict):
        raise NotACardError("JSON that is no object")
    return value


def _digest(token: str, place: str, text: str) -> str:
    said = json.dumps([place, text]).encode()
    return hmac.new(os.fsencode(token), said, hashlib.sha256).hexdigest()
