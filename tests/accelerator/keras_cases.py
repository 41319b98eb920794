"""Keras on any accelerator."""

from __future__ import annotations

from typing import Any

import numpy as np


def fit(names: list[str], settings: dict[str, Any] | None = None) -> dict[str, dict[str, list[float]]]:
    """The numbers of some of the cases of ``tests/keras``."""
    from tests.keras import cases

    results: dict[str, dict[str, Any]] = cases.run_all(names, settings)
    return {
        name: {key: np.asarray(value, dtype=float).ravel().tolist() for key, value in found.items()}
        for name, found in results.items()
    }
