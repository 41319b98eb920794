"""Detects gradients that are NaN or infinite: which gradients, and on which tower.

Averaging spreads them to all towers, so their source cannot be found afterwards. Each tower therefore inspects its
contribution before the average, and at the end of each backward the towers exchange their findings. (Finite
contributions whose sum overflows are not detected.)

[Note: gradients that are not finite pass] They are averaged like others, and are on all towers afterwards. So a
``GradScaler``, which causes infinities on purpose, decides identically on all towers. Naming the tower takes one more
pass over the gradients, one small collective per backward and, on GPUs, a wait, so it is an option. That collective
runs after all other work of a backward, so that the towers are in step when it raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from towers.collectives.communicator import Communicator
from towers.errors import NonFiniteGradientError
from towers.gradients.buckets import Slot
from towers.system.messages import get_logger, name_towers
from towers.system.tensors import concatenated, extremes, what_is_not_finite

log = get_logger("towers")

_NAMED = 3


class GradientWatch:
    """Inspects this tower's contributions to the gradients.

    Args:
        comm: the towers.
        raises: whether a gradient that is not finite is an error. Otherwise, it is a warning (the first, the tenth, …
            time).
    """

    def __init__(self, comm: Communicator, *, raises: bool) -> None:
        self._comm = comm
        self._raises = raises
        self._names: list[str] = []
        self._highest: list[torch.Tensor] = []
        self._backward = 0
        self._warnings = 0

    def inspect(self, slots: Iterable[Slot]) -> None:
        """Inspects gradients that contain this tower's own contribution, before they are averaged."""
        gradients = [(slot.name, g) for slot in slots if slot.fresh and (g := slot.gradient) is not None]
        if gradients:
            self._names += [name for name, _ in gradients]
            self._highest.append(extremes([gradient for _, gradient in gradients]))

    def report(self) -> None:
        """Reports this tower's findings to all towers at the end of a backward. All towers call it.

        Raises:
            NonFiniteGradientError: on all towers with one message. The towers are in step, and may continue.
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
