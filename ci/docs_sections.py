"""Extension of griffe, which parses docstrings for mkdocstrings, for the reference."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """Change of the section ``Example:`` of Google's style to ``Examples:``, which griffe shows as code."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute that was just parsed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
