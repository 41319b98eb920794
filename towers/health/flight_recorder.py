"""The collectives of c10d's groups that towers are in, from torch's flight recorder, for messages about hanging towers.

A host queues collectives for its GPU and continues, so its activity does not show in which of them the GPU hangs. torch
records the last collectives of the groups of NCCL and Gloo in memory, those of the script's own groups included (2,000;
``TORCH_FR_BUFFER_SIZE`` changes the number). They are counted for each group. So if two towers are in different ones,
the numbers and names show which tower has left one out, or has called another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from towers.system.messages import name_towers
from towers.system.torch_private import recorded_collectives

_SHOWN = 3  # the largest number of groups in a message


class Entered(NamedTuple):
    """The collective of a group that a tower is in: the first one that has not ended, or the last one.

    Attributes:
        number: its index among the group's collectives, from 1.
        call: its name, with the dtype and the shape of its inputs.
        ended: whether it has ended, with or without an error.
    """

    number: int
    call: str
    ended: bool

    def of(self, towers: Sequence[int]) -> str:
        """Returns that these towers are in it, in words."""
        where = "last called" if self.ended else "is in" if len(towers) == 1 else "are in"
        return f"{name_towers(towers)} {where} number {self.number}, {self.call}"


def entered() -> dict[str, Entered]:
    """Returns the collectives that this tower is in, by group. It is empty if torch records nothing."""
    found: dict[str, Entered] = {}
    for record in recorded_collectives():
        name, description = record["process_group"]
        group = name if description in ("", "undefined") else f"{name} ({description})"
        if not record["is_p2p"] and (group not in found or found[group].ended):
            found[group] = _entered(record)
    return found


def _entered(record: Mapping[str, Any]) -> Entered:
    library, _, name = record["profiling_name"].partition(":")
    inputs = zip(record["input_dtypes"], record["input_sizes"], strict=False)
    # Gloo's records have no states; NCCL's watchdog retires a collective that has failed, too.
    ended = record["state"] == "completed" if library == "nccl" else record["retired"]
    tensors = ", ".join(f"{dtype} {sizes}" for dtype, sizes in inputs)
    return Entered(record["collective_seq_id"], f"{name} of {tensors}" if tensors else name, ended)


def describe(towers: Mapping[int, Mapping[str, Entered]]) -> str:
    """Returns lines on the groups in which towers are in different collectives, or have not ended one; or ``""``.

    Args:
        towers: the results of :func:`entered`, by tower.
    """
    lines = []
    for group in sorted({group for groups in towers.values() for group in groups}):
        here = {tower: groups[group] for tower, groups in sorted(towers.items()) if group in groups}
        places: dict[Entered, list[int]] = {}
        for tower, place in here.items():
            places.setdefault(place, []).append(tower)
        if len(places) > 1 or not next(iter(places)).ended:
            lines.append(f"group {group}: {'; '.join(place.of(t) for place, t in places.items())}")
    return "\n".join(["Collectives, by torch's flight recorder:", *lines[:_SHOWN]]) if lines else ""
