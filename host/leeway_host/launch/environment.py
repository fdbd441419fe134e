"""What a run needs from its environment, checked before anything starts, and what is mended for its services.

Containers and batch systems start processes without a home directory, with a user id that has no name, with
few file descriptors, with proxies. Each check returns findings; one that is fatal names the variable or the
limit to set.
"""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from leeway.errors import UsageError

SOCKET_PATH_BYTES = 107
"""Maximum length of the path of a Unix socket (sun_path of unix(7), without the final zero)."""
SOCKET_NAME_BYTES = 37
"""A separator and the UUID that vLLM names its sockets by; multiprocessing's names are shorter."""
TMP_FREE_BYTES = 32 * 2**20
FILES_WANTED, FILES_RECOMMENDED, FILES_NEEDED = 65536, 1024, 256
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
COUNTS = {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1, "VLLM_CPU_KVCACHE_SPACE": 0}
"""Variables that libraries read as numbers, and the smallest one that they accept."""
OF_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun and batch systems tell the processes of a job. A run starts its own processes."""
DEPENDENCIES = frozenset(
    {"click", "deepspeed", "fastapi", "httpx", "huggingface_hub", "jinja2", "kubernetes", "numpy"}
    | {"opentelemetry", "prometheus_client", "psutil", "pydantic", "pydantic_core", "redis", "rich"}
    | {"reasoning_gym", "safetensors", "tenacity", "tokenizers", "torch", "transformers", "triton", "typer"}
    | {"uvicorn", "vllm", "xxhash", "yaml", "zstandard"}
)


@dataclass(frozen=True)
class Finding:
    """`subject`: the variable, limit or directory. `fatal`: a run cannot start; otherwise it is only told."""

    subject: str
    text: str
    fatal: bool = True


def check_environment(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Everything that is wrong with the environment of this process."""
    lost = list(check_working_dir())
    if lost:
        return lost  # the other checks would fail for it
    checks: tuple[Callable[[Mapping[str, str]], Iterator[Finding]], ...] = (
        check_umask,
        check_tmp,
        check_cache,
        check_open_files,
        check_python_path,
        check_python_options,
        check_counts,
        check_other_job,
    )
    return [finding for check in checks for finding in check(environ)]


def require_environment(note: Callable[[str], None]) -> None:
    """Mend what can be mended for this process and its children, and tell the rest.

    Raises UsageError with one line per fatal finding.
    """
    findings = check_environment()
    fatal = [f"{finding.subject}: {finding.text}" for finding in findings if finding.fatal]
    if fatal:
        raise UsageError("\n".join(fatal))
    for finding in findings:
        note(f"{finding.subject}: {finding.text}")
    mend_environment()


# -- checks ------------------------------------------------------------------------------------------------


def check_working_dir() -> Iterator[Finding]:
    """The working directory still exists."""
    try:
        Path.cwd()
    except OSError:
        yield Finding("working directory", "it has been deleted; change to another one")


