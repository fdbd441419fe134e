"""IcePop (Ring-1T report, arXiv 2510.18855): masked importance sampling under another name.

A w 1[low <= w <= high] s(a),   w = pi_theta/mu
"""

from __future__ import annotations

from typing import Literal

from leeway.corrections.methods.mis import loss, weight
from leeway.corrections.registry import Method
from leeway.corrections.settings import Band


class IcepopConfig(Band):
    """IcePop: the ratio pi_theta/mu inside [low, high], zero outside, as `mis`."""

    method: Literal["icepop"] = "icepop"


METHOD = Method(
    settings=IcepopConfig,
    formula="A w 1[low <= w <= high] s(a), w = pi_theta/mu",
    needs=("logp_mu",),
    source="Ring-1T report (arXiv 2510.18855)",
    loss=loss,
    weight=weight,
    variants={},  # the rows of mis
)
