"""Keras 3 on torch: ``compile`` and ``fit`` on all towers, with the losses and weights of one device.

.. code-block:: python

    import mirrored.keras
    import keras, mirrored

    strategy = mirrored.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([...])
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=5)  # the global batch size

The import changes Keras' trainer for models that were created in a strategy's scope (or passed to ``strategy.mirror``).
All other models train as before. ``docs/how-to/keras.md`` lists the differences from ``tf.distribute``.

[Note: examples are weighted] Keras' code computes means of a batch's losses, of a metric's values and of moving
statistics. A tower computes them over its share, unchanged. One weight, the share's fraction of the examples, turns
them into means of the global batch. Gradients are summed with this weight at the start of backward
(:mod:`mirrored.keras.steps`), and so are moving statistics (:mod:`mirrored.keras.training`). Metrics contain their
counts (:mod:`mirrored.keras.metrics`). Any use of a mean in a ``train_step``, in Keras or in torch, is therefore right,
even if shares have different sizes. Only sums, and means over entries that are not examples (entries of a mask,
weights), must be changed (:mod:`mirrored.keras.computations`).

[Note: Keras is patched] Keras' torch trainer has no support for strategies. Each replaced function
(``around``) calls the original, and does nothing more for models without a strategy. The
tested versions are given below; others are refused. Keras 3.16 wraps models in ``DistributedDataParallel`` if a process
group exists.
"""

from __future__ import annotations

import os
import sys

_FIRST, _END = (3, 13), (3, 16)


def _check_keras() -> None:
    """Checks that Keras is installed, uses torch, and has a supported version.

    Raises:
        ImportError: one of these is not the case.
    """
    chosen = os.environ.setdefault("KERAS_BACKEND", "torch")
    if chosen != "torch" and "keras" not in sys.modules:
        raise ImportError(
            f"mirrored.keras trains Keras models on torch, but KERAS_BACKEND is {chosen!r}: set KERAS_BACKEND=torch, "
            "or leave it unset"
        )
    try:
        import keras
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        raise ImportError("mirrored.keras needs Keras 3: pip install 'keras>=3.13,<3.16'") from error
    if (backend := keras.config.backend()) != "torch":
        raise ImportError(
            f"mirrored.keras trains Keras models on torch, but keras was imported before with the backend {backend}: "
            "put 'import mirrored.keras' before 'import keras', or set KERAS_BACKEND=torch"
        )
    version = tuple(int(number) for number in keras.__version__.split(".")[:2])
    if not _FIRST <= version < _END:
        reason = ""
        if version >= _END:
            reason = (
                ". Keras 3.16 wraps models in DistributedDataParallel by itself as soon as there is a process group, "
                "so gradients would be averaged twice"
            )
        raise ImportError(
            f"mirrored.keras knows Keras 3.13 to 3.15, but this is {keras.__version__}{reason}: "
            "pip install 'keras>=3.13,<3.16'"
        )


_check_keras()

from mirrored.keras import (  # noqa: E402, F401  (they patch)
    computations,
    metrics,
    optimizers,
    trainer,
)
from mirrored.keras.callbacks import Monitor, TensorBoard  # noqa: E402
from mirrored.keras.checkpoints import Checkpoints  # noqa: E402
from mirrored.strategy.uncompiled import untraced  # noqa: E402

untraced.traced |= {
    f"{__name__}.{module}" for module in ("computations", "keras_private", "metrics", "optimizers", "steps")
}

__all__ = ["Checkpoints", "Monitor", "TensorBoard"]
