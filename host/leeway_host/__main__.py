"""`python -m leeway_host`: the command `leeway`."""

import os
import sys

# `python -m` searches the working directory first, where a user may have a types.py or a folder redis/.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 (pathlib may be hidden, too)
    del sys.path[0]

from leeway_host.cli.app import main

if __name__ == "__main__":
    main()
