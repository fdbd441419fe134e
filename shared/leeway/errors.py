"""Errors that a user can act on, and the exit codes of every Leeway process."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STALLED = 3
EXIT_POISONED = 4
EXIT_INTERRUPTED = 130


class LeewayError(Exception):
    """Base of all errors that Leeway raises deliberately. `exit_code`: exit status of the process."""

    exit_code = EXIT_FAILED


class UsageError(LeewayError):
    """Unusable input: a configuration, file, model, address or password."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A configuration that cannot be run; the message has one line per problem."""


class StalledError(LeewayError):
    """No progress within a time limit; the message names what is awaited."""

    exit_code = EXIT_STALLED
