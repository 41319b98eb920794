"""Runs the scripts that a new user meets first: those of the README and of the first page, and the examples."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import runpy
import sys

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import mirrored
from tests.support.jobs import ROOT, launch
from tests.support.programs import end_of, run_command, run_program, start_command
from tests.support.readme import blocks_of_readme, scripts_of_readme

EXAMPLES = ROOT / "examples"
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))


def is_png(path: pathlib.Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.mark.extended
def test_digits_on_two_towers(tmp_path: pathlib.Path) -> None:
    words = [str(EXAMPLES / "digits.py"), "--devices", "cpu:0,cpu:1", "--output", str(tmp_path)]
    result = run_program([*words, "--checkpoints", str(tmp_path / "checkpoints")], code=0)
    match = re.search(r"test accuracy ([0-9.]+)% on 360 held-out digits", result.stdout)
    assert match, result.stdout
    assert float(match[1]) >= 97
    assert is_png(tmp_path / "digits.png")
    state = load_file(tmp_path / "model.safetensors")
    assert state["0.weight"].shape == (32, 1, 3, 3)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    for part in ("28740/28740", "example/s", "loss=", "accuracy="):
        assert part in result.stderr, "the progress bar shows loss, accuracy and examples per second"
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-00000400", "step-00000460"]


@pytest.mark.extended
def test_dcgan_on_two_workers(tmp_path: pathlib.Path) -> None:
    words = ["mirrored", "cluster", str(EXAMPLES / "dcgan.py")]
    result = run_command([*words, "--epochs", "2", "--every", "1", "--output", str(tmp_path)], code=0)
    assert re.search(r"final losses: discriminator [0-9.]+, generator [0-9.]+", result.stdout)
    assert "2 towers of 2 workers on cpu" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch0001.png", "epoch0002.png"]


@pytest.mark.extended
def test_keras_digits_on_two_towers(tmp_path: pathlib.Path) -> None:
    words = ["mirrored", "run", "--towers", "2", str(EXAMPLES / "keras_digits.py"), "--epochs", "3"]
    result = run_command([*words, "--output", str(tmp_path)], code=0)
    assert len(re.findall(r"^Epoch 3/3$", result.stdout, re.MULTILINE)) == 1
    match = re.search(r"test accuracy ([0-9.]+)% on 360 held-out digits", result.stdout)
    assert match, result.stdout
    assert float(match[1]) >= 85
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.keras", "epochs.csv"]
    assert len((tmp_path / "epochs.csv").read_text().splitlines()) == 4


@pytest.mark.extended
def test_keras_transfer_on_two_towers() -> None:
    program = str(EXAMPLES / "keras_transfer.py")
    result = run_command(["mirrored", "run", "--towers", "2", program, "--epochs", "3"], code=0)
    accuracies = [float(text) for text in re.findall(r": ([0-9.]+)% of \d+ held-out digits", result.stdout)]
    assert len(accuracies) == 3
    assert min(accuracies) >= 50


@pytest.mark.extended
def test_ngrams_in_central_storage() -> None:
    words = ["mirrored", "run", "--towers", "2", str(EXAMPLES / "ngrams.py"), "--files", "20", "--epochs", "1"]
    result = run_command(words, code=0)
    match = re.search(r"^epoch 1: .* is right in ([0-9.]+)% of \d{4,} held-out places$", result.stdout, re.MULTILINE)
    assert match, result.stdout
    assert float(match[1]) >= 15
    assert "the table of 134 MB is on cpu, once for all towers" in result.stdout


@pytest.mark.extended
def test_gpt_on_two_towers(tmp_path: pathlib.Path) -> None:
    words = ["mirrored", "run", "--towers", "2", str(EXAMPLES / "gpt.py"), "--files", "10", "--epochs", "1"]
    result = run_command([*words, "--output", str(tmp_path)], code=0)
    match = re.search(r"^([0-9.]+) bits for each byte of \d+ held-out functions$", result.stdout, re.MULTILINE)
    assert match, result.stdout
    assert float(match[1]) < 6  # of 7 that say nothing
    assert "slowest: tower " in result.stdout
    assert is_png(tmp_path / "gpt.png")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "size"),
    [("autoencoder.py", ("--patches", "33")), ("unet.py", ("--digits", "82"))],  # last batches of one example
)
def test_two_towers_end_where_one_does(name: str, size: tuple[str, str], tmp_path: pathlib.Path) -> None:
    """What they print last: after training, and after resuming the other's run at its end, with the same weights."""
    results = []
    for towers, folder in (("1", "one"), ("2", "one"), ("2", "two")):
        words = ["mirrored", "run", "--towers", towers, str(EXAMPLES / name), *size, "--epochs", "3"]
        result = run_command([*words, "--output", str(tmp_path / folder)], code=0)
        assert ("resuming from" in result.stderr) == (len(results) == 1), result.stderr
        assert is_png((tmp_path / folder / name).with_suffix(".png"))
        results.append(result.stdout.splitlines()[-1])
    alone, resumed, together = results
    assert resumed == alone
    numbers = [[float(number) for number in re.findall("[0-9.]+", line)] for line in (alone, together)]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-2)


