#!/usr/bin/env bash
# Installs Leeway into $VENV. Called by the Makefile: `setup.sh deps`, then `setup.sh project`.
#
# deps:    the virtual environment, the CPU build of torch, and requirements/cpu.lock (hashes are verified).
# project: this checkout, editable.
set -euo pipefail
VENV="${VENV:-.venv}"
PYTHON="${PYTHON:-python3}"
TORCH_INDEX="${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
LOCK=requirements/cpu.lock
LOG="$VENV/setup.log"

say() { printf 'setup: %s\n' "$*"; }

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# Turns pip's output into a short progress report; on a terminal, a single line that is updated.
show_progress() {
    local total=$1 tty=0
    [ -t 1 ] && tty=1
    awk -v total="$total" -v tty="$tty" '
        /^Collecting |^Requirement already satisfied/ {
            n++
            name = /^Collecting/ ? $2 : $4
            sub(/[=<>;(].*/, "", name)
            if (tty) printf "\rsetup:   %d/%d %-40s", n, total, name
            else if (n % 40 == 0) printf "setup:   %d/%d\n", n, total
            fflush()
        }
        /^Installing collected packages/ {
            if (tty) printf "\r%-60s\r", ""
            print "setup:   unpacking"
            fflush()
        }'
}

pip_install() {
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install \
        --no-deps --progress-bar off "$@"
}

explain_failure() {
    printf '\n' >&2
    tail -n 15 "$LOG" >&2
    fail "$1 (the complete output is in $LOG)"
}

make_venv() {
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "'$PYTHON' is not Python 3.11 or newer; specify one that is: make setup PYTHON=python3.12"
    command -v g++ >/dev/null || fail "g++ was not found; DeepSpeed needs it to compile an operator at first use"
    [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    say "creating $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV" || fail "'$PYTHON -m venv' failed; on Debian and Ubuntu: apt install python3-venv"
}

# PyPI has only the CUDA build of torch. pip's own configuration is tried first, so that a mirror or a local wheel
# is enough, and then PyTorch's index.
install_torch() {
    say "torch (CPU build, about 200 MB)"
    pip_install -r requirements/torch-cpu.txt >"$LOG" 2>&1 && return
    pip_install --extra-index-url "$TORCH_INDEX" -r requirements/torch-cpu.txt >>"$LOG" 2>&1 ||
        explain_failure "the CPU build of torch was found neither with pip's own configuration nor at $TORCH_INDEX"
}

install_lock() {
    local total
    total=$(grep -c '^[a-zA-Z0-9]' "$LOCK")
    say "$total packages of $LOCK (about 500 MB)"
    pip_install --require-hashes -r "$LOCK" 2>&1 | tee -a "$LOG" | show_progress "$total" ||
        explain_failure "installing $LOCK failed"
}

case "${1:-}" in
deps)
    make_venv
    install_torch
    install_lock
    ;;
project)
    say "leeway (editable)"
    pip_install --no-build-isolation -e . >>"$LOG" 2>&1 || explain_failure "installing this checkout failed"
    say "ready: $VENV/bin/leeway"
    ;;
*) fail "usage: scripts/setup.sh deps|project" ;;
esac
