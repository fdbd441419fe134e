"""What becomes of a ticket, by version, losses and the sampler's state."""

from __future__ import annotations

import pytest

from leeway_sampler.tickets import Fate, triage


@pytest.mark.parametrize(
    ("key", "ready", "losses", "fate"),
    [
        ((1, 7), True, 0, Fate.SERVE),
        ((1, 7), True, 1, Fate.SERVE),
        ((1, 7), True, 2, Fate.ALONE),
        ((1, 7), False, 0, Fate.RETURN),
        ((1, 7), False, 2, Fate.RETURN),
        ((1, 6), True, 0, Fate.VOID),
        ((1, 6), False, 2, Fate.VOID),
        ((0, 9), True, 0, Fate.VOID),
        ((1, 8), True, 0, Fate.RETURN),
        ((2, 0), True, 2, Fate.RETURN),
    ],
)
def test_triage(key, ready, losses, fate):
    assert triage(key, (1, 7), ready=ready, own=True, losses=losses, max_deliveries=3) is fate


@pytest.mark.parametrize(("key", "fate"), [((1, 7), Fate.RETURN), ((1, 6), Fate.VOID), ((2, 0), Fate.RETURN)])
def test_a_ticket_of_another_configuration_is_handed_back(key, fate):
    assert triage(key, (1, 7), ready=True, own=False, losses=0, max_deliveries=3) is fate