def check_umask(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A process can read and write the files it creates itself."""
    mask = os.umask(0o077)
    os.umask(mask)
    if mask & 0o700:
        yield Finding("umask", f"{mask:04o} takes the owner's access to new files; set umask 077 or 022")


def check_tmp(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Temporary files can be written, and the paths of sockets fit."""
    given = environ.get("TMPDIR")
    try:
        tmp = given or tempfile.gettempdir()
    except FileNotFoundError as exc:
        yield Finding("TMPDIR", f"not set, and {exc.strerror}; set TMPDIR to a directory that can be written")
        return
    what = "" if given else "not set; "
    if not Path(tmp).is_dir():
        yield Finding("TMPDIR", f"{tmp} is not a directory; create it, or set TMPDIR to another one")
        return
    length, limit = len(os.fsencode(tmp)), SOCKET_PATH_BYTES - SOCKET_NAME_BYTES
    if length > limit:
        yield Finding(
            "TMPDIR",
            f"{what}{tmp} has {length} bytes; sockets are created there, whose paths have at most "
            f"{SOCKET_PATH_BYTES}: set TMPDIR to a directory of at most {limit} bytes, such as /tmp",
        )
    problem = _write_problem(Path(tmp))
    if problem is None and shutil.disk_usage(tmp).free < TMP_FREE_BYTES:
        problem = f"fewer than {TMP_FREE_BYTES // 2**20} MiB are free"
    if problem:
        yield Finding(
            "TMPDIR", f"{what}{tmp}: {problem}; free space there, or set TMPDIR to another directory"
        )


def check_cache(environ: Mapping[str, str]) -> Iterator[Finding]:
    """There is a directory for models and for what libraries cache."""
    cache = find_cache(environ)
    if cache is None:
        yield Finding(
            "LEEWAY_CACHE_DIR",
            "there is no home directory (HOME is not set, and user "
            f"{os.getuid()} has no entry in /etc/passwd); set LEEWAY_CACHE_DIR to a directory for models",
        )
        return
    problem = _create_problem(cache)
    if problem:
        yield Finding(
            "LEEWAY_CACHE_DIR",
            f"models would be stored in {cache}: {problem}; set LEEWAY_CACHE_DIR to a directory that can be "
            "written",
        )


def check_open_files(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The limit of open files, after it is raised as far as it may be."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = FILES_WANTED if hard == resource.RLIM_INFINITY else hard
    if allowed < FILES_RECOMMENDED:
        yield Finding(
            "ulimit -n",
            f"at most {allowed} open files; raise the hard limit to {FILES_RECOMMENDED} or more",
            fatal=allowed < FILES_NEEDED,
        )


def check_python_path(environ: Mapping[str, str]) -> Iterator[Finding]:
    """PYTHONPATH does not hide the standard library or a dependency by a file of the same name."""
    given = environ.get("PYTHONPATH")
    for entry in given.split(os.pathsep) if given else []:
        place = Path(entry or ".")  # an empty entry is the working directory
        others = [other for other in sys.path if other and not _same(Path(other), place)]
        for name in sorted(_modules(place) & (DEPENDENCIES | sys.stdlib_module_names)):
            hidden = PathFinder.find_spec(name, others)
            if hidden is not None and hidden.origin is not None:
                yield Finding(
                    "PYTHONPATH",
                    f"{place.resolve() / name} hides {hidden.origin} from every service"
                    + ("" if entry else " (an empty entry of PYTHONPATH is the working directory)"),
                    fatal=False,
                )


def check_python_options(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Docstrings are there: transformers reads some."""
    if sys.flags.optimize >= 2:
        yield Finding(
            "PYTHONOPTIMIZE",
            f"{sys.flags.optimize} removes docstrings, which transformers reads; unset it (and omit -OO)",
        )


def check_counts(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Numbers in variables of libraries; OpenMP also takes a list of them."""
    for name, least in COUNTS.items():
        given = environ.get(name)
        if given and not all(part.strip().isdecimal() and int(part) >= least for part in given.split(",")):
            yield Finding(
                name, f"{given!r} is not a whole number of at least {least}; correct it, or unset it"
            )


def check_other_job(environ: Mapping[str, str]) -> Iterator[Finding]:
    """No other distributed job's ranks; they are removed, because the trainer would wait for that job."""
    found = [f"{name}={environ[name]}" for name in OF_TORCHRUN if name in environ]
    if found:
        yield Finding(
            ", ".join(found), "belongs to another distributed job, and is ignored by the run", fatal=False
        )


# -- mending -----------------------------------------------------------------------------------------------


def mend_environment() -> None:
    """Mend this process's limits and variables, which services inherit."""
    raise_file_limit()
    for name in OF_TORCHRUN:
        os.environ.pop(name, None)
    os.environ.update(mended_environment(os.environ, find_cache(os.environ)))


def raise_file_limit() -> None:
    """Raise the soft limit of open files as far as needed and allowed; services inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def mended_environment(environ: Mapping[str, str], cache: Path | None) -> dict[str, str]:
    """Variables to add so that libraries work: a home and a cache that can be written, a name, no proxy
    for this machine.
    """
    added: dict[str, str] = {}
    home = find_home(environ)
    caches = environ.get("XDG_CACHE_HOME") or (str(home / ".cache") if home else "")
    if cache is not None:
        scratch = cache / "home"
        if home is None or _write_problem(home) is not None:
            # Libraries would write to a directory named ~ (vLLM, triton, torch), or fail.
            added["HOME"] = str(scratch)
        if not caches or _create_problem(Path(caches)) is not None:
            added["XDG_CACHE_HOME"] = str(scratch / ".cache")
            hub = Path(caches, "huggingface")
            if caches and "HF_HOME" not in environ and hub.is_dir():
                added["HF_HOME"] = str(hub)  # models that were downloaded before
        if added:
            (scratch / ".cache").mkdir(parents=True, exist_ok=True)
    if not any(environ.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")) and not _has_name():
        added["LOGNAME"] = added["USER"] = f"uid-{os.getuid()}"  # getpass.getuser of torch's compiler cache
    if any(environ.get(name) or environ.get(name.upper()) for name in PROXIES):
        known = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        hosts = [host.strip() for host in known.split(",") if host.strip()]
        if "*" not in hosts:
            hosts += [host for host in LOOPBACK if host not in hosts]
        added["no_proxy"] = added["NO_PROXY"] = ",".join(hosts)
    return added


# -- the file system ---------------------------------------------------------------------------------------


def find_home(environ: Mapping[str, str]) -> Path | None:
    """The home directory; None when neither HOME nor /etc/passwd names one."""
    if environ.get("HOME"):
        return Path(environ["HOME"])
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def find_cache(environ: Mapping[str, str]) -> Path | None:
    """The directory of Leeway's cache: LEEWAY_CACHE_DIR, or leeway in XDG_CACHE_HOME or ~/.cache."""
    own, caches, home = environ.get("LEEWAY_CACHE_DIR"), environ.get("XDG_CACHE_HOME"), find_home(environ)
    if own:
        return home / own[2:] if own.startswith("~/") and home else Path(own)
    if caches:
        return Path(caches) / "leeway"
    return home / ".cache" / "leeway" if home else None


def _has_name() -> bool:
    try:
        return bool(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        return False


def _create_problem(directory: Path) -> str | None:
    """Why `directory` cannot be created and written; None if it can. Creates it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        return exc.strerror or str(exc)
    return _write_problem(directory)


def _write_problem(directory: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(65536))
            file.flush()
    except OSError as exc:
        return exc.strerror or str(exc)
    return None


def _same(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()


def _modules(directory: Path) -> set[str]:
    """Names of the modules and packages in `directory`; a folder without __init__.py hides nothing."""
    try:
        entries = list(directory.iterdir())
    except OSError:
        return set()
    files = {entry.stem for entry in entries if entry.suffix == ".py"}
    return files | {entry.name for entry in entries if (entry / "__init__.py").is_file()}
