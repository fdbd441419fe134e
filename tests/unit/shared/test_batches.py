"""Digests tell what a batch is; that planning is pure is tested with the controller."""

from __future__ import annotations

import numpy as np

from leeway.batches import plan_ticket_ids, prompts_digest, tickets_digest


def test_the_digest_tells_prompts_and_their_order() -> None:
    assert prompts_digest([[1, 2], [3]]) == prompts_digest([np.array([1, 2]), np.array([3], np.int32)])
    different = [[[1, 2], [3]], [[3], [1, 2]], [[1, 2]], [[1], [2, 3]]]
    assert len({prompts_digest(prompts) for prompts in different}) == 4


def test_every_slot_has_its_ticket() -> None:
    ids = plan_ticket_ids(1, 2, 3, groups=2, group_size=2)
    assert ids == ["1.2.3.0.0", "1.2.3.0.1", "1.2.3.1.0", "1.2.3.1.1"]
    assert tickets_digest(ids) != tickets_digest(reversed(ids))
