"""``mirrored new``: creates a project with a training script, a test, and files for CI and a container.

The project's files are in ``project/`` next to this module. Each name ends in ``-tpl``, so that no tool treats the file
as part of this package.
"""

from __future__ import annotations

import pathlib
import re

import mirrored

_TEMPLATES = pathlib.Path(__file__).parent / "project"
_SUFFIX = "-tpl"
_NAME = re.compile(r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*")


def create(folder: str) -> list[str]:
    """Writes the project into a new or empty folder. The folder's name becomes the project's name.

    Returns:
        The names of its files, relative to the folder, in order.

    Raises:
        ValueError: the folder's name is not a valid project name, or the folder is not empty or is a file. Nothing was
            written.
        OSError: the operating system does not permit writing there.
    """
    path = pathlib.Path(folder)
    name = path.resolve().name
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be the name of a project, which also names its container image: use letters and digits, "
            "and between them single dots, dashes or underscores"
        )
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"the folder {folder} is not empty: name a new one")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{folder} is a file: name a new folder")
    values = {"@name@": name, "@image@": name.lower(), "@version@": mirrored.__version__}
    names = []
    for template in sorted(each for each in _TEMPLATES.rglob(f"*{_SUFFIX}") if each.is_file()):
        text = template.read_text(encoding="utf-8")
        for word, value in values.items():
            text = text.replace(word, value)
        names.append(str(template.relative_to(_TEMPLATES)).removesuffix(_SUFFIX))
        target = path / names[-1]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return names
