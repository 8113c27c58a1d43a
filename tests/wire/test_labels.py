"""Numbers as classifiers tell them."""

from __future__ import annotations

import numpy as np
import pytest

from guerdon.wire.forms.labels import activated


@pytest.mark.filterwarnings("error")
def test_no_number_is_too_large_for_a_sigmoid() -> None:
    assert activated(np.float32([[-1000.0], [0.0], [1000.0]]), "sigmoid").tolist() == [[0.0], [0.5], [1.0]]
