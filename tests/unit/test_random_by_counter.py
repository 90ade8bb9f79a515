"""The counter-based generator against its published answers, in parts, and its need of memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from hyper_parallel.platform.contract import counter
from tests.unit.test_contract import plain

#: (place, key, words) of Philox-2x32-10: the answers that its authors publish with Random123.
ANSWERS = [
    (0, 0, (0xFF1DAE59, 0x6CD10DF2)),
    (0xFFFFFFFF_FFFFFFFF, 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
    (0x85A308D3_243F6A88, 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
]


@pytest.mark.parametrize(("place", "key", "words"), ANSWERS)
def test_published_answers(place: int, key: int, words: tuple[int, int]) -> None:
    found = counter.philox(np.array([place], np.uint64), key, 0)
    assert tuple(int(word[0]) for word in found) == words


@pytest.mark.parametrize("dtype", counter.BITS)
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_a_part_is_a_part_of_the_whole(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str) -> None:
    shape, key = (7, 5, 9), (3, 4)
    whole = counter.numbers(kind, key, shape, [((0, n),) for n in shape], dtype)
    ranges = [((1, 3),), ((0, 2), (3, 1)), ((2, 7),)]
    wanted = whole[1:4][:, [0, 1, 3], 2:]
    for chunk in (counter.CHUNK, 10, 4):
        monkeypatch.setattr(counter, "CHUNK", chunk)
        assert np.allclose(counter.numbers(kind, key, shape, ranges, dtype), wanted, rtol=1e-6, atol=1e-12)
    assert counter.numbers(kind, key, shape, [((0, 0),), (), ((0, 9),)], dtype).shape == (0, 0, 9)
    assert counter.numbers(kind, key, (), (), dtype).shape == ()
    if kind == "uniform":
        assert 0 <= whole.min() < whole.max() < 1
        assert np.array_equal(whole * 2.0 ** counter.BITS[dtype] % 1, np.zeros(shape))


def test_memory() -> None:
    """The memory for a part of 4 MiB of a tensor of 4 TiB."""
    tracemalloc.start()
    try:
        counter.numbers("normal", (1, 2), (1 << 20, 1 << 20), [((7, 1),), ((0, 1 << 20),)], "float32")
        assert tracemalloc.get_traced_memory()[1] < 20 << 20  # the part, places along the last dimension, and a block
    finally:
        tracemalloc.stop()


def test_what_the_verbs_answer_of_themselves() -> None:
    platform: Any = plain()
    with pytest.raises(TypeError, match="draws no numbers of"):
        platform.numbers_by_counter("uniform", np.zeros(4, np.float32), (2,), [((0, 2),)], np.dtype("float32"))
    made: dict[str, Any] = {
        "dtypes": {"float32": np.dtype("float32"), "float64": np.dtype("float64")},
        "bytes_of": lambda x: x.tobytes(),
        "from_bytes": lambda values, shape, dtype: np.frombuffer(values, dtype).reshape(shape),
        "to_dtype": lambda x, dtype: x.astype(dtype),
        "factory": lambda name, shape, fill, dtype: np.full(shape, 0.25, dtype),
    }
    vars(platform).update(made)
    key = platform.counter_key()
    assert (key.shape, key.dtype) == ((4,), np.float32)
    found = platform.numbers_by_counter("uniform", key, (3, 4), [((1, 2),), ((0, 4),)], np.dtype("float64"))
    words = counter.words_of(key)
    assert words == (0x40004000, 0x40004000)
    assert np.array_equal(found, counter.numbers("uniform", words, (3, 4), [((1, 2),), ((0, 4),)], "float64"))
