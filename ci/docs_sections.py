"""Docstrings for the reference: an extension of griffe, which parses them for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    """``Example:``, which Google's style has, becomes the section ``Examples:``, which griffe shows as code."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called with each module, class, function and attribute, when it has been parsed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
