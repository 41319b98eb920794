"""Does ``mirrored.verify`` name what makes N towers differ from one? Each script holds one planted mistake."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from torch import nn

import mirrored
from mirrored.interceptor import interceptor
from mirrored.verification import Cause, VerificationReport
from tests.support.programs import run_command, run_program
from tests.verification.scripts import PROGRAMS, SCRIPTS, script_in


def line_of(script: pathlib.Path, text: str) -> int:
    """The number of the one line of a script that contains ``text``."""
    [number] = [number for number, line in enumerate(script.read_text().splitlines(), start=1) if text in line]
    return number


def plain(report: VerificationReport) -> str:
    """The report's text in one line."""
    return re.sub(r"\s+", " ", str(report))


@pytest.fixture(autouse=True)
def without_a_seed_of_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one, strings have the same hashes in all processes."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


_CODES = {
    "error everywhere": 3,
    "error on one": 3,
    "no training": 2,
    "no gradients": 2,
    "from the clock": 2,
    "random order": 2,
}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "words", "place"),
    [
        # Uneven shares with a plain mean, row 35 of tests/bad_inputs.md.
        ("local mean", "In step 5 the batch of 3 is split into shares of 2 and 1", "loss.backward()"),
        ("sum", "the sum of 4 values, and averaging the gradients divides by", "loss.backward()"),
        ("sum and penalty", "by the number of towers: all 5 steps are equal", "loss.backward()"),
        ("sum over global", "the sum of 4 values, divided by 8, and", "loss.backward()"),
        ("divided twice", "divided by 4, divided by 2, and averaging", "num_replicas_in_sync"),
        ("shared stream", "at step 1 dropout", "model(x)"),
        ("outside scope", "Linear.scale was created outside strategy.scope() (line {})", "model.scale = "),
        ("changed on one tower", "tower 0 alone changes Sequential.2.weight", "clamp_"),
        ("sharded twice", "has 24 examples on each of 2 towers, but 48 on one", "inputs[strategy"),
        ("sharded in step", "the model receives 4 examples on 2 towers, but 8 on one", "own = slice("),
        ("evaluation padded", "after step 3 (line {}) takes 12 examples on 2", "for x, y in test]"),
        (
            "evaluation drops",
            "after step 1 (line {}) takes 10 examples on 2 towers, 11 on one: 1 left out",
            "for x, y in test]",
        ),
        ("learning rate", "of step 1 is 0.2 on 2 towers, but 0.1 on one", "lr=0.1"),
        ("step before averaging", "before the gradients are averaged", "optimizer.step()"),
        ("schedule", "ExponentialLR has made 2 steps by then, on one tower 1", "num_replicas_in_sync"),
        ("batch norm of 26", "a share is a single example", "with strategy.scope()"),
        ("error everywhere", "on one tower, too (line {}): ValueError: planned failure", "planned failure"),
        ("error on one", "fails on one tower (line {}), but not on 2", "planned failure"),
        ("error on towers", "on 2 towers tower 1 fails (line {}): ValueError: planned", "planned failure"),
        ("death", "the run on 2 towers ended before its time: the process of tower 1 ended with", None),
        ("no towers", "calls strategy.run of no strategy with 2 towers", None),
        ("no training", "makes no step of an optimizer", None),
        ("from the clock", "two runs on one tower differ, too", None),
        (
            "full batches",
            "16 examples on 2 towers, 8 on one: each tower takes a batch of the full",
            "data, 8, sampler=",
        ),
        ("gradient on one tower", "where its gradient is not the same on all towers", "if strategy.is_chief"),
        ("change and fail", "tower 0 alone changes Sequential.0.bias after step 1", None),
        ("epochs", "12 steps on one tower, 6 on 2", "4 // strategy"),
        ("mean of shares", "add up: strategy.reduce('sum', loss)", 'strategy.reduce("mean"'),
        ("random order", "randperm (line {}) draws random numbers inside run", "randperm"),
        ("spread of the share", "the result of std (line {}) depends on which examples", "losses.std()"),
        (
            "normalised by hand",
            "the result of one of std (line {0}), mean (line {0}) depends on which examples",
            "x.mean(0)",
        ),
        ("counts of the share", "the result of bincount (line {}) depends on which examples", "bincount"),
        ("ratio of sums", "the result of sum (line {}) depends on which examples", "losses * positive"),
        ("variance as a penalty", "the result of var (line {}) depends on which examples", "output.var()"),
        ("worst of the share", "the result of max (line {}) depends on which examples", ".max()"),
        ("hardest of the share", "Ruled out: the examples are the same; the towers' parameters are equal", None),
        ("weights above", "draws its own random numbers above the strategy (line {})", "true = torch.randn"),
        ("split above", "draws its own random numbers above the strategy (line {})", "random.shuffle(order)"),
        ("order of a set", "not the same if strings have other hashes, as on two hosts", "list(set(names))"),
        ("numbers of hashes", "not the same if strings have other hashes, as on two hosts", "key=hash"),
        ("sum by hand", "the sum of 4 values, and averaging the gradients divides by", "loss.backward()"),
        ("hidden by rounding", "In step 1 the batch of 13 is split into shares of 7 and 6", "loss.backward()"),
        ("prints a share", "seems to be computed from this tower's share only", "print('loss'"),
        ("prints a count", "seems to be computed from this tower's share only", "print(f"),
        ("writes a share", "into table.csv (line {}) after step 1 on 2 towers", "table.writerow"),
        ("saves a share", "into last.pt (line {}) after step", "torch.save"),
        ("writes a share for TensorBoard", "into TensorBoard (line {}) after step 1 on 2 towers", "add_scalar"),
        ("draws a share", "into losses.png (line {}) after step 3 on 2 towers", "plt.savefig"),
        ("writes an average of shares", "into loss.json (line {}) after step", "file.write_text"),
        ("momentum by towers", "the momentum of step 1 is 1 on 2 towers, but 0.5 on one", "momentum=0.5"),
        ("betas by towers", "the betas[1] of step 1 is 0.9985 on 2 towers, but 0.999 on one", "betas="),
        ("own loss decides", "the learning rate is 0.", "optimizer.step()"),
        ("ends by its own loss", "tower 1 ends the script after 11 steps (line {})", "sys.exit"),
        ("divided by hand", "averaged it to one tower's, and the script then changes it", "/= strategy"),
        ("summed by hand", "otherwise than on one tower, by an assignment (line {})", "all_reduce"),
        ("clipped by towers", "than on one tower, by _foreach_mul_ (line {})", "clip_grad_norm_"),
        ("no gradients", "all gradients are zero or missing in all steps", None),
    ],
)
def test_a_planted_mistake_is_named(script: str, words: str, place: str | None, tmp_path: pathlib.Path) -> None:
    path = script_in(tmp_path, script)
    report = mirrored.verify(path, steps=SCRIPTS[script].steps)
    text = plain(report)
    assert report.causes == SCRIPTS[script].causes, text
    assert SCRIPTS[script].words in text
    assert report.exit_code == _CODES.get(script, 1)
    line = None if place is None else line_of(path, place)
    assert words.format(line) in text
    assert place is None or re.search(rf"lines? ([\d, ]+, )?{line}\b", text), text
    assert [f"Cause [{cause.value}]" in text for cause in report.causes] == [True]


