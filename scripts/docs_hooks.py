"""Hooks of mkdocs: they add the README and the other documents of the root to the site.

On GitHub every link works as it is written. In the site, links to the documents of the root lead to their pages, and
links to other files outside docs/ become plain text. Roles in docstrings (``:class:`Strategy```) become links into the
reference. Long names in tables may wrap between their words, and output in columns never wraps. The search works
without a network.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changes.md",
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
}

_LINK = r"\[((?:[^][]|!\[[^]]*\]\([^)]*\))*)\]\(([^)\s#]*)(#[^)\s]*)?\)"
_METHODS = "backward|check_mirrored|distribute_dataset|distribute_datasets_from_function|mirror|run|scope|state_dict"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the documents of the root."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Makes links lead to pages of the site, and removes the comments that only the tests read."""
    place = page.file.src_uri
    source = next((source for source, target in PAGES.items() if target == place), f"docs/{place}")

    def lead(link: re.Match[str]) -> str:
        text, path, anchor = link.groups()
        if re.match(r"\w+:", path) or not path:
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = PAGES.get(file, file.removeprefix("docs/"))
        if target == file:
            return text
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(place) or '.')}{anchor or ''})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)  # every second one is code
    parts[::2] = [re.sub(_LINK, lead, re.sub(r"^<!-- .* -->\n", "", part, flags=re.MULTILINE)) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Make links of the roles in docstrings, where the reference has what they name; say where lines may be broken."""
    html = re.sub(r":(?:class|func|meth|mod|attr|exc|data):<code>([\w.]+)</code>", _link, html)
    html = re.sub(r"<td.*?</td>", _breakable, html, flags=re.DOTALL)
    return re.sub(r'<div class="(language-text highlight)">(.*?)</div>', _in_columns, html, flags=re.DOTALL)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Take the script that the search needs in pages opened as files from the site, not from the network."""
    return _without_network(output, "../" * page.file.src_uri.count("/"))


def on_post_template(output_content: str, **_: Any) -> str:
    """Do so in the pages that no document makes, as that of an error."""
    return _without_network(output_content, "/")


def _without_network(html: str, root: str) -> str:
    return html.replace("https://unpkg.com/iframe-worker/shim", f"{root}file_worker.js")


def _breakable(cell: re.Match[str]) -> str:
    return re.sub(r"(?<=<code>)[^<]{16,}(?=</code>)", _with_places, cell[0])


def _with_places(name: re.Match[str]) -> str:
    humps = re.sub(r"(?<=[a-z])(?=[A-Z])", '<wbr class="narrow">', name[0])
    return re.sub(r"(?<=[._(=/])(?=\w)", "<wbr>", humps)


def _in_columns(output: re.Match[str]) -> str:
    kind = " columns" if re.search(r"\w {3,}\w", output[2]) else ""
    return f'<div class="{output[1]}{kind}">{output[2]}</div>'


def _link(role: re.Match[str]) -> str:
    name = role[1]
    full = f"mirrored.Strategy.{name}" if re.fullmatch(_METHODS, name) else name
    full = full if full.split(".")[0] in ("mirrored", "towers") else f"mirrored.{full}"
    return f'<autoref identifier="{full}" optional><code>{name}</code></autoref>'
