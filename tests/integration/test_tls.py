"""`rediss://` with a certificate of one's own. The servers that tests start are built without TLS, so a
terminator stands in front of the real one, as it does in many installations.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from leeway.errors import LeewayError
from leeway.messages import Event, EventHeader
from leeway.streams import Consumer, Keys, RedisRefused, append, connect
from leeway_host.redis_server import EmbeddedRedis


def write_certificate(directory: Path) -> tuple[Path, Path]:
    """(certificate, key) of a self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "leeway test")])
    today = datetime.datetime.now(datetime.UTC)
    place = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([place]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = directory / "cert.pem", directory / "key.pem"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return cert_path, key_path


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(ConnectionError, ssl.SSLError, RuntimeError):
        writer.close()


@contextlib.contextmanager
def terminator(port: int, cert: Path, key: Path) -> Iterator[int]:
    """A TLS port in front of the plain `port`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, server_writer), copy(server_reader, writer))

    start = asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    server = asyncio.run_coroutine_threadsafe(start, loop).result(10)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


@pytest.fixture(scope="module")
def tls_url(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """(rediss:// URL, certificate that vouches for it)."""
    cert, key = write_certificate(tmp_path_factory.mktemp("tls"))
    with terminator(redis_server.port, cert, key) as port:
        yield f"rediss://:{redis_server.password}@127.0.0.1:{port}/0", cert


def test_streams_work_over_tls(
    tls_url: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, client: redis.Redis, keys: Keys
) -> None:
    url, cert = tls_url
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    secure = connect(url)
    consumer = Consumer(secure, keys.tickets, "g", "a", budget_s=5)
    big = "x" * 300_000
    append(secure, keys.tickets, Event(EventHeader(source="test", name="x", text=big)))
    (entry,) = consumer.read(1, 1.0)
    consumer.ack([entry.id])
    assert client.xlen(keys.tickets) == 0
    secure.close()


def test_a_certificate_that_nobody_vouches_for_is_refused_at_once(
    tls_url: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, redis_server: EmbeddedRedis
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    began = time.monotonic()
    with pytest.raises(RedisRefused, match="SSL_CERT_FILE") as caught:
        connect(tls_url[0], wait_s=30)
    assert time.monotonic() - began < 5
    assert redis_server.password not in str(caught.value)


def test_plain_text_to_a_tls_port_and_tls_to_a_plain_one_are_no_hang(
    tls_url: tuple[str, Path], redis_server: EmbeddedRedis
) -> None:
    port = tls_url[0].rsplit(":", 1)[1]
    for url in (f"redis://:x@127.0.0.1:{port}", f"rediss://:x@127.0.0.1:{redis_server.port}/0"):
        began = time.monotonic()
        with pytest.raises(LeewayError, match="127.0.0.1"):
            connect(url, wait_s=1.0, socket_timeout_s=1.0)
        assert time.monotonic() - began < 8