FIRST = {"steps": 1}
CUT = "In step {} the batch of {} is split into shares of {}"
UNEVEN = CUT.format(5, 3, "2 and 1")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "settings", "cause", "words"),
    [
        ("local mean", {"towers": 3, **FIRST}, Cause.LOCAL_MEAN, CUT.format(1, 8, "3, 3 and 2")),
        ("ragged", {"exact": True}, Cause.ROUNDING, "differs in its last bits only"),
        # What does not look like a mistake.
        ("right_but half, local mean", {}, Cause.LOCAL_MEAN, UNEVEN),
        ("right_but step outside", {}, Cause.LOCAL_MEAN, UNEVEN),
        (
            "right_but gumbel",
            {},
            Cause.RANDOM_IN_RUN,
            "the same on any number of virtual towers (docs/how-to/recipes.md#mixup)",
        ),
        ("right_but integers", {}, Cause.REPORTED_VALUE, "gives 1000002 on 2 towers, but 1000000 on one"),
        ("right_but more entries", {}, Cause.REPORTED_VALUE, "gives 3 values on 2 towers, but 2 on one"),
        # What shows in the first step.
        ("sequences token means", FIRST, Cause.LOCAL_MEAN, "In step 1 the towers divide theirs by"),
        ("sequences padded means", FIRST, Cause.PADDING, "one tower pads the batch to"),
        ("clip while accumulating", FIRST, Cause.CHANGED_BEFORE_AVERAGING, "changes gradients of no_sync"),
        ("averaged by the chief", FIRST, Cause.CHANGED_ON_ONE_TOWER, "the towers evaluate AveragedModel after step 1"),
        ("buffers of its own", FIRST, Cause.BUFFER, "Sequential.0.mean after step 1 differs from one tower's"),
    ],
)
def test_a_cause_is_named(
    script: str, settings: dict[str, Any], cause: Cause, words: str, tmp_path: pathlib.Path
) -> None:
    name, _, kind = script.partition(" ") if script not in SCRIPTS else (script, "", "")
    report = mirrored.verify(script_in(tmp_path, name), [kind] if kind else [], **settings)
    assert report.causes == (cause,), report
    assert words in plain(report)


