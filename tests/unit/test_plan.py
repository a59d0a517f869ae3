"""The plan of an epoch: property tests against plain loops and counts."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_bert.batching import plan

ROWS = st.lists(st.integers(1, 512), max_size=200).map(lambda values: np.array(values, dtype=np.int32))
SOME_ROWS = st.lists(st.integers(1, 512), min_size=1, max_size=60).map(lambda values: np.array(values, dtype=np.int32))
quick = settings(max_examples=60, deadline=None)


def lognormal_lengths(rows: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(np.log(90), 0.6, rows), 5, 512).astype(np.int32)


def flat(parts: list[np.ndarray]) -> list[int]:
    return [int(row) for part in parts for row in part]


@quick
@given(ROWS, st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 8))
def test_every_row_is_in_one_batch_and_only_one_batch_is_short(lengths, global_batch_size, seed, epoch, window):
    batches = plan.global_batches(lengths, global_batch_size=global_batch_size, seed=seed, epoch=epoch, window=window)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    sizes = sorted(map(len, batches), reverse=True)
    whole, rest = divmod(len(lengths), global_batch_size)
    assert sizes == [global_batch_size] * whole + [rest] * (rest > 0)
    assert plan.num_steps(len(lengths), global_batch_size) == len(batches)
    assert all(batch.dtype == np.int64 for batch in batches)


@quick
@given(ROWS, st.integers(1, 40), st.integers(0, 2**31), st.integers(0, 5))
def test_the_same_seed_and_epoch_give_the_same_plan(lengths, global_batch_size, seed, epoch):
    first, second = (
        plan.global_batches(lengths, global_batch_size=global_batch_size, seed=seed, epoch=epoch) for _ in range(2)
    )
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in second]


@pytest.mark.parametrize("lengths", [lognormal_lengths(1000), np.full(1000, 7, dtype=np.int32)])
def test_epochs_and_seeds_group_rows_anew(lengths):
    def groups(seed: int, epoch: int) -> set[frozenset[int]]:
        batches = plan.global_batches(lengths, global_batch_size=10, seed=seed, epoch=epoch, window=8)
        return {frozenset(batch.tolist()) for batch in batches}

    assert len(groups(0, 0) & groups(0, 1)) < 5
    assert len(groups(0, 0) & groups(1, 0)) < 5


def test_lengths_are_sorted_inside_a_window_only():
    lengths = np.arange(6400, dtype=np.int32)
    batches = plan.global_batches(lengths, global_batch_size=10, seed=3, epoch=0, window=64)
    spreads = [int(np.ptp(batch)) for batch in batches]
    # A window of 640 random rows sorted: neighbours are about 10 apart, so a batch spans about 100 of 6400.
    assert 40 < np.mean(spreads) < 200
    # Long and short batches come in no order.
    means = [float(batch.mean()) for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.15
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.15


def test_the_short_batch_is_a_random_sample_at_a_random_place():
    lengths = np.arange(105, dtype=np.int32)
    places, means = [], []
    for epoch in range(200):
        batches = plan.global_batches(lengths, global_batch_size=10, seed=0, epoch=epoch)
        (place,) = [index for index, batch in enumerate(batches) if len(batch) == 5]
        places.append(place)
        means.append(lengths[batches[place]].mean())
    assert set(places) == set(range(11))
    assert 47 < np.mean(means) < 57  # 52 in expectation; the longest rows of a window would give about 100


def test_a_window_of_64_leaves_little_padding_on_lognormal_lengths():
    lengths = lognormal_lengths(60_000)

    def padding(window: int) -> float:
        batches = plan.global_batches(lengths, global_batch_size=32, seed=0, epoch=0, window=window)
        return plan.padding_fraction(batches, lengths)

    assert padding(1) > 0.6
    assert padding(plan.WINDOW) < 0.045


@quick
@given(SOME_ROWS, st.integers(0, 100))
def test_the_union_of_the_shares_is_the_batch_for_any_number_of_workers(lengths, epoch):
    batches = plan.global_batches(lengths, global_batch_size=8, seed=0, epoch=epoch)
    for batch, world_size in itertools.product(batches, (1, 2, 3, 4)):
        shares = plan.deal(batch, lengths, world_size)
        assert len(shares) == world_size
        assert sorted(flat(shares)) == sorted(batch.tolist())
        assert sum(len(share) == 0 for share in shares) == max(0, world_size - len(batch))
        again = plan.deal(batch, lengths, world_size)
        assert [share.tolist() for share in shares] == [share.tolist() for share in again]


@quick
@given(SOME_ROWS, st.integers(1, 9))
def test_shares_differ_by_at_most_the_longest_row(lengths, world_size):
    shares = plan.deal(np.arange(len(lengths)), lengths, world_size)
    tokens = [int(lengths[share].sum()) for share in shares]
    assert max(tokens) - min(tokens) <= lengths.max()


def test_a_huge_row_is_a_share_of_its_own():
    lengths = np.array([10, 10, 512, 10, 10], dtype=np.int32)
    first, second = plan.deal(np.arange(5), lengths, 2)
    assert first.tolist() == [2]
    assert sorted(second.tolist()) == [0, 1, 3, 4]


def fewest_pieces(tokens: list[int], budget: int) -> int:
    """Fewest pieces of a sorted list within the budget, by dynamic programming over all cuts."""
    tokens = sorted(tokens)
    best = [0] + [len(tokens)] * len(tokens)
    for end in range(1, len(tokens) + 1):
        for start in range(end):
            if end - start == 1 or (end - start) * tokens[end - 1] <= budget:
                best[end] = min(best[end], best[start] + 1)
    return best[-1]


@quick
@given(SOME_ROWS, st.integers(1, 2000))
def test_micro_batches_keep_the_budget_and_are_as_few_as_can_be(lengths, budget):
    share = np.random.default_rng(0).permutation(len(lengths))[: -(-len(lengths) // 2)]
    pieces = plan.micro_batches(share, lengths, budget)
    assert sorted(flat(pieces)) == sorted(share.tolist())
    assert all(len(rows) == 1 or len(rows) * lengths[rows].max() <= budget for rows in pieces)
    assert len(pieces) == fewest_pieces(lengths[share].tolist(), budget)
    falling = lengths[flat(pieces)].tolist()
    assert falling == sorted(falling, reverse=True)


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 120))
def test_no_other_cut_has_a_smaller_largest_micro_batch(values, budget):
    lengths = np.array(values, dtype=np.int32)
    pieces = plan.micro_batches(np.arange(len(lengths)), lengths, budget)
    falling = sorted(values, reverse=True)

    def largest(inner: tuple[int, ...]) -> int:
        ends = (0, *inner, len(falling))
        return max((end - start) * falling[start] for start, end in itertools.pairwise(ends))

    cuts = itertools.combinations(range(1, len(falling)), len(pieces) - 1)
    assert max(len(rows) * int(lengths[rows].max()) for rows in pieces) == min(map(largest, cuts))


def test_micro_batches_of_equal_rows_are_even():
    pieces = plan.micro_batches(np.arange(33), np.full(33, 100, dtype=np.int32), 1600)
    assert [len(rows) for rows in pieces] == [11, 11, 11]


def test_a_row_longer_than_the_budget_is_a_micro_batch_by_itself():
    lengths = np.array([5, 500, 5, 5], dtype=np.int32)
    assert [rows.tolist() for rows in plan.micro_batches(np.arange(4), lengths, 16)] == [[1], [0, 2, 3]]


@quick
@given(ROWS, st.integers(1, 5), st.integers(8, 2000))
def test_every_evaluation_row_is_scored_once_over_all_ranks(lengths, world_size, budget):
    shares = [plan.evaluation_share(lengths, rank=rank, world_size=world_size) for rank in range(world_size)]
    pieces = [rows for share in shares for rows in plan.micro_batches(share, lengths, budget)]
    assert sorted(flat(pieces)) == list(range(len(lengths)))
    tokens = [int(lengths[share].sum()) for share in shares]
    assert max(tokens) - min(tokens) <= lengths.max(initial=0)
    assert sum(len(share) == 0 for share in shares) == max(0, world_size - len(lengths))
    for share in shares:
        assert lengths[share].tolist() == sorted(lengths[share].tolist(), reverse=True)


def test_evaluation_micro_batches_hold_little_padding():
    lengths = lognormal_lengths(5000)
    share = plan.evaluation_share(lengths, rank=1, world_size=3)
    assert plan.padding_fraction(plan.micro_batches(share, lengths, 4096), lengths) < 0.05


def test_padding_fraction_is_that_of_a_plain_loop():
    lengths = np.array([3, 5, 2, 8], dtype=np.int32)
    # 2 x 5 and 2 x 8 tokens with padding, 18 real ones.
    assert plan.padding_fraction([np.array([0, 1]), np.array([2, 3])], lengths) == 8 / 26


def test_nothing_to_plan():
    none = np.array([], dtype=np.int32)
    rows = np.array([], dtype=np.int64)
    assert plan.global_batches(none, global_batch_size=4, seed=0, epoch=0) == []
    assert plan.num_steps(0, 4) == 0
    assert [share.tolist() for share in plan.deal(rows, none, 3)] == [[], [], []]
    assert plan.evaluation_share(none, rank=0, world_size=2).tolist() == []
    assert plan.micro_batches(rows, none, 16) == []
    assert plan.padding_fraction([], none) == 0.0


def test_one_row_and_a_batch_larger_than_the_data():
    (batch,) = plan.global_batches(np.array([9]), global_batch_size=32, seed=0, epoch=0)
    assert batch.tolist() == [0]
    assert [share.tolist() for share in plan.deal(batch, np.array([9]), 3)] == [[0], [], []]
    (batch,) = plan.global_batches(np.array([4, 9, 2]), global_batch_size=32, seed=0, epoch=0)
    assert sorted(batch.tolist()) == [0, 1, 2]


def test_unsigned_and_zero_lengths_are_planned_too():
    lengths = np.array([0, 3, 0, 200], dtype=np.uint8)
    assert [share.tolist() for share in plan.deal(np.arange(4), lengths, 4)] == [[3], [1], [0], [2]]
    pieces = plan.micro_batches(np.arange(4), lengths, 400)
    assert sorted(flat(pieces)) == [0, 1, 2, 3]
    assert pieces[0][0] == 3


def test_planning_needs_no_torch():
    code = "import sys, raytrain_bert.batching.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
