"""Nothing that is read from disk or from the wire is run: no pickle and nothing like it in our code.

There are four exceptions. The contract of ``towers/launching/starting/launch.py`` is to send the caller's own function
and its results between the caller's own processes, over pipes that they inherit; functions from notebook cells go by
cloudpickle. ``mirrored/parameter_server/servers.py`` sends functions to the job's own actors, by Ray's channels.
``towers/launching/starting/fork_server.py`` runs the user's own program, as Python does. ``mirrored/__init__.py``
imports modules when their names are first used, from its own table.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.jobs import ROOT

MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "pickletools"}
OF_TORCH_AND_NUMPY = {"save", "load"}
CALLS = {"eval", "exec", "compile", "__import__", "import_module"}
ANYWHERE = {
    # c10d's collectives of objects, and multiprocessing's ways to send them
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "Pipe", "Queue", "SimpleQueue", "JoinableQueue", "Manager", "Client"),
    *("Listener", "allow_pickle"),
}
MAY = {
    ROOT / "towers" / "launching" / "starting" / "launch.py": "pickle",
    ROOT / "mirrored" / "parameter_server" / "servers.py": "pickle",
    ROOT / "towers" / "launching" / "starting" / "fork_server.py": "exec",
    ROOT / "mirrored" / "__init__.py": "import_module",
    ROOT / "mirrored" / "verification" / "files.py": "save",  # it observes the script's own calls
}


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            if module == "queue":  # between threads
                continue
            names = [alias.name for alias in node.names if alias.name in ANYWHERE | MODULES | {"import_module"}]
            names += [module] if module in MODULES else []
            names += [alias.name for alias in node.names if module == "torch" and alias.name in OF_TORCH_AND_NUMPY]
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            data = owner in ("torch", "np", "numpy") and node.attr in OF_TORCH_AND_NUMPY
            named = node.attr in ANYWHERE | {"import_module"} and owner != "queue"
            names = [node.attr] if data or named else []
        elif isinstance(node, ast.keyword):
            names = [node.arg] if node.arg in ANYWHERE else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [node.func.id] if node.func.id in CALLS | ANYWHERE else []
        else:
            continue
        yield from (f"line {node.lineno}: {name}" for name in names)  # type: ignore[attr-defined]


SOURCES = sorted([*(ROOT / "towers").rglob("*.py"), *(ROOT / "mirrored").rglob("*.py")])


def test_no_code_of_ours_unpickles_or_runs_data() -> None:
    found = {
        str(path.relative_to(ROOT)): said
        for path in SOURCES
        if path not in MAY and (said := list(findings(ast.parse(path.read_text()))))
    }
    assert found == {}
    assert len(SOURCES) > 100


def test_the_exception_is_needed() -> None:
    for path, name in MAY.items():
        assert any(name in said for said in findings(ast.parse(path.read_text()))), path


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "def f():\n    import marshal",
        "import shelve",
        "torch.load(path, weights_only=True)",
        "torch.save(x, path)",
        "from torch import load",
        "np.load(path)",
        "numpy.lib.format.read_array(file, allow_pickle=True)",
        "dist.broadcast_object_list(objects)",
        "dist.all_gather_object",
        "from torch.distributed import gather_object",
        "multiprocessing.Pipe()",
        "from multiprocessing import Queue",
        "eval(text)",
        "exec(compile(text, 'x', 'exec'))",
        "importlib.import_module(name)",
        "__import__('pickle')",
    ],
)
def test_what_is_looked_for_is_found(text: str) -> None:
    assert list(findings(ast.parse(text)))


def test_what_only_sounds_like_it_is_let_through() -> None:
    text = (
        "model.eval()\ntorch.compile(model)\nre.compile(x)\nself.load(x)\nsafetensors.torch.load_file(x)\njson.loads(x)\n"
        "queue.Queue()\nfrom queue import Queue"
    )
    assert list(findings(ast.parse(text))) == []


def test_launch_reads_pickles_where_its_own_processes_answer_only() -> None:
    """What reads a pickle in launch.py reads it from a pipe to a process that launch itself has started."""
    tree = ast.parse((ROOT / "towers" / "launching" / "starting" / "launch.py").read_text())
    readers = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in ("loads", "load", "recv", "recv_bytes")
        if ast.unparse(node) != "json.loads"
    }
    assert readers == {"_be_tower", "_describe", "exit_code_of", "launch_from_new_process"}
