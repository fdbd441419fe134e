"""What reward code sees of the environment: a list of variables, without passwords, tokens and keys.

Reward code may print its environment, or run a model's output that does. Variables that are not listed here
reach it only if `task.reward_env` names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# fmt: off
KEPT = frozenset(
    {
        # the user and the machine
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "TMPDIR", "TEMP",
        "TMP",
        # libraries and certificates
        "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
        # caches and offline modes
        "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HOME", "HF_HUB_CACHE",
        "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "NLTK_DATA",
        "TOKENIZERS_PARALLELISM", "LEEWAY_CACHE_DIR",
        # proxies
        "http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
        "ALL_PROXY",
    }
)
# fmt: on
"""Variables that are passed on."""
KEPT_PREFIXES = ("LC_", "PYTHON", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_")
"""Beginnings of the names of further variables that are passed on, unless they look like a secret."""
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def reward_environment(environ: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """The variables of `environ` that reward code gets; `more`: names of additional ones."""
    wanted = {*KEPT, *more}
    return {
        name: value
        for name, value in environ.items()
        if name in wanted or (name.startswith(KEPT_PREFIXES) and not _SECRET.search(name))
    }
