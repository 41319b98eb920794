"""Every program in README and docs/ runs, every link leads somewhere, every path that is named is there.

A comment above a program says how it runs; without one it is a whole program, which runs on two towers.

* ``within: FILE``: it stands in the middle of a program of tests/docs/within/.
* ``equal: TOLERANCE``: it trains to the parameters of one tower.
* ``run by: python``: as a program of its own, not in towers; ``run by: pytest``: its tests are run.
* ``name: FILE``, ``beside: FILE``: it is a file that another program of the page needs.
* ``needs: PACKAGE``: it is left out where that is not installed.
* ``prints: TEXT``: the chief prints that.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import html.parser
import importlib
import importlib.util
import io
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

import mirrored
import towers
from mirrored import cli
from tests.support.jobs import ROOT, assert_close
from tests.support.programs import run_program

DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")],
    key=lambda path: path.relative_to(ROOT),
)
WITHIN = pathlib.Path(__file__).parent / "within"
FIRST_READ = ("README.md", "first-script.md", "training-step.md", "data.md")
PLACE = "# The document's lines come here.\n"
IMPORTS = "import torch, torch.nn.functional as F, mirrored\nfrom torch import nn\n"
"""What every program of tests/docs/within/ begins with."""

_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_KEY = r"(within|equal|run by|name|beside|needs|prints): "


@dataclasses.dataclass(frozen=True)
class Program:
    """A program in a document, with what the comment above it says of it."""

    document: pathlib.Path
    number: int
    text: str
    words: dict[str, str]

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}-{self.number}"

    def marks(self) -> list[pytest.MarkDecorator]:
        source = self.source()
        long = self.words.get("run by") == "python" or "from transformers " in source or "torch.compile(" in source
        return [pytest.mark.extended] if long or self.document.name not in FIRST_READ else []

    def source(self) -> str:
        if "within" not in self.words:
            return self.text
        before, after = (WITHIN / self.words["within"]).read_text().split(PLACE)
        return IMPORTS + before + self.text + after


def programs_of(document: pathlib.Path) -> list[Program]:
    found = []
    for number, (comment, language, text) in enumerate(_BLOCK.findall(document.read_text()), 1):
        if language == "python":
            parts = re.split(rf"(?:^|, ){_KEY}", comment)
            words = dict(zip(parts[1::2], parts[2::2], strict=True))
            found.append(Program(document, number, text, words))
    return found


PROGRAMS = [program for document in DOCUMENTS for program in programs_of(document)]


_globals: list[dict[str, Any]] = []


def in_towers(source: str) -> tuple[list[torch.Tensor], str]:
    """Run a program in a tower: the parameters of its ``model``, and what it printed.

    Its globals live as long as the process, as a script's do. A DDP model that is freed after its group holds the
    interpreter's lock while it joins Gloo's thread, which may wait for that lock (torch 2.13: hangs for ever).
    """
    variables: dict[str, Any] = {"__name__": "__main__"}
    _globals.append(variables)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, "a document", "exec"), variables)
    model = variables.get("model")
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else []
    return [parameter.detach() for parameter in parameters], printed.getvalue()


@pytest.mark.parametrize("program", [pytest.param(p, id=str(p), marks=p.marks()) for p in PROGRAMS])
def test_a_program_runs(program: Program, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one and on two towers; what stands in a program of ours trains to the same parameters on both."""
    words = program.words
    if "needs" in words and importlib.util.find_spec(words["needs"]) is None:
        pytest.skip(f"{words['needs']} is not installed")
    monkeypatch.chdir(tmp_path)
    if words.get("run by") == "pytest":
        for other in programs_of(program.document):
            if "name" in other.words and other.words["name"] == words.get("beside"):
                (tmp_path / words["beside"]).write_text(repaired(other.text))
        monkeypatch.syspath_prepend(tmp_path)  # towers import what they are to call
        module = f"page_{program.document.stem}_{program.number}"
        (tmp_path / f"{module}.py").write_text(program.text)
        tests = vars(importlib.import_module(module))
        names = [name for name in tests if name.startswith("test_")]
        assert names
        for name in names:
            tests[name]()
        return
    if words.get("run by") == "python":
        (tmp_path / "program.py").write_text(program.source())
        result = run_program(["program.py"], cwd=str(tmp_path), code=0)
        assert words.get("prints", "") in result.stdout
        return
    (first, printed), (second, _) = run_on(2, program, tmp_path)
    assert words.get("prints", "") in printed
    assert_close(first, second, 0)
    if "within" in words or "equal" in words:
        [(one, _)] = run_on(1, program, tmp_path)
        assert one or "within" in words, "there is no model to compare"
        assert_close(first, one, float(words.get("equal", 1e-2 if "autocast" in program.text else 1e-5)))


