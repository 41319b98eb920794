"""On import, has the accelerator that MIRRORED_TEST_DEVICE names, and loads what its towers run."""

import importlib
import os

from tests import simulated_device

(simulated_device.load if os.environ["MIRRORED_TEST_DEVICE"] == "sim" else simulated_device.load_as_installed)()

for name in ("cases", "plant", "stream_cases"):  # they ask for the kind when they are imported
    importlib.import_module(f"tests.accelerator.{name}")
