"""Which manifests are valid."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from leeway.weights.manifest import TensorSpec


def test_a_shape_is_not_negative() -> None:
    good = {"name": "w", "dtype": "bfloat16", "shape": [2, 3], "offset": 0, "nbytes": 12, "digest": "d"}
    TensorSpec.model_validate_json(TensorSpec.model_validate(good).model_dump_json())
    # The product of two negative sizes would fit the number of bytes.
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        TensorSpec.model_validate({**good, "shape": [-2, -3]})
