"""Export the trained digits, and serve them by a process that knows nothing of mirrored.

    python examples/digits.py              trains, into results/digits
    python examples/serve.py               exports those weights into results/serve, then runs the next line
    python examples/serve.py --serve       loads what was exported, and compares it with the model that was trained

A model of mirrored is an ordinary module, so torch.export and torch.onnx take it as it is. --weights also takes the
folder of a checkpoint, such as results/run/step-00000460. ONNX needs the extra `onnx` (onnx, onnxscript, onnxruntime);
without these packages it is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch

PROGRAM, MODEL, EXPECTED = "digits.pt2", "digits.onnx", "expected.npz"
TOLERANCE = 1e-4
"""The largest difference between two logits (which are around 10) that other kernels may make by rounding."""


def export(weights: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the network for any number of images, and what it computes for the test set."""
    from digits import Net, load_digits

    import mirrored

    model = Net()
    mirrored.load_weights(model, weights)
    model.eval()  # without dropout: what is exported computes as it does now
    _, test_set = load_digits()
    with torch.no_grad():
        logits = model(test_set.images)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / EXPECTED, images=test_set.images, labels=test_set.labels, logits=logits)

    examples = (test_set.images[:2],)  # two: an example of one would make the number of images a constant
    shapes = ({0: torch.export.Dim("images", min=1)},)
    program = torch.export.export(model, examples, dynamic_shapes=shapes)
    torch.export.save(program, folder / PROGRAM)
    if all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript")):
        options = {"input_names": ["images"], "output_names": ["logits"], "dynamic_shapes": shapes}
        torch.onnx.export(model, examples, folder / MODEL, dynamo=True, external_data=False, verbose=False, **options)
    else:
        (folder / MODEL).unlink(missing_ok=True)  # of other weights
        print("no ONNX: its export needs pip install onnx onnxscript onnxruntime")


def serve(folder: pathlib.Path) -> None:
    """Load each file that was exported, and compare its logits with those of the model that was trained."""
    if not (folder / PROGRAM).exists():
        raise SystemExit(f"{folder / PROGRAM} is not there: run this without --serve first")
    with np.load(folder / EXPECTED) as saved:
        images, labels, expected = saved["images"], saved["labels"], saved["logits"]
    network = torch.export.load(folder / PROGRAM).module()

    def by_torch(batch: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return network(torch.from_numpy(batch)).numpy()

    compare("torch.export", by_torch, images, labels, expected)
    if not (folder / MODEL).exists():
        print("no ONNX was exported")
    elif importlib.util.find_spec("onnxruntime") is None:
        print("ONNX was not compared: pip install onnxruntime")
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / MODEL, providers=["CPUExecutionProvider"])
        compare("ONNX", lambda batch: session.run(["logits"], {"images": batch})[0], images, labels, expected)
    assert "mirrored" not in sys.modules, "what serves needs no mirrored"
    print("without mirrored")


def compare(
    name: str,
    network: Callable[[np.ndarray], np.ndarray],
    images: np.ndarray,
    labels: np.ndarray,
    expected: np.ndarray,
) -> None:
    """All images at once, and the first one alone."""
    logits = network(images)
    difference = max(np.abs(logits - expected).max(), np.abs(network(images[:1]) - expected[:1]).max())
    accuracy = (logits.argmax(1) == labels).mean()
    print(f"{name}: test accuracy {accuracy:.2%} on {len(labels)} digits, logits differ by {difference:.1e} at most")
    if difference > TOLERANCE:
        raise SystemExit(f"{name} computes something else than the model that was trained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=pathlib.Path, default=pathlib.Path("results/digits/model.safetensors"))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/serve"))
    parser.add_argument("--serve", action="store_true", help="only load and compare what lies in --output")
    arguments = parser.parse_args()
    if not arguments.serve:
        export(arguments.weights, arguments.output)
        command = [sys.executable, __file__, "--serve", "--output", str(arguments.output)]
        sys.exit(subprocess.run(command).returncode)
    serve(arguments.output)


if __name__ == "__main__":
    main()