def test_batch_norm_on_local_statistics_is_named(tmp_path: pathlib.Path) -> None:
    report = mirrored.verify(script_in(tmp_path, "batch norm of 28"))
    assert report.causes == (Cause.BATCH_NORM,), report
    assert "batch norm (Sequential.1) takes the statistics of each tower's own examples" in plain(report)
    assert "sync_batch_norm=True" in plain(report)
    assert "statistics of all towers' examples: all 5 steps are equal" in plain(report)


def test_two_mistakes_are_both_named(tmp_path: pathlib.Path) -> None:
    report = mirrored.verify(script_in(tmp_path, "two mistakes"))
    assert report.causes == (Cause.SUM_LOSS, Cause.LEARNING_RATE), report
    assert "multiplied by the number of towers: step 1 is equal" in plain(report)
    assert "one tower's settings of the optimizer: all 3 steps are equal" in plain(report)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "steps", "compared", "words"),
    [
        ("ragged", 5, 5, "and so are the 5 results that are reduced or gathered"),
        ("right_everything", 5, 5, "Dropout is left out of both runs"),
        ("two models", 5, 10, "Adam 1"),
        ("padded", 5, 5, "The same"),
        ("restarts", 5, 5, "The same"),
        ("noise", 5, 5, "Random numbers that run draws are one stream"),
        ("steps by hand", 3, 3, "The same"),
        ("seeded above", 2, 2, "The same"),
        ("order of a sorted set", 2, 2, "The same"),
        ("prints what may differ", 5, 5, "The same"),
        ("writes the whole", 5, 5, "The same"),
        ("evaluated by the chief", 5, 5, "The same"),
    ],
)
def test_a_right_script_is_called_so(
    script: str, steps: int, compared: int, words: str, tmp_path: pathlib.Path
) -> None:
    report = mirrored.verify(script_in(tmp_path, script), steps=steps)
    assert report.causes == (), report
    assert report.exit_code == 0
    assert len(report.rows) == compared
    assert "The same: losses, gradients and parameters are equal within 0.0001" in plain(report)
    assert words in plain(report)
    losses = [row.loss for row in report.rows if row.loss != (None, None)]
    assert len({loss for loss, _ in losses}) == len(losses) == steps  # something was trained
    assert not interceptor().compares  # nothing is left in the process that compares
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("half", "All runs computed in float64"),
        ("stack and time first", "Random numbers that run draws are one stream"),
        ("mean and next", "Not reached: verify ends the script when it tries to continue after 5 steps"),
        ("mean and count", "Cannot tell: the script ends in AssertionError (line {count})"),
        ("catch all", "Cannot tell: the script ends in SystemExit (line {catch}), on one tower as on 2. The rest"),
        ("times", "and so are the 10 results"),
    ],
)
def test_what_only_looks_like_a_mistake(kind: str, words: str) -> None:
    report = mirrored.verify(PROGRAMS / "right_but.py", [kind])
    assert report.causes == (), report
    assert report.exit_code == (2 if words.startswith("Cannot tell") else 0)
    assert len(report.rows) == 5
    places = {"count": "assert seen", "catch": "sys.exit"}
    lines = {name: line_of(PROGRAMS / "right_but.py", text) for name, text in places.items()}
    assert words.format(**lines) in plain(report)


@pytest.mark.extended
def test_rounding_alone_is_the_same_in_float64(tmp_path: pathlib.Path) -> None:
    report = mirrored.verify(script_in(tmp_path, "rounding alone"), steps=1)
    assert report.causes == (), report
    assert report.exit_code == 0
    assert report.float64
    assert len(report.rows) == 1
    assert max(row.gradients[0] for row in report.rows) < 1e-8


def test_rounding_beyond_the_tolerance_is_no_mistake() -> None:
    report = mirrored.verify(PROGRAMS / "right_but.py", ["mean"], tolerance=1e-8)
    assert report.equal, report
    assert report.float64
    assert report.rounding is None
    assert max(row.gradients[0] for row in report.rows) < 1e-12


def test_a_batch_that_every_tower_takes_whole_is_right_but_told(tmp_path: pathlib.Path) -> None:
    report = mirrored.verify(script_in(tmp_path, "whole batches everywhere"), steps=2)
    assert report.equal
    assert "Every tower was given the whole batch" in plain(report)


def test_virtual_towers_are_equal_to_the_bit(tmp_path: pathlib.Path) -> None:
    report = mirrored.verify(script_in(tmp_path, "virtual towers"), exact=True)
    assert report.causes == (), report
    assert "The same: gradients and parameters are equal to the bit, and so are the 5 results" in plain(report)
    assert not report.dropouts  # nothing is left out


