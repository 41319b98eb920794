"""``keras_restarts.py FOLDER``: a ``fit`` that says from where it goes on, and is killed once after batch KILLED."""

import hashlib
import os
import pathlib
import signal
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras

import mirrored
import mirrored.keras
from tests.keras.cases import dense, seven_batches

strategy = mirrored.MirroredStrategy(seed=0, restarts=1)
folder = pathlib.Path(sys.argv[1])
keras.utils.set_random_seed(7)
model = dense(strategy)
begun: list[int] = []
checkpoints = mirrored.keras.Checkpoints(folder / "run", memory_every_steps=1)


class Dies(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if not begun:  # no attribute of a callback, which would be restored
            strategy.print("goes on after batch", checkpoints.manager.steps, flush=True)
        begun.append(batch)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        flag = folder / "killed"
        if strategy.is_chief and str(checkpoints.manager.steps) == os.environ.get("KILLED") and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


model.fit(*seven_batches(), batch_size=16, epochs=2, callbacks=[checkpoints, Dies()], verbose=0)
weights = b"".join(weight.tobytes() for weight in model.get_weights())
strategy.print("has ended after batch", checkpoints.manager.steps, hashlib.sha256(weights).hexdigest())
