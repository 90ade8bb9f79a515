"""The text: Python's own standard library, one byte a token."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_EVERY = 20
"""One file in this many is kept for validation."""


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and bytes of other files to validate on."""

    train: np.ndarray
    validation: np.ndarray


def standard_library_files() -> list[Path]:
    """Source files of the standard library, without its tests, in an order that never changes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in files if not SKIPPED_FOLDERS.intersection(path.parts))
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def load_corpus() -> Corpus:
    """Read the standard library and split it by file."""
    texts = [path.read_bytes() for path in standard_library_files()]
    if len(texts) < HELD_OUT_EVERY:
        raise RuntimeError("the source text of Python's standard library is not on this machine")
    held_out = b"\n".join(texts[::HELD_OUT_EVERY])
    del texts[::HELD_OUT_EVERY]
    return Corpus(np.frombuffer(b"\n".join(texts), np.uint8), np.frombuffer(held_out, np.uint8))


def _windows(text: np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (the inputs moved by one byte), each (len(starts), length), int32."""
    window = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return window[:, :-1], window[:, 1:]


def training_batch(corpus: Corpus, step: int, batch_size: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of one step, a function of the seed and the step alone."""
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(corpus.train) - length, size=batch_size)
    return _windows(corpus.train, starts, length)


def validation_windows(corpus: Corpus, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of evenly spread windows of the held-out files."""
    starts = np.linspace(0, len(corpus.validation) - length - 1, count).astype(np.int64)
    return _windows(corpus.validation, starts, length)


def unigram_entropy(text: np.ndarray) -> float:
    """Bits per byte of the best predictor that looks at no context."""
    counts = np.bincount(text.reshape(-1))
    frequencies = counts[counts > 0] / text.size
    return float(-(frequencies * np.log2(frequencies)).sum())
