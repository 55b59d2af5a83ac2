"""Images by URL: from allowed hosts alone, at public addresses alone, those that were checked."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from support.images.files import file_of, picture
from support.outside.certificates import make_authority, make_certificate
from tokenpod.service.calls.errors import InvalidArgument, Unimplemented
from tokenpod.service.calls.images import GivenImage
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.images.image_reader import ImageReader
from tokenpod.service.images.image_text import ImageTokens
from tokenpod.service.images.image_urls import ImageUrls, is_public

pytestmark = [pytest.mark.pod, pytest.mark.asyncio]

DATA = file_of(picture(20, 20))
FIELD = "chat.messages[0].content[1].image.uri"
HOSTS = frozenset({"pictures.example", "other.example:8080", "localhost"})
PUBLIC = "93.184.216.34"


class Web(BaseHTTPRequestHandler):
    """Answers by the path: /STATUS/..., or what these say."""

    def do_GET(self) -> None:
        _, kind, *rest = self.path.split("/", 2)
        target = rest[0] if rest else ""
        if kind == "to":
            self.send_response(302)
            self.send_header("Location", target)
            self.send_header("Set-Cookie", "seen=1")
            self.end_headers()
            return
        if kind == "slow":
            time.sleep(1)
        self.send_response(int(kind) if kind.isdecimal() else 200)
        self.send_header("Content-Type", "text/html" if kind == "page" else "image/png")
        self.end_headers()
        # Without a length: what is too long shows while it is read.
        for _ in range(500 if kind == "long" else 1):
            self.wfile.write(DATA)

    def log_message(self, *told: object) -> None:
        """Not to the tests' output."""


@pytest.fixture(scope="module")
def web() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Network(httpx.AsyncHTTPTransport):
    """The internet: names have addresses, and all addresses lead to the server of the test."""

    def __init__(self, port: int, verify: Any = True, **addresses: Sequence[str]) -> None:
        super().__init__(verify=verify)
        self._port = port
        self.addresses = {name.replace("_", "."): found for name, found in addresses.items()}
        #: Addresses that connections were made to, and the hosts that were asked for there.
        self.reached: list[tuple[str, str]] = []
        self.headers: list[httpx.Headers] = []

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """In turn, where there are several answers: a name that changes (DNS rebinding)."""
        answers = self.addresses[host]
        if isinstance(answers, Iterator):
            return [next(answers)]
        return answers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.reached.append((request.url.host, request.headers["Host"]))
        self.headers.append(request.headers)
        request.url = request.url.copy_with(host="127.0.0.1", port=self._port)
        return await super().handle_async_request(request)


async def fetched(
    network: Network, uri: str, *, seconds: float = 5.0, most: int = 100_000
) -> bytes:
    urls = ImageUrls(HOSTS, most, seconds, resolve=network.resolve, transport=network)
    image = GivenImage(b"", FIELD, uri)
    try:
        urls.check(image)
        return (await urls.fetch(image)).data
    finally:
        await urls.close()


@pytest.fixture
def network(web: ThreadingHTTPServer) -> Network:
    return Network(web.server_port, pictures_example=[PUBLIC], other_example=[PUBLIC, "8.8.8.8"])


