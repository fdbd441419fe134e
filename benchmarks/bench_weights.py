"""Broadcasts of the tiny model's weights; `leeway bench weights` measures a real model."""

from __future__ import annotations

import subprocess
import sys

ARGUMENTS = ["bench", "weights", "--model", "tiny", "--lr", "1e-5", "--steps", "1,4", "--samplers", "1"]

if __name__ == "__main__":
    sys.exit(subprocess.run([sys.executable, "-m", "leeway_host", *ARGUMENTS], check=False).returncode)
