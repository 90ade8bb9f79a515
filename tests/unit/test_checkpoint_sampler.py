"""`StatefulDistributedSampler`: every sample once in an epoch, whatever number of ranks goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from hyper_parallel.checkpoint import StatefulDistributedSampler as Sampler


def samplers(size: int, replicas: int, **options: Any) -> list[Sampler]:
    return [Sampler(size, replicas, rank, **options) for rank in range(replicas)]


def draw(samplers: list[Sampler], steps: int | None = None) -> list[int]:
    """The indices that all ranks draw in so many steps, step by step. None draws the rest of the epoch."""
    iterators: list[Iterator[int]] = [iter(s) for s in samplers]
    rows = zip(*(itertools.islice(i, steps) for i in iterators), strict=True)
    return [x for row in rows for x in row]


def test_an_epoch_without_a_break() -> None:
    whole = draw(samplers(12, 1))
    assert sorted(whole) == [*range(12)] and whole != [*range(12)]
    for replicas in (2, 3, 4):
        assert draw(samplers(12, replicas)) == whole
    assert draw(samplers(12, 3, shuffle=False)) == [*range(12)]
    assert draw(samplers(12, 1, seed=1)) != whole
    assert len(Sampler(12, 5, 0)) == 3 and len(Sampler(12, 5, 0, drop_last=True)) == 2
    assert draw(samplers(12, 5)) == [*whole, *whole[:3]]
    assert draw(samplers(12, 5, drop_last=True)) == whole[:10]
    # The order is the same in every release of NumPy.
    assert whole == [0, 2, 11, 9, 1, 8, 5, 4, 3, 10, 6, 7]


@pytest.mark.parametrize(("first", "second"), [*itertools.product((1, 2, 3, 4), repeat=2)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_another_number_of_ranks_goes_on(first: int, second: int, drop_last: bool) -> None:
    """Another number of ranks goes on in the middle of the second epoch."""
    size = 13
    before = samplers(size, first, drop_last=drop_last, seed=3)
    draw(before)
    drawn = draw(before, 2)
    states = [s.state_dict() for s in before]
    assert all(state == states[0] for state in states)
    assert states[0] == {"epoch": 1, "position": 2 * first, "seed": 3, "shuffle": True, "size": size}
    after = samplers(size, second, drop_last=drop_last, seed=9)
    for s in after:
        s.load_state_dict(states[0])
        s.set_epoch(1)
        assert len(s) == ((size - 2 * first) // second if drop_last else -(-(size - 2 * first) // second))
    whole = [int(x) for x in after[0]._order()]
    left = draw(after)
    wanted = whole[2 * first :]
    assert drawn == whole[: 2 * first]
    assert left == (wanted[: len(wanted) // second * second] if drop_last else [*wanted, *whole][: len(left)])
    assert drop_last or (len(left) >= len(wanted) and len(left) < len(wanted) + second)
    # The next epoch is whole again, and another one.
    again = draw(after)
    assert after[0].epoch == 2 and again[: size // second * second] != whole[: size // second * second]
    assert len({*again}) == (size // second * second if drop_last else size)


def test_an_iteration_goes_on_where_the_one_before_ended() -> None:
    sampler = Sampler(10, 1, 0, shuffle=False)
    assert draw([sampler], 4) == [0, 1, 2, 3] and draw([sampler], 2) == [4, 5]
    sampler.set_epoch(0)
    assert draw([sampler]) == [6, 7, 8, 9] and sampler.epoch == 0
    assert draw([sampler], 1) == [0] and sampler.epoch == 1
    sampler.set_epoch(5)
    assert sampler.state_dict()["epoch"] == 5 and draw([sampler], 2) == [0, 1]


def test_a_loader_that_draws_ahead() -> None:
    """The state is that of the used samples; also when the loader has drawn all of the epoch."""
    sampler = Sampler(10, 2, 1, shuffle=False)
    assert draw([sampler]) == [1, 3, 5, 7, 9]
    sampler.set_used(3)
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (0, 6)
    other = Sampler(10, 1, 0)
    other.load_state_dict(state)
    assert draw([other]) == [6, 7, 8, 9]
    assert draw([sampler]) == [7, 9]
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"set_used\({wrong}\): this iteration has drawn 2 samples"):
            sampler.set_used(wrong)


def test_refusals() -> None:
    for arguments in ((10, 2), (10, 2, 2), (10, 2, -1), (0, 1, 0)):
        with pytest.raises(ValueError, match="a sampler"):
            Sampler(*arguments)
    with pytest.raises(ValueError, match="num_replicas and rank, or mesh"):
        Sampler(10, rank=1)
    with pytest.raises(ValueError, match="for 10 samples, and this data set has 11"):
        Sampler([*range(11)], 1, 0).load_state_dict(Sampler(10, 1, 0).state_dict())
