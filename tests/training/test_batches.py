"""A request as global batches: literal rows, masks and targets."""

import numpy as np

from guerdon.critic_core import TrainRequest
from guerdon.training.critic_trainer import global_batches

NAN = np.nan


def request(mask: list[list[float]]) -> TrainRequest:
    """Tokens 0, 1, 2, ...; prev_values -t and returns t at index t, NaN where nothing counts."""
    m = np.array(mask, np.float32)
    tokens = np.arange(m.shape[0] * (m.shape[1] + 1)).reshape(m.shape[0], -1)
    ramp = np.broadcast_to(np.arange(m.shape[1], dtype=np.float32), m.shape)
    return TrainRequest("r", tokens, np.where(m > 0, ramp, NAN), np.where(m > 0, -ramp, NAN), m)


def test_a_row_ends_with_its_last_token_that_counts() -> None:
    (batch,) = global_batches(request([[0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0.5]]), 3)
    rows, targets = batch.read(with_action=False)
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3], [6], [12, 13, 14, 15, 16]]
    np.testing.assert_array_equal(targets[0], [[NAN, -1, NAN, -3], [NAN, 1, NAN, 3], [0, 1, 0, 1]])
    np.testing.assert_array_equal(targets[1], [[-0.0], [0], [1]])
    assert (batch.sum_mask, batch.num_tokens) == (3.5, 4)


def test_the_action_is_kept_if_the_length_of_a_row_matters() -> None:
    (batch,) = global_batches(request([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0.5]]), 3)
    assert [row.tolist() for row in batch.read(with_action=True)[0]] == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10, 11]]
    np.testing.assert_array_equal(batch.targets[0], [[NAN, -1, NAN, -3, 0], [NAN, 1, NAN, 3, 0], [0, 1, 0, 1, 0]])
    np.testing.assert_array_equal(batch.targets[1][2], [0, 0, 0, 0, 0.5, 0])
    assert (batch.sum_mask, batch.num_tokens) == (2.5, 3)


def test_rows_in_order_and_the_last_batch_smaller() -> None:
    batches = global_batches(request([[1, 1]] * 5), 2)
    assert [[row[0] // 3 for row in batch.rows] for batch in batches] == [[0, 1], [2, 3], [4]]
    assert [batch.sum_mask for batch in batches] == [4, 4, 2]


def test_a_row_without_a_token_that_counts_costs_nothing() -> None:
    batches = global_batches(request([[0, 0], [1, 0], [0, 0], [0, 0]]), 2)
    assert [[row.tolist() for row in batch.read(with_action=False)[0]] for batch in batches] == [[[3]], []]
    assert (batches[1].sum_mask, batches[1].num_tokens) == (0.0, 0)


def test_as_many_rows_as_a_batch_make_one_batch() -> None:
    assert [len(global_batches(request([[1]] * n), 4)) for n in (3, 4, 5, 8)] == [1, 1, 2, 2]
