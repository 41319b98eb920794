"""What mkdocs does beside what mkdocs.yml says: README, CHANGELOG and SECURITY become pages of the site.

On GitHub every link works as it is written. In the site, whose pages are those of docs/ only, the links to these three
lead to their pages. Roles in docstrings (``:class:`Strategy```) become links into the reference. Long names in tables
may be broken between their words, and output in columns is never broken. The search works without a network.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changes.md", "SECURITY.md": "security.md"}

_METHODS = "backward|check_mirrored|distribute_dataset|distribute_datasets_from_function|mirror|run|scope|state_dict"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that lie beside docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        text = re.sub(r"\]\(docs/", "](", text)
        for other, its_page in PAGES.items():
            text = text.replace(f"]({other}", f"]({its_page}")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of docs/ to the pages of these files; leave out what only the tests read."""
    depth = page.file.src_uri.count("/")
    for source, target in PAGES.items():
        markdown = markdown.replace(f"]({'../' * (depth + 1)}{source}", f"]({'../' * depth}{target}")
    return re.sub(r"^<!-- .* -->\n", "", markdown, flags=re.MULTILINE)


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
