"""Logs of a service on stderr: one line per record, as text or JSON, without passwords."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import TYPE_CHECKING

from leeway.telemetry.tracing import traceparent

if TYPE_CHECKING:
    from leeway.config import TelemetryConfig

CREDENTIALS = re.compile(r"(\w+://[^\s:/@]*):[^\s@]*@")
"""scheme://user:password@, the form in which passwords occur in messages."""
NOISY = ("urllib3", "httpx", "filelock", "asyncio")


def redact(text: str) -> str:
    """Replace the passwords of URLs by ***."""
    return CREDENTIALS.sub(r"\1:***@", text)


class TextFormatter(logging.Formatter):
    """Time, level, service, message."""

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {name} %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object per record, with `trace_id` and `span_id` (hex) inside a span."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "service": self.name,
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        if record.exc_info:
            entry["exception"] = redact(self.formatException(record.exc_info))
        parent = traceparent()
        if parent:
            _, entry["trace_id"], entry["span_id"], _ = parent.split("-")
        return json.dumps(entry, ensure_ascii=False)


def setup_logging(config: TelemetryConfig, name: str) -> None:
    """Send all log records of this process to stderr, in the configured level and format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(name) if config.log_format == "json" else TextFormatter(name))
    logging.basicConfig(level=config.log_level, handlers=[handler], force=True)
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
