"""Gradients that are NaN or infinite: which, and of which tower.

Averaging spreads them to all towers, so afterwards nobody can tell where they came from. Each tower therefore inspects
what it contributes before that is averaged, and at the end of each backward the towers tell each other what they found.
(Finite contributions whose sum overflows are not seen.)

[Note: gradients that are not finite pass] They are averaged like others, and are on all towers afterwards, so a
``GradScaler``, which makes infinities on purpose, decides alike everywhere. To name the tower takes one more pass over
the gradients, one small collective a backward and, on GPUs, a wait, so it is an option. That collective comes when all
else of a backward is done, so that the towers are in step when it raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from towers.collectives.communicator import Communicator
from towers.errors import NonFiniteGradientError
from towers.gradients.slots import Slot
from towers.system.extremes import concatenated, extremes, what_is_not_finite
from towers.system.log import get_logger
from towers.system.text import name_towers

log = get_logger("towers")

_NAMED = 3


class GradientWatch:
    """Inspects this tower's contributions to the gradients.

    Args:
        comm: the towers.
        raises: whether a gradient that is not finite is an error, or a warning (the first, the tenth, … time).
    """

    def __init__(self, comm: Communicator, *, raises: bool) -> None:
        self._comm = comm
        self._raises = raises
        self._names: list[str] = []
        self._highest: list[torch.Tensor] = []
        self._backward = 0
        self._warnings = 0

    def inspect(self, slots: Iterable[Slot]) -> None:
        """Inspect gradients that hold something of this tower's own, before they are averaged."""
        gradients = [(slot.name, g) for slot in slots if slot.fresh and (g := slot.gradient) is not None]
        if gradients:
            self._names += [name for name, _ in gradients]
            self._highest.append(extremes([gradient for _, gradient in gradients]))

    def report(self) -> None:
        """Tell all towers, at the end of a backward, what this one has seen; all of them call it.

        Raises:
            NonFiniteGradientError: on all towers with one text. The towers are in step, and may go on.
        """
        self._backward += 1
        highest = concatenated(self._highest) if self._highest else torch.zeros(0, device="cpu")
        local = what_is_not_finite(self._names, highest)
        self._names, self._highest = [], []
        if not self._comm.all_gather(torch.tensor([len(local)], device="cpu")).any():
            return
        towers = self._comm.all_gather_json(local)
        text = _describe(towers, self._backward)
        if self._raises:
            raise NonFiniteGradientError(text)
        self._warnings += 1
        if str(self._warnings).strip("0") == "1":  # 1, 10, 100, …
            again = f" ({self._warnings} backwards so far)" if self._warnings > 1 else ""
            log.warning("%s%s", text, again)


def _describe(towers: Sequence[dict[str, str]], backward: int) -> str:
    names = list(dict.fromkeys(name for kinds in towers for name in kinds))
    described = []
    for name in names[:_NAMED]:
        by_kind: dict[str, list[int]] = {}
        for tower, kinds in enumerate(towers):
            if name in kinds:
                by_kind.setdefault(kinds[name], []).append(tower)
        places = ", ".join(f"{kind} on {name_towers(which)}" for kind, which in by_kind.items())
        described.append(f"{name} ({places})")
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"gradients are not finite in backward() number {backward}: {', '.join(described)}{more}. Look at that "
        "tower's batch, loss and learning rate; torch.autograd.set_detect_anomaly(True) finds the operation. "
        "The average is not finite on any tower: call zero_grad() before you continue"
    )