def result_of(name: str, words: list[str], towers: int, output: pathlib.Path, line: str) -> float:
    """The number that ``line``, a regular expression, finds in what an example prints on so many towers."""
    program = [str(EXAMPLES / name), *words, "--output", str(output)]
    result = run_command(["mirrored", "run", "--towers", str(towers), *program], code=0)
    match = re.search(line, result.stdout, re.MULTILINE)
    assert match, result.stdout
    return float(match[1])


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "words", "line"),
    [
        ("lstm.py", ["--files", "6"], r"^perplexity ([0-9.]+) of \d{2,} held-out pieces$"),
        (
            "word2vec.py",
            ["--files", "1", "--words", "300", "--batch-size", "2048"],
            r"of \d{4,} held-out pairs ([0-9.]+)% right$",
        ),
    ],
)
def test_two_towers_then_one(name: str, words: list[str], line: str, tmp_path: pathlib.Path) -> None:
    alone = result_of(name, [*words, "--epochs", "2"], 1, tmp_path / "alone", line)
    first = result_of(name, [*words, "--epochs", "1"], 2, tmp_path / "both", line)
    assert first != pytest.approx(alone, rel=1e-3)
    assert result_of(name, [*words, "--epochs", "2"], 1, tmp_path / "both", line) == pytest.approx(alone, rel=1e-3)
    assert is_png((tmp_path / "both" / name).with_suffix(".png"))


def carried_on(path: pathlib.Path) -> list[list[float]]:
    """What a tower's columns of a saved state are, as it saves it (tower 0 to ``path``), and as it loads it."""
    from lstm import Carried

    strategy = mirrored.MirroredStrategy()
    carried = Carried(strategy)
    found = []
    if not path.exists():
        columns = torch.arange(5.0).tensor_split(strategy.num_replicas_in_sync)[strategy.topology.index]
        carried.state = columns.view(1, -1, 1), columns.view(1, -1, 1) + 10
        found.append(columns.tolist())
        saved = carried.state_dict()
        if strategy.is_chief:
            torch.save(saved, path)
        strategy.gather(columns)
    carried.load_state_dict(torch.load(path))
    assert carried.state is not None
    hidden, cell = carried.state
    assert torch.equal(hidden + 10, cell)
    return [*found, hidden.flatten().tolist()]


@pytest.mark.extended
def test_a_carried_state_goes_on_with_other_towers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    for saved, loaded in launch(carried_on, tmp_path / "state", count=2):
        assert saved == loaded
    assert launch(carried_on, tmp_path / "state", count=3) == [[[0, 1]], [[2, 3]], [[4]]]


@pytest.mark.extended
def test_digits_by_towers_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import towers_digits

    results = []
    for devices, epochs in (("cpu:0", "2"), ("cpu:0,cpu:1,cpu:2", "1"), ("cpu:0,cpu:1", "2")):
        output = tmp_path / str(devices == "cpu:0")
        words = ["--devices", devices, "--epochs", epochs, "--output", str(output)]
        monkeypatch.setattr(sys, "argv", ["towers_digits.py", *words])
        towers_digits.main()
        line = r"final loss ([0-9.]+), test accuracy ([0-9.]+)%; towers with the same bits: (\d)$"
        found = re.match(line, capsys.readouterr().out)
        assert found
        results.append([float(number) for number in found.groups()])
    alone, first, both = results
    assert both == pytest.approx([*alone[:2], 2], rel=1e-4)
    assert alone[0] < first[0]
    assert is_png(output / "towers_digits.png")


