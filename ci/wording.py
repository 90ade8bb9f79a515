"""Count wordings that make people read twice, by rule and file, and refuse a change that adds more.

    python3 ci/wording.py                 compare with ci/wording.json; exit status 1 where a count has risen
    python3 ci/wording.py --list RULE     print the places, as FILE:LINE: TEXT
    python3 ci/wording.py --write         record the counts of today
    python3 ci/wording.py --sample SEED   print 40 docstrings of the library and 40 messages, to be read with fresh eyes

The rules are in `RULES`. Python files are read by their syntax tree, pages of the documentation as text. A file without
a record must have no offence. A count that has fallen must be recorded, so that it cannot rise again.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import random
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

__all__ = ["RULES", "compare", "count", "main", "offences"]

Counts = dict[str, dict[str, int]]

ROOT = Path(__file__).resolve().parent.parent
RECORD = "ci/wording.json"
#: Folders and files that are read.
READ = (
    "hyper_parallel",
    "ci",
    "tests",
    "benchmarks",
    "examples",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
#: Files that must contain the words of the rules.
EXCEPT = ("ci/wording.py", "tests/unit/test_wording.py")
#: Largest number of words of a sentence in a docstring.
MOST_WORDS = 20

#: Rule -> its text for messages.
RULES = {
    "openings": "a docstring begins with a verb or a noun, not with What, That, Those, Of, Which or Whether",
    "clauses": "a relative clause has its noun: 'unsharded parameters', not 'what is not sharded'",
    "words": "no nobody, somebody, whoever, alike, 'lies so'; 'next to' or 'outside' for beside",
    "sentences": f"a sentence of a docstring has at most {MOST_WORDS} words",
}

_OPENING = re.compile(r"(?:What|That|Those|Of|Which|Who|Whose|Whether)\b")
_CLAUSE = re.compile(r"\bwhat (?:is|it|the)\b", re.IGNORECASE)
_WORD = re.compile(r"\b(?:nobody|somebody|whoever|alike|lies so|beside)\b", re.IGNORECASE)
_END_OF_SENTENCE = re.compile(r"(?<=[.!?:])\s+")
#: A section of a docstring, a block of code or a table ends its prose.
_NOT_PROSE = re.compile(
    r"\n\s*(?:Examples?|Args|Arguments|Returns|Yields|Raises|Attributes|Source|Sources):|\n\s*={4,}|::\n|\n {4,}\S"
)


def files(root: Path) -> Iterator[Path]:
    """Yield the files that are read, in order."""
    for name in READ:
        path = root / name
        found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".py", ".md"))
        yield from (p for p in found if p.relative_to(root).as_posix() not in EXCEPT)


def offences(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the rule, the line and the words of each offence in a file."""
    text = path.read_text(encoding="utf-8")
    prose = list(_prose(text)) if path.suffix == ".py" else list(enumerate(text.splitlines(), 1))
    for line, words in prose:
        for rule, pattern in (("clauses", _CLAUSE), ("words", _WORD)):
            for found in pattern.finditer(words):
                before = words[: found.start()]
                yield (
                    rule,
                    line + before.count("\n"),
                    " ".join(words[max(0, found.start() - 30) : found.end() + 30].split()),
                )
    if path.suffix != ".py":
        return
    for line, docstring in _docstrings(text):
        if _OPENING.match(docstring):
            yield "openings", line, docstring.splitlines()[0]
        for sentence in _END_OF_SENTENCE.split(_NOT_PROSE.split(docstring)[0]):
            if len(sentence.split()) > MOST_WORDS:
                yield "sentences", line, " ".join(sentence.split())


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment and literal."""
    literals = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in literals:
            yield token.start[0], token.string


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring


def count(root: Path) -> Counts:
    """Return the number of offences in each file, by rule."""
    found: dict[str, Counter[str]] = {rule: Counter() for rule in RULES}
    for path in files(root):
        for rule, _, _ in offences(path):
            found[rule][path.relative_to(root).as_posix()] += 1
    return {rule: dict(sorted(counts.items())) for rule, counts in found.items()}


def compare(recorded: Counts, found: Counts) -> list[str]:
    """Return a line for each count that differs from the record.

    Args:
        recorded: counts by rule and file; a missing file has no offences.
        found: the present counts.
    """
    problems = []
    for rule in RULES:
        before, now = defaultdict(int, recorded.get(rule, {})), defaultdict(int, found.get(rule, {}))
        for file in sorted({*before, *now}):
            if now[file] > before[file]:
                problems.append(f"{file}: {now[file]} of {rule!r}, {before[file]} on record: {RULES[rule]}")
            elif now[file] < before[file]:
                problems.append(f"{file}: {now[file]} of {rule!r}, {before[file]} on record: record it with --write")
    return problems


def sample(root: Path, seed: int, count: int = 40) -> Iterator[str]:
    """Yield random docstrings of the library and random messages of its errors, ``count`` of each."""
    sys.path.insert(0, str(root))
    from ci.error_table import texts  # the other uses do without

    draw = random.Random(seed)
    docstrings = [
        f"{path.relative_to(root)}:{line}: {' '.join(_NOT_PROSE.split(docstring)[0].split())}"
        for path in sorted((root / "hyper_parallel").rglob("*.py"))
        for line, docstring in _docstrings(path.read_text(encoding="utf-8"))
    ]
    messages = [f"{error.path}: {error.kind}: {' '.join(error.text.split())}" for error in texts()]
    yield from draw.sample(sorted(docstrings), count)
    yield from draw.sample(sorted(messages), count)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    parser.add_argument("--list", choices=RULES, metavar="RULE", help=f"print the places of one of: {', '.join(RULES)}")
    parser.add_argument("--write", action="store_true", help=f"record the counts in {RECORD}")
    parser.add_argument("--sample", type=int, metavar="SEED", help="print docstrings and messages to be read")
    arguments = parser.parse_args(argv)
    root = arguments.root
    if arguments.sample is not None:
        print("\n".join(sample(root, arguments.sample)))
        return 0
    if arguments.list:
        for path in files(root):
            for rule, line, words in offences(path):
                if rule == arguments.list:
                    print(f"{path.relative_to(root)}:{line}: {words}")
        return 0
    record, found = root / RECORD, count(root)
    if arguments.write:
        record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    problems = compare(json.loads(record.read_text(encoding="utf-8")), found)
    print("\n".join(problems) or "wording: " + ", ".join(f"{sum(found[rule].values())} of {rule!r}" for rule in RULES))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