def run_on(count: int, program: Program, folder: pathlib.Path) -> list[tuple[list[torch.Tensor], str]]:
    """In a folder of its own, so that no run resumes from another's checkpoint."""
    devices = [f"cpu:{i}" for i in range(count)]
    place = folder / f"on-{count}"
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return mirrored.launch(in_towers, (program.source(),), devices=devices)


def test_the_ddp_script_trains_as_the_one_that_replaces_it(tmp_path: pathlib.Path) -> None:
    """As docs/migrate/ddp.md says: on two devices, where both take the examples in one order."""
    trained = []
    for program in programs_of(ROOT / "docs/migrate/ddp.md")[:2]:
        assert program.text.count("shuffle=True") == 1
        ordered = dataclasses.replace(program, text=program.text.replace("shuffle=True", "shuffle=False"))
        (tmp_path / str(len(trained))).mkdir()
        (first, printed), (second, _) = run_on(2, ordered, tmp_path / str(len(trained)))
        assert_close(first, second, 0)
        trained.append((first, printed))
    (before, printed_before), (after, printed_after) = trained
    assert_close(before, after, 1e-5)
    assert printed_before == printed_after
    assert "epoch 2: " in printed_after


def repaired(script: str) -> str:
    """The script of docs/how-to/verify.md without its mistake."""
    right = 'loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))'
    return script.replace("loss = F.cross_entropy(model(x), y)", right)


