"""Scripts that call Keras' fit; the first argument chooses, and the second is a folder for backups."""

import pathlib
import sys

import mirrored.keras  # isort: skip
import keras
import numpy as np
from keras import ops

import mirrored

KIND = sys.argv[1]


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(7)
        self.hidden, self.norm = keras.layers.Dense(16, activation="tanh"), keras.layers.BatchNormalization()
        self.last = keras.layers.Dense(3)

    def call(self, x, training=False):
        hidden = self.hidden(x)
        if KIND == "add_loss":
            self.add_loss(0.01 * ops.sum(ops.square(hidden)))
        return self.last(self.norm(hidden, training=training) if "norm" in KIND else hidden)

    def train_step(self, data):
        x, y = data
        if KIND == "noise":
            x = x + keras.random.normal(ops.shape(x), seed=self.seeds)
        if KIND == "contrastive step":
            self.zero_grad()
            loss = contrastive(y, self(x, training=True))
            loss.backward()
            self.optimizer.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)
            return {"loss": loss}
        return super().train_step((x, y))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if KIND != "contrastive":
            return super().compute_loss(x, y, y_pred, sample_weight, training)
        return contrastive(y, y_pred)


def contrastive(y, predicted):
    own, partners = ops.normalize(predicted), ops.normalize(y)
    likeness = ops.matmul(own, ops.transpose(partners))
    labels = ops.arange(len(y))
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, likeness, from_logits=True))


def sum_of_squares(y, predicted):
    return ops.sum((y - predicted) ** 2)


def times_towers(y, predicted):
    return ops.mean(abs(y - predicted), axis=-1) * strategy.num_replicas_in_sync


strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope(sync_batch_norm="sync" in KIND):
    if "sequential" in KIND:
        first, norm = keras.layers.Dense(16), keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((8,)), first, norm, keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    else:
        model = Model()
    loss = sum_of_squares if "sum" in KIND else "mse"
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["mae", *([times_towers] if KIND == "metric" else [])])
x = np.random.normal(size=(48, 8)).astype("float32")
backups = []
if "backup" in KIND:
    kept = "kept" in KIND
    backups = [keras.callbacks.BackupAndRestore(sys.argv[2], save_freq=1, delete_checkpoint=not kept)]
if KIND == "weights":
    model(x[:1])
weights = pathlib.Path(sys.argv[2], "model.weights.h5")
if weights.exists():
    model.load_weights(weights)
model.fit(x, x[:, :3], batch_size=8, epochs=1, verbose=0, callbacks=backups)
if KIND == "weights":
    model.save_weights(weights)
