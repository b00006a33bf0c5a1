"""Predictors with a state, stepped by hand."""

import numpy as np

from toolkit.predictors import Context, CopyLast

NEURONS = [np.array(neurons, dtype=np.int64) for neurons in ([1, 4], [0, 2], [3], [])]


def test_the_last_token_is_copied_and_no_sequence_sees_the_one_before():
    copy, context = CopyLast(6, 2), Context(0, ())
    assert copy.shape == (6, 2)
    assert copy.nbytes == 0
    assert copy.predict(context).tolist() == []
    copy.start(NEURONS[:2])
    assert copy.predict(context).tolist() == [0, 2]
    copy.observe(NEURONS[2])
    assert copy.predict(context).tolist() == [3]
    copy.observe(NEURONS[3])
    assert copy.predict(context).tolist() == []
    copy.observe(NEURONS[0])
    copy.start([])
    assert copy.predict(context).tolist() == []
