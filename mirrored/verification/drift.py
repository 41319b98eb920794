"""Towers whose parameters differ from each other: with several towers that is always a mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mirrored.verification.causes import Cause, Finding, at_line, some
from mirrored.verification.trace import Seen

_FIX = "change it on all towers alike: not under `if strategy.is_chief:`, and not by values that differ"


def drift(many: Sequence[Seen]) -> Finding | None:
    """The towers' parameters differ from each other; with several towers that is always a mistake."""
    for at, steps in enumerate(zip(*(seen.steps for seen in many), strict=False)):
        entered = [next((run.entered for run in seen.runs if run.steps == at), {}) for seen in many]
        before = [step.before for step in steps]
        after = [{name: held.digest for name, held in step.after.items()} for step in steps]
        for moment, digests in (("before", entered), ("during", before), ("after", after)):
            if all(digests) and (names := [n for n in digests[0] if len({d.get(n) for d in digests}) > 1]):
                foreign = [name for name in names if any(name in step.foreign for step in steps)]
                if foreign:
                    return Finding(
                        Cause.OUTSIDE_SCOPE,
                        f"{some(foreign)} was made outside of strategy.scope(), and differs between the towers from "
                        f"step {at + 1} on",
                        "create it inside `with strategy.scope():`, or give its module to strategy.mirror(module)",
                        f"compared bit by bit at step {at + 1}",
                    )
                return _changed(many, at, moment, names)
    return None


def _changed(many: Sequence[Seen], at: int, moment: str, names: Sequence[str]) -> Finding:
    steps = [seen.steps[at] for seen in many]
    if moment == "after":
        gradients = [{name: step.gradients.get(name) for name in names} for step in steps]
        what = "its gradient" if any(g != gradients[0] for g in gradients) else "the optimizer or its learning rate"
        when = f"in step {at + 1}{at_line(steps[0].line)}, where {what} is not the same on all towers"
    elif moment == "before":
        when = f"after step {at}, outside of the optimizer" if at else "before step 1"
    else:
        when = f"in the run of step {at + 1}, before the optimizer's step"
    shown = f"the towers' bits were equal before, and differ {'at' if moment != 'after' else 'after'} step {at + 1}"
    lonely = lonely_write(many, at, names)
    if lonely is not None:
        return dataclasses.replace(lonely, shown_by=shown)
    return Finding(
        Cause.CHANGED_ON_ONE_TOWER,
        f"the towers are no mirror images: {some(names)} is changed {when}",
        _FIX,
        shown,
    )


def evaluated_drift(many: Sequence[Seen]) -> Finding | None:
    """What all towers evaluate is not the same model on each; one that is evaluated on some towers only is theirs."""
    for steps in sorted({steps for steps, _ in many[0].evaluated_models}):
        held = [{name: m for (at, name), m in seen.evaluated_models.items() if at == steps} for seen in many]
        if any(models.keys() != held[0].keys() for models in held):
            continue
        for name, digests in held[0].items():
            differing = [path for path in digests if len({models[name].get(path) for models in held}) > 1]
            if differing:
                return Finding(
                    Cause.CHANGED_ON_ONE_TOWER,
                    f"the towers evaluate {name} after step {steps}, but it is not the same on all of them: "
                    f"{some(differing)} differs. Its training is; an average of the weights that the chief alone "
                    "updates, for example, is on the other towers what it was in the beginning",
                    "update it on all towers alike, or use it on the chief alone",
                    "compared bit by bit where it was called",
                )
    return None


def lonely_write(many: Sequence[Seen], at: int, names: Sequence[str] | None = None) -> Finding | None:
    """Some towers alone have written to a parameter (to one of ``names``) after step number ``at``."""
    writers: dict[tuple[str, int | None], list[int]] = {}
    for tower, seen in enumerate(many):
        for written in {(w.parameter, w.line) for w in seen.writes if w.steps == at}:
            if names is None or written[0] in names:
                writers.setdefault(written, []).append(tower)
    for (parameter, line), towers in writers.items():
        if len(towers) < len(many):
            only = ", ".join(map(str, towers))
            by = f", by line {line}" if line is not None else ""
            return Finding(
                Cause.CHANGED_ON_ONE_TOWER,
                f"tower {only} alone changes {parameter} after step {at}, outside of the optimizer{by}; from then on "
                "the towers are no mirror images",
                _FIX,
            )
    return None
