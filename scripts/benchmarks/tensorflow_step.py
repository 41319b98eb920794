"""TensorFlow's MirroredStrategy on logical CPUs, as a process that takes steps when it is told to.

TensorFlow has its towers in one process, so it cannot live in ours: this module starts it (:func:`program`) and, run
as a program, is it. It needs the extra ``tensorflow``.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from beside import Program, serve

WIDTHS = (784, 2048, 2048, 2048, 10)
"""Widths of the MLP, the one model that is there for both."""


def installed() -> bool:
    """Whether there is a TensorFlow."""
    return importlib.util.find_spec("tensorflow") is not None


def program(towers: int, batch: int, optimizer: str) -> Program:
    """Steps of the MLP in TensorFlow.

    Args:
        batch: global batch size.
        optimizer: a name of :data:`plain.OPTIMIZERS`.
    """
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return Program(__file__, towers, batch, optimizer, environment=quiet)


def main() -> None:
    import tensorflow as tf

    towers, batch, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(towers)
    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * towers)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(towers)])
    with strategy.scope():
        layers = [tf.keras.layers.Dense(width, activation="relu") for width in WIDTHS[1:-1]]
        model = tf.keras.Sequential([tf.keras.Input((WIDTHS[0],)), *layers, tf.keras.layers.Dense(WIDTHS[-1])])
        optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9) if name == "sgd" else tf.keras.optimizers.Adam(1e-4)
        optimizer.build(model.trainable_variables)
    share = batch // towers
    x = strategy.experimental_distribute_values_from_function(lambda _: tf.random.normal((share, WIDTHS[0])))
    y = strategy.experimental_distribute_values_from_function(
        lambda _: tf.random.uniform((share,), maxval=WIDTHS[-1], dtype=tf.int32)
    )

    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step() -> Any:
        return strategy.reduce("SUM", strategy.run(train_step, args=(x, y)), axis=None)

    serve(lambda: float(step()))


if __name__ == "__main__":
    main()