def test_verify_says_what_its_page_shows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last digits of the table."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/how-to/verify.md").read_text()
    [script] = [p.text for p in programs_of(ROOT / "docs/how-to/verify.md") if p.words.get("name") == "train.py"]
    [shown] = re.findall(r"^\$ mirrored verify train.py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(script)
    report = mirrored.verify("train.py")
    said = f"{report}\n"
    assert report.exit_code == 1
    assert said[said.index("Cause") :] == shown[shown.index("Cause") :]
    losses = re.compile(r"^ +\d+ +\S+", re.MULTILINE)
    assert losses.findall(said) == losses.findall(shown)


def test_the_plan_prints_what_its_page_shows() -> None:
    """Some tables of each command: those that the page shows, as they are printed."""
    page = (ROOT / "docs/project/scaling.md").read_text()
    commands = re.findall(r"^\$ scripts/plan ([^\n]*)\n(.*?)\n^```$", page, re.DOTALL | re.MULTILINE)
    assert len(commands) == 2
    for arguments, shown in commands:
        printed = run_program(["scripts/plan.py", *arguments.split()], cwd=str(ROOT)).stdout.rstrip("\n")
        assert set(shown.split("\n\n")) <= set(printed.split("\n\n")), arguments


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors_of(document: pathlib.Path) -> set[str]:
    """The anchors of a document's headings, as GitHub and mkdocs make them alike."""
    headings = re.findall(r"^#+ (.*)$", without_code(document.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    assert not [heading for heading in words if re.search(r"\s\s|-\s|\s-", heading)], f"{document}: not alike"
    return {word.replace(" ", "-") for word in words}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text())):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.is_file(), f"{document}: {target}"
        assert not anchor or anchor in anchors_of(file), f"{document}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_is_there(document: pathlib.Path) -> None:
    """Also those in code and diagrams: ``towers/gradients/averager.py``, ``tests/test_faults.py::test_name``."""
    text = document.read_text()
    for path, test in re.findall(
        r"(?<![\w/.-])((?:mirrored|towers|tests|scripts|examples|docs)/[\w./-]*\w)(?:::(\w+))?", text
    ):
        assert (ROOT / path).exists(), f"{document}: {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{document}: {path}::{test}"


def test_the_map_names_what_is_there() -> None:
    """Functions beside files in the diagrams, and every package in the map."""
    text = (ROOT / "docs/project/architecture.md").read_text()
    named = re.findall(r"([A-Za-z_][\w.]*)(?:\([^()]*\))? {2,}((?:mirrored|towers)/\S+\.py)\b", text)
    assert len(named) > 25
    for name, path in named:
        source = (ROOT / path).read_text()
        for part in name.split("."):
            assert re.search(rf"\b(?:def|class) {part}\b|^{part}\b.* = ", source, re.MULTILINE), f"{name} in {path}"
    packages = {init.parent for top in ("mirrored", "towers") for init in (ROOT / top).rglob("__init__.py")}
    for package in packages:
        assert f"{package.relative_to(ROOT)}/" in text, package


def test_notes_are_in_the_modules_that_are_named() -> None:
    """``[Note: title] … in `path```, in one paragraph or one line of a list."""
    count = 0
    for document in DOCUMENTS:
        for paragraph in re.split(r"\n\n|\n(?=- )", document.read_text()):
            titles = re.findall(r"\[Note:\s([^\]…]*)\]", paragraph)
            sources = "".join((ROOT / path).read_text() for path in re.findall(r"`([\w/]+\.py)`", paragraph) if titles)
            for title in titles:
                count += 1
                assert f"[Note: {' '.join(title.split())}]" in sources, f"{document}: {title}"
    assert count >= 10


def test_every_note_that_is_cited_begins_a_paragraph_of_one_docstring() -> None:
    sources = "".join(path.read_text() for top in ("mirrored", "towers") for path in (ROOT / top).rglob("*.py"))
    notes = re.findall(r'(?:\n\n|""") *\[Note:\s([^\]]*)\]', sources)
    assert len(notes) == len(set(notes)) > 50
    texts = sources + "".join(document.read_text() for document in DOCUMENTS)
    cited = {re.sub(r"\s+(# )?", " ", title) for title in re.findall(r"\[Note:\s([^\]…]*)\]", texts)}
    assert cited == set(notes)


def test_the_commands_exist() -> None:
    for document in DOCUMENTS:
        for command in re.findall(r"\bscripts/\w+\b(?![./])", document.read_text()):
            path = ROOT / command
            assert path.is_dir() or path.stat().st_mode & 0o100, f"{document}: {command}"
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
    known: dict[str, set[str]] = {}
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(argparse.ArgumentParser, "parse_args", lambda parser, words: note(parser, known))
        cli.main(["--help"])
    text = (ROOT / "docs/reference/commands.md").read_text()
    for command, options in known.items():
        section = text.partition(f"## mirrored {command}")[2].partition("\n## ")[0]
        assert section, f"{command} is not in docs/reference/commands.md"
        assert options == set(re.findall(r"(?<![\w-])(--?[a-z][a-z0-9-]*)", section)) - {"--"}, command


def test_every_script_and_benchmark_is_in_the_reference() -> None:
    text = (ROOT / "docs/reference/commands.md").read_text()
    scripts = {path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix}
    assert scripts == set(re.findall(r"^\| `scripts/(\w+)` \|", text, re.MULTILINE))
    usage = subprocess.run([sys.executable, "scripts/benchmarks"], cwd=ROOT, capture_output=True, text=True).stderr
    [names] = re.findall(r"\{(.*)\}", usage)
    assert sorted(names.split(",")) == sorted(
        re.findall(r"^\| `(\w+)` \|", text.partition("scripts/bench NAME")[2], re.MULTILINE)
    )


def note(parser: argparse.ArgumentParser, known: dict[str, set[str]]) -> None:
    """Note the commands of a parser, and their options."""
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        options = {option for action in command._actions for option in action.option_strings}
        known[name] = options - {"-h", "--help"}
    raise SystemExit


def test_every_row_of_bad_inputs_has_a_test() -> None:
    """Which is marked with its number: ``@pytest.mark.row(42)``."""
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "tests/bad_inputs.md").read_text(), re.MULTILINE)
    assert sorted(map(int, rows)) == list(range(1, 82))
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    marks = re.findall(r"^@pytest\.mark\.row\((.*)\)", tests, re.MULTILINE)
    marked = {int(number) for mark in marks for number in mark.split(", ")}
    assert marked == set(map(int, rows)), marked ^ set(map(int, rows))


