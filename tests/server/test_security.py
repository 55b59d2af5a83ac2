"""Who gets in: certificates and tokens, on a server as operators start it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.clients.public_api import generate, text_request
from support.outside.certificates import make_authority, make_certificate
from support.pods.harness import SERVING, ServerProcess, free_port, serve
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

REQUEST = text_request("import os\n", stopping={"max_new_tokens": 3, "ignore_eos": True})

LOOPBACK = free_port()


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with a server's and a client's certificate, and a stranger's client."""
    folder = tmp_path_factory.mktemp("pems")
    for authority, names in (("ca", ("server", "client")), ("stranger", ("intruder",))):
        make_authority(folder, authority)
        for name in names:
            make_certificate(folder, name, authority)
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens") / "tokens"


@pytest.fixture(scope="module")
def guarded(pems: Path, tokens: Path) -> Iterator[ServerProcess]:
    """A server that wants a client certificate and a token, except on LOOPBACK."""
    tokens.write_text("first-token\nsecond-token\n")
    with serve(
        *("--tls-cert", str(pems / "server.pem"), "--tls-key", str(pems / "server.key")),
        *("--tls-client-ca", str(pems / "ca.pem"), "--auth-token-file", str(tokens)),
        *("--loopback-port", str(LOOPBACK), "--hostname", "0.0.0.0"),
    ) as running:
        yield running
        assert running.stop() == 0


def channel(server: ServerProcess, pems: Path, name: str | None) -> grpc.Channel:
    """A TLS channel with the certificate `name`, or with none."""
    pair = [(pems / f"{name}.{kind}").read_bytes() if name else None for kind in ("key", "pem")]
    credentials = grpc.ssl_channel_credentials((pems / "ca.pem").read_bytes(), *pair)
    return grpc.secure_channel(server.address, credentials)


def ask(opened: grpc.Channel, token: str | None = "first-token") -> Any:
    """A generation; closes the channel."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with opened:
        return generate(GenerationServiceStub(opened), REQUEST, metadata=metadata)


def code(opened: grpc.Channel, token: str | None = "first-token") -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        ask(opened, token)
    return refused.value.code()


def test_a_client_with_certificate_and_token_is_served(guarded: ServerProcess, pems: Path) -> None:
    for token in ("first-token", "second-token"):
        assert len(ask(channel(guarded, pems, "client"), token).samples[0].token_ids) == 3


def test_a_client_without_a_certificate_does_not_get_a_connection(
    guarded: ServerProcess, pems: Path
) -> None:
    assert code(channel(guarded, pems, None)) is grpc.StatusCode.UNAVAILABLE


def test_nor_does_one_whose_authority_is_unknown(guarded: ServerProcess, pems: Path) -> None:
    assert code(channel(guarded, pems, "intruder")) is grpc.StatusCode.UNAVAILABLE


def test_nor_does_plaintext(guarded: ServerProcess) -> None:
    assert code(grpc.insecure_channel(guarded.address)) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("token", [None, "wrong", "first-token-and-more", "first-toke"])
def test_a_call_without_a_known_token_is_refused(
    guarded: ServerProcess, pems: Path, token: str | None
) -> None:
    assert code(channel(guarded, pems, "client"), token) is grpc.StatusCode.UNAUTHENTICATED


def test_the_loopback_port_asks_for_neither_and_is_open_to_this_machine_alone(
    guarded: ServerProcess, pems: Path
) -> None:
    opened = grpc.insecure_channel(f"127.0.0.1:{LOOPBACK}")
    assert len(ask(opened, None).samples[0].token_ids) == 3
    # A token of somebody else, which a proxy may pass on, is not looked at either.
    assert ask(grpc.insecure_channel(f"127.0.0.1:{LOOPBACK}"), "wrong")
    # 127.0.0.2 stands for the machine's other addresses: the other port listens there too.
    for port, listens in ((guarded.port, True), (LOOPBACK, False)):
        with socket.socket() as probe:
            assert (probe.connect_ex(("127.0.0.2", port)) == 0) is listens


def test_health_needs_no_token_and_on_its_own_port_no_certificate(
    guarded: ServerProcess, pems: Path
) -> None:
    assert guarded.health() == SERVING
    with channel(guarded, pems, "client") as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == SERVING


def test_a_token_file_that_changes_is_read_again(
    guarded: ServerProcess, pems: Path, tokens: Path
) -> None:
    before = tokens.read_text()
    try:
        # As a mounted secret changes: a new file takes the place of the old one.
        (tokens.parent / "new").write_text("third-token\n")
        (tokens.parent / "new").rename(tokens)
        assert ask(channel(guarded, pems, "client"), "third-token")
        unknown = code(channel(guarded, pems, "client"), "first-token")
        assert unknown is grpc.StatusCode.UNAUTHENTICATED
    finally:
        tokens.write_text(before)


def test_a_forged_request_id_stays_one_word_of_the_log(guarded: ServerProcess, pems: Path) -> None:
    forged = "x generated_tokens=999 finished=True"
    with channel(guarded, pems, "client") as opened:
        request = text_request("x", stopping={"max_new_tokens": 1}, request_id=forged)
        metadata = (("authorization", "Bearer first-token"),)
        generate(GenerationServiceStub(opened), request, metadata=metadata)
    (logged,) = guarded.logged(forged)
    assert f'request_id="{forged}"' in logged


def served(server: ServerProcess) -> str:
    """The certificate that a new connection is shown."""
    return ssl.get_server_certificate(("127.0.0.1", server.port), timeout=20)


def test_replaced_certificates_are_served_to_new_connections(tmp_path: Path) -> None:
    for authority in ("ca", "next"):
        make_authority(tmp_path, authority)
    make_certificate(tmp_path, "server", "ca")
    cert, key = tmp_path / "server.pem", tmp_path / "server.key"
    with serve("--tls-cert", str(cert), "--tls-key", str(key)) as server:
        first = served(server)
        assert first.strip() == cert.read_text().strip()
        trusted = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
        with grpc.secure_channel(server.address, trusted) as old:
            stub: Any = GenerationServiceStub(old)
            generate(stub, REQUEST)
            # A renewal that is not over: the certificate has no key yet.
            make_certificate(tmp_path, "other", "next")
            (tmp_path / "other.pem").rename(cert)
            assert served(server) == first
            (tmp_path / "other.key").rename(key)
            assert served(server).strip() == cert.read_text().strip()
            generate(stub, REQUEST)
        assert server.logged("have been read anew")
