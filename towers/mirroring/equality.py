"""Finds values that are not the same on all towers, and the towers that differ (rule R1, docs/concepts/towers.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from towers.collectives.agreement import announce, digest_of
from towers.collectives.communicator import Communicator
from towers.mirroring.fingerprint import fingerprints
from towers.system.host_copy import HostCopy
from towers.system.text import name_towers


@dataclass(frozen=True)
class Held:
    """A value that a tower holds.

    Attributes:
        name: its unique name, also in messages.
        kind: a word for its kind.
        value: a tensor, or a plain value, whose ``repr`` is compared.
    """

    name: str
    kind: str
    value: object


@dataclass(frozen=True)
class Difference:
    """A value that is not the same on all towers.

    Attributes:
        name: its name (:class:`Held`).
        kinds: its kinds on any tower.
        groups: groups of towers with the same value. The largest group is first; of equally large groups, the one with
            the first tower.
        values: a plain value, by tower; None for tensors.
    """

    name: str
    kinds: list[str]
    groups: list[list[int]]
    values: list[str] | None = None


class Comparison:
    """A comparison that was started. A GPU may still be computing it.

    Args:
        held: the compared values.
        prints: every tower's fingerprints of them, shape ``(towers, len(held))``.
        differences: differences that are already known.
    """

    def __init__(self, held: Sequence[Held], prints: HostCopy | None, differences: Sequence[Difference] = ()) -> None:
        self._labels = [(one.name, one.kind) for one in held]
        self._prints = prints
        self._differences = list(differences)

    def differences(self) -> list[Difference]:
        """Returns the differences, in order, the same on all towers. It waits for a GPU that is still computing."""
        if self._prints is not None:
            rows, self._prints = self._prints.get(), None
            for number in (rows != rows[0]).any(0).nonzero().flatten().tolist():
                name, kind = self._labels[number]
                self._differences.append(Difference(name, [kind], groups_of(rows[:, number].tolist())))
        return self._differences


def start_comparison(comm: Communicator, call: str, held: Sequence[Held]) -> Comparison:
    """Compares this tower's values with those of the others. All towers call it.

    Fingerprints of tensors on the communicator's device are made and gathered there, which on a GPU needs no wait.
    Values that some towers do not hold at all are not compared, because garbage is collected earlier on some towers.

    Raises:
        DisagreementError: on all towers, if some make another call.
    """
    near = [one for one in held if isinstance(one.value, Tensor) and one.value.device == comm.device]
    far = [one for one in held if not isinstance(one.value, Tensor) or one.value.device != comm.device]
    prints = fingerprints([one.value for one in near if isinstance(one.value, Tensor)])
    texts = _texts(far)
    digest = digest_of([[(one.name, one.kind) for one in held], texts])
    digests = announce(comm, call, digest)
    if all(other == digest for other in digests):
        if not near:
            return Comparison([], None)
        pending, rows = comm.start_all_gather(prints)
        pending.wait()
        return Comparison(near, HostCopy(rows))
    texts.update(zip((one.name for one in near), map(str, prints.tolist()), strict=True))
    towers = comm.all_gather_json({one.name: [one.kind, texts[one.name]] for one in held})
    return Comparison([], None, differences(towers, held))


Description = dict[str, list[str]]
"""By name of a tower's value: its kind, and a text that is equal for equal values."""


def describe(held: Sequence[Held]) -> Description:
    """Describes a tower's values for :func:`differences`. It waits for a GPU."""
    texts = _texts(held)
    return {one.name: [one.kind, texts[one.name]] for one in held}


def _texts(held: Sequence[Held]) -> dict[str, str]:
    """Returns, by name, texts of plain values and of tensors' fingerprints. It waits for the latter."""
    texts = {one.name: repr(one.value) for one in held if not isinstance(one.value, Tensor)}
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for one in held:
        if isinstance(one.value, Tensor):
            by_device.setdefault(one.value.device, []).append((one.name, one.value))
    for tensors in by_device.values():
        prints = fingerprints([tensor for _, tensor in tensors]).tolist()
        texts.update(zip((name for name, _ in tensors), map(str, prints), strict=True))
    return texts


def differences(towers: Sequence[Description], held: Sequence[Held]) -> list[Difference]:
    """Returns the differences between the towers' values, for values that all towers hold.

    Args:
        held: this tower's values.
    """
    plain = {one.name for one in held if not isinstance(one.value, Tensor)}
    different = []
    for name in towers[0]:
        if not all(name in listing for listing in towers):
            continue
        kinds, values = ([listing[name][i] for listing in towers] for i in (0, 1))
        if any(value != values[0] for value in values):
            different.append(Difference(name, sorted(set(kinds)), groups_of(values), values if name in plain else None))
    return different


def groups_of(values: Sequence[object]) -> list[list[int]]:
    """Returns groups of towers with the same value, the largest group first."""
    groups: dict[object, list[int]] = {}
    for tower, value in enumerate(values):
        groups.setdefault(value, []).append(tower)
    return sorted(groups.values(), key=lambda towers: -len(towers))


def who_differs(groups: Sequence[Sequence[int]]) -> str:
    """Returns ``tower 2 differs from towers 0, 1 and 3`` if most towers agree, otherwise a similar description."""
    if all(len(towers) == 1 for towers in groups) and len(groups) > 2:
        return "it is different on every tower"
    majority, *others = groups
    if len(others) == 1 and len(others[0]) == len(majority):
        return f"{name_towers(majority)} differ{'s' * (len(majority) == 1)} from {name_towers(others[0])}"
    odd = sorted(tower for towers in others for tower in towers)
    apart = ", and from each other" if len(others) > 1 else ""
    return f"{name_towers(odd)} differ{'s' * (len(odd) == 1)} from {name_towers(majority)}{apart}"