def test_every_page_is_in_the_contents_and_in_the_navigation() -> None:
    """GitHub shows docs/contents.md, the site mkdocs.yml."""
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    linked = set(re.findall(r"\]\(([^)#]+\.md)\)", (ROOT / "docs/contents.md").read_text()))
    assert pages - {"contents.md"} <= linked
    assert pages <= set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    shown[shown.index("mirrored.verification.verify.verify")] = "mirrored.verify"  # which is a module's name, too
    assert {name for name in shown if name.startswith("mirrored.") and name.count(".") == 1} == {
        f"mirrored.{name}" for name in mirrored.__all__
    }
    for name in towers.__all__:
        assert f"towers.{name}" in shown or f"mirrored.{name}" in shown, name


@pytest.mark.parametrize(("name", "words"), [("README.md", 900), ("CHANGELOG.md", 1100)])
def test_what_is_read_first_is_short(name: str, words: int) -> None:
    text = (ROOT / name).read_text()
    assert len(without_code(text).split()) <= words
    assert max(map(len, text.splitlines())) <= 120


class Needs(html.parser.HTMLParser):
    """What a page loads when it is opened: scripts, stylesheets, fonts, pictures and frames, but not its links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name == "src" or (tag, name) == ("link", "href")]


@pytest.mark.extended
def test_the_site_builds(tmp_path: pathlib.Path) -> None:
    """Without a warning: links, anchors, docstrings and what the reference names. Its pages need no network."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {page.relative_to(tmp_path / "site").as_posix() for page in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "get-started/first-script.html", "project/changes.html"} <= pages
    reference = {page.stem: page.read_text() for page in (tmp_path / "site/reference").glob("*.html")}
    for method in [name for name in dir(mirrored.Strategy) if not name.startswith(("_", "experimental_"))]:
        assert f'id="mirrored.Strategy.{method}"' in reference["strategies"], method
    assert not [name for name, text in reference.items() if re.search(r":(?:class|func|meth|mod):", text)], "a role"
    assert "compute_average_loss" in (tmp_path / "site/search/search_index.json").read_text()
    assert 'src="../file_worker.js"' in reference["strategies"]
    assert "<code>torch.<wbr>set_<wbr>num_<wbr>threads</code>" in (tmp_path / "site/how-to/devices.html").read_text()
    assert '<div class="language-text highlight columns">' in (tmp_path / "site/project/scaling.html").read_text()
    needed = {address for page in (tmp_path / "site").rglob("*.html") for address in Needs(page.read_text()).addresses}
    assert {address for address in needed if re.match(r"(?:\w+:)?//", address)} == set(), "of the network"
    assert any(re.search(r"assets/javascripts/bundle\.\w+\.min\.js$", address) for address in needed), needed
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"""(?:url\(|@import\s*)["']?(?:\w+:)?//""", style.read_text()), style
    shutil.rmtree(tmp_path / "site")