async def test_an_image_comes_from_an_allowed_host(network: Network) -> None:
    assert await fetched(network, "http://PICTURES.example/200/x.png") == DATA
    assert (
        await fetched(network, "http://other.example:8080/to/http://pictures.example/200") == DATA
    )
    assert network.reached == [
        (PUBLIC, "pictures.example"),
        (PUBLIC, "other.example:8080"),
        (PUBLIC, "pictures.example"),
    ]
    assert not any("Cookie" in headers for headers in network.headers)


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("http://evil.example/x", "names the host 'evil.example', which is not allowed"),
        ("http://other.example/x", "names the host 'other.example', which is not allowed"),
        ("http://pictures.example@evil.example/x", "has a user or password"),
        ("http://pictures.example.evil.example/x", "which is not allowed"),
        ("http://127.0.0.1/x", "names the host '127.0.0.1', which is not allowed"),
        ("http://[::1]/x", "which is not allowed"),
        ("http://pictures.example:22/x", "which is not allowed"),
        ("file:///etc/passwd", "is no URL of http or https"),
        ("gopher://pictures.example/x", "is no URL of http or https"),
        ("http://pictures.example/" + "x" * 2048, "characters; 2048 are allowed"),
        ("http://[", "which is not allowed"),
        ("http://pictures.example:x/", "is no URL"),
        ("", "is no URL of http or https"),
    ],
)
async def test_other_urls_are_refused_before_anything_is_asked(
    network: Network, uri: str, problem: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await fetched(network, uri)
    assert refused.value.message.startswith(FIELD)
    assert problem in refused.value.message
    assert not network.reached


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0"),
        *("fc00::1", "fec0::1", "ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::"),
    ],
)
async def test_addresses_that_are_not_public_are_never_asked(
    network: Network, address: str
) -> None:
    """Whether a name has them alone, or among others."""
    assert not is_public(address)
    for addresses in ([address], [PUBLIC, address]):
        network.addresses["pictures.example"] = addresses
        with pytest.raises(InvalidArgument, match="names a host whose address is not public"):
            await fetched(network, "http://pictures.example/200")
    assert not network.reached
    assert is_public(PUBLIC)
    assert is_public("2606:2800:220:1:248:1893:25c8:1946")


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("http://127.0.0.1/200", "names the host '127.0.0.1', which is not allowed"),
        ("http://other.example:8080/200", "names a host whose address is not public"),
        ("ftp://pictures.example/x", "is no URL of http or https"),
        ("http://pictures.example/to/" * 4, "is redirected more than 3 times"),
    ],
)
async def test_what_a_host_redirects_to_is_checked_as_well(
    network: Network, target: str, problem: str
) -> None:
    network.addresses["other.example"] = ["192.168.1.1"]
    with pytest.raises(InvalidArgument, match=problem):
        await fetched(network, f"http://pictures.example/to/{target}")
    assert {address for address, _ in network.reached} == {PUBLIC}


async def test_a_name_that_changes_is_asked_once_and_its_address_used(network: Network) -> None:
    """The second answer would be this machine (DNS rebinding)."""
    network.addresses["pictures.example"] = iter([PUBLIC, "127.0.0.1"])
    assert await fetched(network, "http://pictures.example/200") == DATA
    assert network.reached == [(PUBLIC, "pictures.example")]
    network.addresses["pictures.example"] = iter([PUBLIC, "127.0.0.1"])
    with pytest.raises(InvalidArgument, match="address is not public"):
        await fetched(network, "http://pictures.example/to/http://pictures.example/200")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("404", "is answered with HTTP status 404"),
        ("500", "is answered with HTTP status 500"),
        ("page", "is answered with 'text/html', which is no image"),
        ("long", "has more than 100000 bytes"),
        ("slow", "took longer than 0.3 s to fetch"),
    ],
)
async def test_answers_are_limited(network: Network, path: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        await fetched(network, f"http://pictures.example/{path}", seconds=0.3)


async def test_certificates_are_those_of_names(tmp_path: Path) -> None:
    """Not of addresses, which connections are made to."""
    make_authority(tmp_path, "authority")
    make_certificate(tmp_path, "server", "authority")  # of localhost
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    trusting = ssl.create_default_context(cafile=tmp_path / "authority.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        network = Network(
            server.server_port, trusting, localhost=[PUBLIC], pictures_example=[PUBLIC]
        )
        assert await fetched(network, "https://localhost/200") == DATA
        with pytest.raises(InvalidArgument, match="can't be fetched from its host"):
            await fetched(network, "https://pictures.example/200")
        server.shutdown()


async def test_without_allowed_hosts_urls_are_no_feature() -> None:
    image, settings = GivenImage(b"", FIELD, "http://pictures.example/"), ServerSettings()
    workers: Any = None
    reader = ImageReader(workers, ImageTokens(0, "<image>"), settings)
    with pytest.raises(Unimplemented, match="fetches no images") as refused:
        reader.check([image])
    assert refused.value.field == FIELD
    assert reader.bytes_of([image, GivenImage(DATA, "x")]) == settings.max_image_bytes + len(DATA)


async def test_a_host_that_is_not_there_is_no_error_of_ours(network: Network) -> None:
    network._port = 1
    with pytest.raises(InvalidArgument) as refused:
        await fetched(network, "http://pictures.example/200")
    assert refused.value.message == f"{FIELD} can't be fetched from its host"
