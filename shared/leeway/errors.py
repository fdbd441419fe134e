"""Errors that a user can act on, and the exit codes of every Leeway process."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STALLED = 3
EXIT_POISONED = 4
EXIT_INTERRUPTED = 130


class LeewayError(Exception):
    """Base of all errors that Leeway raises on purpose; `exit_code` is what the process ends with."""

    exit_code = EXIT_FAILED


class UsageError(LeewayError):
    """Something the user gave cannot be used: configuration, a file, a model, an address, a password."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A configuration that cannot be run; the message has one line per problem."""


class StalledError(LeewayError):
    """No progress within a budget; the message names what is awaited."""

    exit_code = EXIT_STALLED
