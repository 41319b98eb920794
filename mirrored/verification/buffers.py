"""Buffers: what modules hold in their ``state_dict`` beside parameters, compared as parameters are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from mirrored.attached.batch_norm import takes_statistics_of_all_towers
from mirrored.verification.causes import Cause, Finding, some
from mirrored.verification.compare import Comparison
from mirrored.verification.trace import Sketch, has_values
from towers.system.torch_private import NormBase, own_buffers, unsaved_buffers

_STATISTICS = ("running_mean", "running_var")


def buffers_of(roots: Iterable[tuple[str, nn.Module]], several: bool) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are to be the same on any number of towers, with names.

    Left out are those that are in no ``state_dict``, and with ``several`` towers the running statistics of layers that
    normalise over each tower's own examples: what that does to training is compared, and has a cause of its own.
    """
    for name, root in roots:
        for path, module in root.named_modules():
            own = several and isinstance(module, NormBase) and not takes_statistics_of_all_towers(module)
            for key, buffer in own_buffers(module).items():
                if buffer is None or not has_values(buffer) or key in unsaved_buffers(module):
                    continue
                if not (own and key in _STATISTICS):
                    yield ".".join(filter(None, (name, path, key))), buffer


def differing_buffers(comparison: Comparison, at: int) -> Finding | None:
    """The buffers that are not one tower's after step number ``at``."""
    names = comparison.buffers_beyond(at)
    if not names:
        return None
    towers = len(comparison.many)
    one = comparison.one.steps[at].buffers[names[0]]
    held = [found for seen in comparison.many if (found := seen.steps[at].buffers.get(names[0])) is not None]
    what = f"{some(names)} after step {at + 1} is not what one tower has"
    if len({sketch.digest for sketch in held}) > 1:
        what += f": a buffer that each of the {towers} towers computes from its own examples{_together(one, held)}"
    return Finding(
        Cause.BUFFER,
        what,
        "compute it from all towers' examples (mirrored.get_replica_context().all_reduce inside run, "
        "sync_batch_norm=True), or, where each tower is to keep its own, outside of the state_dict "
        "(register_buffer(…, persistent=False))",
        "compared with one tower's after each step",
    )


def _together(one: Sketch, held: Sequence[Sketch]) -> str:
    """Whether the towers' values together are one tower's."""
    columns = list(zip(*(sketch.sample for sketch in held), strict=False))
    for what, values in (
        ("sum", [sum(column) for column in columns]),
        ("mean", [sum(column) / len(column) for column in columns]),
    ):
        if len(values) == len(one.sample) and all(
            abs(a - b) <= 1e-4 * max(abs(a), abs(b)) for a, b in zip(values, one.sample, strict=True)
        ):
            return f" (their {what} is one tower's)"
    return ""
