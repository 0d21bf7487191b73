"""What the site adds to the documents: the README as its first page, and files outside ``docs`` that pages lead to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the README as index.md, and the examples and other files that pages lead to."""
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"\]\(((?:examples|CONTRIBUTING|CHANGELOG)[^)]*)\)", r"](files/\1)", text)
    files.append(File.generated(config, "index.md", content=text))
    led_to = {"CONTRIBUTING.md", "CHANGELOG.md"} | {f"examples/{file.name}" for file in (ROOT / "examples").glob("*.*")}
    for path in (ROOT / "docs").glob("*.md"):
        led_to |= set(_OUTSIDE.findall(path.read_text()))
    for name in sorted(led_to):
        if (ROOT / name).is_file():
            # As text, whatever they are: a page of the project's own would lack its place in the menu.
            files.append(File.generated(config, f"files/{name}.txt", content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead to those files by the place that they have in the site."""
    markdown = _OUTSIDE.sub(r"](files/\1.txt)", markdown)
    return re.sub(r"\]\(files/([^)]+?)(?<!\.txt)\)", r"](files/\1.txt)", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Docstrings name things by Sphinx's roles; what they name is enough. A notebook's links are those of its file."""
    if page.file.src_uri.endswith(".ipynb"):
        html = re.sub(r'href="([a-z_]+)\.md(#[^"]*)?"', r'href="../\1/\2"', html)
    return re.sub(r":(?:attr|class|data|exc|func|meth|mod):\s*(?=<code)", "", html)
