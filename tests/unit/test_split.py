"""The seeded stratified split keeps shares, duplicates and seeds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_bert.data.split import TEST, TRAIN, VALIDATION, stratified_split

FRACTIONS = {VALIDATION: 0.1, TEST: 0.1}


@given(st.integers(0, 400), st.integers(1, 6), st.integers(1, 60), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_duplicates_stay_on_one_side(rows: int, classes: int, distinct: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, groups = rng.integers(0, classes, rows), rng.integers(0, distinct, rows)
    split = stratified_split(labels, groups, FRACTIONS, seed)
    assert split.shape == (rows,)
    for group in np.unique(groups):
        assert len(np.unique(split[groups == group])) == 1


@given(st.lists(st.integers(3, 300), min_size=1, max_size=6), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_each_class_gives_its_share_to_the_nearest_row(sizes: list[int], seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    split = stratified_split(labels, np.arange(len(labels)), FRACTIONS, seed)
    for label, size in enumerate(sizes):
        for part in (VALIDATION, TEST):
            got = int(((split == part) & (labels == label)).sum())
            assert got >= 1
            assert abs(got - max(1, 0.1 * size)) <= 1
        assert ((split == TRAIN) & (labels == label)).any()


def test_same_seed_same_split_and_other_seed_other_split() -> None:
    labels, groups = np.arange(500) % 3, np.arange(500)
    first, second, third = (stratified_split(labels, groups, FRACTIONS, seed) for seed in (1, 1, 2))
    assert (first == second).all()
    assert (first != third).any()


def test_a_class_of_one_row_stays_in_training() -> None:
    labels = np.array([0] * 30 + [1])
    split = stratified_split(labels, np.arange(31), FRACTIONS, 0)
    assert split[30] == TRAIN


def test_a_text_repeated_too_often_stays_in_training() -> None:
    labels, groups = np.zeros(100, int), np.array([0] * 45 + list(range(1, 56)))
    for seed in range(20):
        split = stratified_split(labels, groups, FRACTIONS, seed)
        assert (split[:45] == TRAIN).all()
        assert 9 <= (split == VALIDATION).sum() <= 11
        assert 9 <= (split == TEST).sum() <= 11


def test_splits_of_repeated_texts_keep_near_their_share() -> None:
    groups = np.concatenate([np.zeros(60, int), np.arange(1, 341)])
    labels = np.arange(400) % 2
    labels[:60] = 0
    for seed in range(50):
        split = stratified_split(labels, groups, FRACTIONS, seed)
        assert 35 <= (split == VALIDATION).sum() <= 45
        assert 35 <= (split == TEST).sum() <= 45