@pytest.mark.extended
def test_photographs_of_a_folder_have_the_same_bits_on_two_towers(tmp_path: pathlib.Path) -> None:
    random = numpy.random.default_rng(0)
    for name, brightness in (("night", 80), ("day", 200)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, brightness, (40, 50, 3)).astype(numpy.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number:02}.png")
    options = ["--virtual-towers", "2", "--epochs", "2"]
    program = [str(EXAMPLES / "photographs.py"), "--images", str(tmp_path / "images"), *options]
    states, lines = [], []
    for folder in ("one", "two", "two"):
        words = ["mirrored", "run", "--towers", "1" if folder == "one" else "2", *program]
        result = run_command([*words, "--output", str(tmp_path / folder)], code=0)
        states.append(load_file(tmp_path / folder / "checkpoints/step-00000002/tensors.safetensors"))
        lines.append(result.stdout.splitlines()[-1])
    assert "resuming from" in result.stderr
    assert re.fullmatch(r"[0-9.]+% of 8 held-out images are right, with averaged weights [0-9.]+%", lines[0])
    assert lines == [lines[0]] * 3
    weights = [name for name in states[0] if name.startswith(("model/", "average/"))]
    assert len(weights) > 80
    assert all(torch.equal(states[0][name], states[1][name]) for name in weights)
    assert is_png(tmp_path / "two" / "photographs.png")


@pytest.mark.extended
def test_photographs_that_come_with_packages() -> None:
    program = runpy.run_path(str(EXAMPLES / "photographs.py"))
    examples = list(program["cut_photographs"]())
    classes = [{name for _, name, is_held_out in examples if is_held_out == kind} for kind in (False, True)]
    assert classes == [set(program["PLACES"])] * 2
    assert sum(is_held_out for _, _, is_held_out in examples) == 528


@pytest.mark.extended
def test_fine_tuning_keeps_what_is_frozen(tmp_path: pathlib.Path) -> None:
    program = [str(EXAMPLES / "fine_tuning.py"), "--pretraining", "1", "--epochs", "3"]
    found = []
    for folder in ("one", "two", "two"):
        words = ["mirrored", "run", "--towers", "1" if folder == "one" else "2", *program]
        result = run_command([*words, "--output", str(tmp_path / folder)], code=0)
        line = result.stdout.splitlines()[-1]
        match = re.fullmatch(
            r"5 to 9, from 50 pictures: fine-tuned (\S+)%, from scratch (\S+)% of 846 held-out .*", line
        )
        assert match, line
        found.append([float(text) for text in match.groups()])
    assert result.stderr.count("resuming from") == 3
    assert found[0] == pytest.approx(found[1], abs=1)
    assert found[1] == found[2]
    before, after = (
        load_file(tmp_path / "two" / name / "end" / "tensors.safetensors") for name in ("pretrained", "fine_tuned")
    )
    for name in ("0.weight", "1.running_mean", "5.bias"):
        assert torch.equal(before[f"model/convolutions.{name}"], after[f"model/frozen.{name}"])
    assert not torch.equal(before["model/head.1.weight"], after["model/head.1.weight"])
    assert is_png(tmp_path / "two" / "fine_tuning.png")


