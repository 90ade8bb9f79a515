"""Hooks of mkdocs: files outside of `docs/` become pages too, and links lead to their places on the site.

Links in the repository are relative to the file that has them. So they work wherever it is looked at. A link to a file
that is no page of the site is left out there, and its text stays. The search puts pages for users before engineering
notes.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs takes it back after loading the hooks

from ci.error_table import table  # noqa: E402

#: File of the repository -> page of the site.
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "ci/hardware/README.md": "hardware.md",
    "examples/numpy_backend/README.md": "examples/numpy_backend.md",
    "examples/train_llama/README.md": "examples/train_llama.md",
}
#: Stands in docs/errors.md where the table of all texts goes.
ERRORS = "<!-- the table of all error texts goes here -->"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of `PAGES`."""
    from mkdocs.structure.files import File  # the tests of `relinked` do without

    for source, page in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to pages of the site, and fill in the table of errors."""
    if any(above.title == "Engineering notes" for above in page.ancestors):
        page.meta.setdefault("search", {"boost": 0.3})
    if ERRORS in markdown:
        markdown = markdown.replace(ERRORS, table())
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, page: str) -> str:
    """The text of a page of the site, with links that hold there. Code is left alone."""
    source = next((path for path, name in PAGES.items() if name == page), f"docs/{page}")
    parts = re.split(r"(```.*?```|`[^`\n]*`)", markdown, flags=re.DOTALL)
    # Code in the text of a link must not be split off: join a piece with an open bracket.
    whole, code = "", []
    for i, part in enumerate(parts):
        if i % 2:
            code.append(part)
            whole += f"\0{len(code) - 1}\0"
        else:
            whole += part
    whole = _LINK.sub(lambda found: _link(found, source, page), whole)
    return re.sub(r"\0(\d+)\0", lambda found: code[int(found[1])], whole)


def _link(found: re.Match, source: str, page: str) -> str:
    image, text, target = found.groups()
    path, _, anchor = target.partition("#")
    if "://" in target or not path:
        return found[0]
    there = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    name = PAGES.get(there, there.removeprefix("docs/") if there.startswith("docs/") else None)
    if name is None:
        if not (ROOT / there).exists():
            return found[0]  # mkdocs says that it is not there
        return text
    link = posixpath.relpath(name, posixpath.dirname(page) or ".")
    return f"{image}[{text}]({link}{'#' + anchor if anchor else ''})"
