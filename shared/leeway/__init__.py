"""Leeway: asynchronous RL training for language models that stays on-policy by measurement."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("leeway-rl")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