@pytest.mark.extended
def test_an_evaluator_beside_the_digits(tmp_path: pathlib.Path) -> None:
    words = [str(EXAMPLES / "evaluate_digits.py"), "--epochs", "3", "--output", str(tmp_path)]
    evaluator = start_command(["mirrored", "evaluate", *words])
    run_command(["mirrored", "run", "--towers", "2", *words], code=0)
    output, _ = end_of(evaluator, 0)
    match = re.search(r"best test accuracy ([0-9.]+)% after step (\d+); see", output)
    assert match, output
    assert float(match[1]) >= 80
    assert load_file(tmp_path / "evaluation" / "best" / "model.safetensors")["0.weight"].shape == (32, 1, 3, 3)
    rows = [json.loads(line) for line in (tmp_path / "evaluation" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 69


@pytest.mark.extended
def test_the_digits_are_served_without_mirrored(tmp_path: pathlib.Path) -> None:
    training = ["mirrored", "run", "--towers", "2", str(EXAMPLES / "digits.py"), "--epochs", "2"]
    saved, serving = ["--output", str(tmp_path), "--checkpoints", str(tmp_path)], [str(EXAMPLES / "serve.py")]
    accuracy = re.findall(r"test accuracy \S+ on 360", run_command([*training, *saved], code=0).stdout)[0]
    for weights in (tmp_path / "model.safetensors", tmp_path / "step-00000046"):
        output = tmp_path / f"from-{weights.name}"
        words = ["--weights", str(weights), "--output", str(output)]
        lines = run_program([*serving, *words], code=0).stdout.splitlines()
        assert lines[-1] == "without mirrored"
        kinds = [name for name in ("torch.export", "ONNX") if f"{name}: {accuracy}" in "\n".join(lines)]
        assert kinds == ["torch.export", "ONNX"][: 1 + HAS_ONNX], lines
    with numpy.load(output / "expected.npz") as file:
        expected = dict(file)
    numpy.savez(output / "expected.npz", **{**expected, "logits": expected["logits"] + 0.01})
    result = run_program([*serving, "--serve", "--output", str(output)], code=1)
    assert "torch.export computes something else than the model that was trained" in result.stderr


HELP = """
import os, runpy, sys
import mirrored

mirrored.MirroredStrategy  # loads torch, once for all examples
sys.path.insert(0, os.path.dirname(sys.argv[1]))
for example in sys.argv[1:]:
    print("The help of", example, flush=True)
    if os.fork() == 0:
        sys.argv = [example, "--help"]
        runpy.run_path(example, run_name="__main__")
        raise AssertionError(f"{example} continues after its help")
    assert os.wait()[1] == 0, example
"""


@pytest.mark.extended
def test_help() -> None:
    examples = sorted(str(path) for path in EXAMPLES.glob("*.py") if path.name not in ("recommender.py", "serve.py"))
    _, *helps = run_program(["-c", HELP, *examples], code=0).stdout.split("The help of")
    assert len(helps) == len(examples)
    for text in helps:
        assert "--devices" in text
        assert "--epochs" in text


@pytest.mark.extended
def test_a_failing_worker_ends_the_cluster() -> None:
    program = str(ROOT / "tests" / "programs" / "report.py")
    result = run_command(["mirrored", "cluster", program, "fail"], code=1)
    assert "[worker 1] ValueError: planned failure" in result.stderr


def first_program(page: str) -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)[0]


PROGRAM = first_program("get-started/first-script.md")
EXACT, SAVED = first_program("concepts/same-numbers.md"), first_program("how-to/checkpoints.md")


@pytest.mark.extended
def test_the_scripts_of_the_readme_print_what_it_shows(tmp_path: pathlib.Path) -> None:
    blocks = blocks_of_readme()
    output = re.sub(r"^\$.*\n", "", blocks[1])
    for name, text in scripts_of_readme().items():
        (tmp_path / f"{name}.py").write_text(text)
    one = run_program(["before.py"], cwd=str(tmp_path), code=0)
    assert one.stdout == output.partition("\n")[2]
    for count in (1, 2, 3):
        several = run_command(["mirrored", "run", "--towers", str(count), "train.py"], cwd=str(tmp_path), code=0)
        assert several.stdout == one.stdout
        assert count != 2 or several.stderr.startswith(output.partition("\n")[0])
    report = run_command(["mirrored", "verify", "wrong.py"], cwd=str(tmp_path), code=1).stdout
    assert without_digits(report) == without_digits(re.sub(r"^\$.*\n", "", blocks[3]))


def without_digits(report: str) -> str:
    """Without differences, which are rounding, and whose digits depend on the machine."""
    return re.sub(r"\d\.\de-\d\d", "…", report).strip()


def losses_of(program: str, tmp_path: pathlib.Path) -> list[list[float]]:
    """What the program prints on one and on two towers."""
    script = tmp_path / "train.py"
    script.write_text(program)
    found = []
    one = run_program([str(script)], cwd=str(tmp_path), code=0)
    two = run_command(["mirrored", "run", "--towers", "2", str(script)], cwd=str(tmp_path), code=0)
    for result in (one, two):
        found.append([float(loss) for loss in re.findall(r"epoch \d: loss ([0-9.e-]+)", result.stdout)])
        assert len(found[-1]) == 5
        assert found[-1][-1] < found[-1][0]
    return found


def test_the_first_script_prints_what_its_page_shows(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    page = (ROOT / "docs/get-started/first-script.md").read_text()
    [shown] = re.findall(r"^\$ mirrored run [^\n]*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    result = run_command(["mirrored", "run", "--towers", "2", "train.py"], cwd=str(tmp_path), code=0)
    assert result.stderr + result.stdout == shown


@pytest.mark.extended
def test_what_is_said_about_virtual_towers_gives_the_same_bits(tmp_path: pathlib.Path) -> None:
    first, step = EXACT.split("...\n")
    program = re.sub(r"strategy = .*\n", first, PROGRAM)
    program = re.sub(r"def train_step.*?\n\n\n", step + "\n\n", program, flags=re.DOTALL)
    program = program.replace('    loss = strategy.reduce("sum", loss)\n', "")
    program = program.replace(":.4f}", "!r}")
    assert program.count("strategy.backward(") == 1
    one, two = losses_of(program, tmp_path)
    assert one == two


@pytest.mark.extended
def test_what_is_said_about_checkpoints_goes_on(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM[: PROGRAM.index("for epoch")] + SAVED)
    words = ["mirrored", "run", "--towers", "2", str(script)]
    errors = []
    for _ in range(2):
        result = run_command(words, cwd=str(tmp_path), code=0)
        errors.append(result.stderr)
    assert "resuming from" not in errors[0]
    assert "resuming from results/run/step-00000160 (step 160)" in errors[1]
