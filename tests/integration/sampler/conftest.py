"""Makes sampler_support importable, also for processes that tests start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
