"""Hooks of mkdocs: files outside of `docs/` become pages too, and links are changed to point to pages of the site.

Links in the repository are relative to their file, so they also work in a viewer of the repository. On the site, a link
to a file that is not a page becomes plain text. The search ranks pages for users above engineering notes.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs removes it again after loading the hooks

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
#: Placeholder in docs/errors.md for the table of all error texts.
ERRORS = "<!-- the table of all error texts goes here -->"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of `PAGES`."""
    from mkdocs.structure.files import File  # imported here, because the tests of `relinked` run without mkdocs

    for source, page in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change links to point to pages of the site, and fill in the table of errors."""
    if any(above.title == "Engineering notes" for above in page.ancestors):
        page.meta.setdefault("search", {"boost": 0.3})
    if ERRORS in markdown:
        markdown = markdown.replace(ERRORS, table())
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, page: str) -> str:
    """Return the text of a page with links that work on the site. Code is not changed."""
    source = next((path for path, name in PAGES.items() if name == page), f"docs/{page}")
    parts = re.split(r"(```.*?```|`[^`\n]*`)", markdown, flags=re.DOTALL)
    # Code in the text of a link must stay in one piece with the link, so code is replaced by placeholders.
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
            return found[0]  # mkdocs reports the missing file
        return text
    link = posixpath.relpath(name, posixpath.dirname(page) or ".")
    return f"{image}[{text}]({link}{'#' + anchor if anchor else ''})"