@pytest.mark.parametrize("way", ["local steps", "compression"])
def test_other_ways_of_averaging_are_left_out_which_is_said(tmp_path: pathlib.Path, way: str) -> None:
    report = mirrored.verify(script_in(tmp_path, way), steps=2)
    assert report.equal
    assert "synchronize= or compression= is ignored, and its effect is not compared" in plain(report)


def test_the_command() -> None:
    script = str(PROGRAMS / "right_but.py")
    result = run_command(["mirrored", "verify", "--towers", "2", "--steps", "2", script, "integers"], code=1)
    assert result.stdout.startswith(f"{script} on 1 tower and on 2: 2 steps compared within 0.0001\n")
    assert "Cause [reported-value]" in result.stdout
    assert result.stderr == ""  # what the script and its towers say is not shown


@pytest.mark.extended
def test_a_run_that_leaves_nothing_to_compare(tmp_path: pathlib.Path) -> None:
    script, program = tmp_path / "endless.py", tmp_path / "unguarded.py"
    script.write_text("import signal\nsignal.pause()\n")
    report = mirrored.verify(script, timeout=2)
    assert report.causes == (Cause.FAILS_ON_ONE,)
    assert "the run on 1 tower was not done after 2 s." in plain(report)
    assert "give each run more time (timeout)" in plain(report)
    program.write_text(f"import mirrored\nprint(mirrored.verify({str(script)!r}))\n")
    text = " ".join(run_program([str(program)], code=0).stdout.split())
    assert "the process of tower 0 ended with exit code 1 before fn had returned" in text
    assert "Fix: start the script without verify to see why it ends; a program that calls mirrored.verify needs" in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere.py"], "the file nowhere.py does not exist"),
        (["--towers", "1", __file__], "towers is 1, but one tower is compared with at least 2"),
        (["--steps", "0", __file__], "steps is 0, but must be at least 1"),
        (["--tolerance", "-1", __file__], "tolerance is -1.0, but must not be negative"),
        (["--devices", "cpu:0", __file__], "towers is 2, but devices names 1"),
        (["--timeout", "0", __file__], "timeout is 0.0, but must be more than 0"),
        (["tests"], "the file tests does not exist"),
        (["-m", "mirrored.nowhere"], "the module mirrored.nowhere does not exist"),
        (["--exakt", __file__], "unrecognized arguments: --exakt"),
    ],
)
def test_wrong_usage_is_code_2(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    from mirrored.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["verify", *words])
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.extended
@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["-momentum", "0.9", "--steps", "2", "-x", "--exact"], "--steps, --exact after {} is passed to the script"),
        (["--steps=2"], "--steps=2 after {} is passed to the script; options of mirrored verify come before it"),
        (["--devices", "cpu", "--show-output"], "--devices, --show-output after {} is passed to the script"),
        (["--lr", "1"], ""),
        (["--", "--lr", "2"], ""),
    ],
)
def test_what_follows_the_script_is_the_scripts(words: list[str], note: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nraise ValueError(sys.argv[1:])\n")
    result = run_command(["mirrored", "verify", "--towers", "3", str(script), *words], code=3)
    assert f"ValueError: {words[words[0] == '--' :]}" in result.stdout
    assert (note.format(script) in result.stderr) if note else (result.stderr == "")


@pytest.mark.extended
@pytest.mark.parametrize(
    "kind",
    ["checkpoint", "pickle", "epoch", "log", "data", "memory map", "mean", "data base", "descriptor", "process"],
)
def test_runs_that_go_on_from_files_of_each_other_are_not_compared(kind: str, tmp_path: pathlib.Path) -> None:
    report = mirrored.verify(PROGRAMS / "keeps_files.py", [kind, str(tmp_path)], steps=2)
    assert report.causes == (Cause.NOT_COMPARABLE,), report
    assert report.exit_code == 2
    assert f"did not start from the same state: {tmp_path / 'kept'}." in plain(report)
    assert "The same" not in plain(report)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["writes only", "appends only"])
def test_files_that_no_run_reads_are_no_obstacle(kind: str, tmp_path: pathlib.Path) -> None:
    report = mirrored.verify(PROGRAMS / "keeps_files.py", [kind, str(tmp_path)], steps=2)
    assert report.causes == (Cause.SUM_LOSS,), report


def test_files_from_before_are_read_by_all_runs_alike(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kept").write_text("a step\na step\n")
    report = mirrored.verify(PROGRAMS / "keeps_files.py", ["log that stays", str(tmp_path)], steps=2)
    assert report.causes == (Cause.SUM_LOSS,), report
