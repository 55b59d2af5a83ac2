"""Images that a call names by URL, fetched from the hosts that the operator allows.

Who lets callers name URLs lends them its network (SSRF). So nothing is fetched unless its host is
one that was allowed, whatever it redirects to; a host's addresses must all be public; and the
connection is made to the address that was looked at, not to what the name says a moment later (DNS
rebinding). No proxy, cookie or password of the environment is used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Final

import httpx2 as httpx

from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenImage

#: Of a host and port, its addresses. Raises OSError if there are none.
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]

_MOST_REDIRECTS: Final = 3
_MOST_URL_CHARACTERS: Final = 2048
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
#: Its addresses have those of IPv4 within, private ones too (RFC 3056).
_SIX_TO_FOUR: Final = ipaddress.IPv6Network("2002::/16")


async def resolve(host: str, port: int) -> Sequence[str]:
    """As the system does."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def is_public(address: str) -> bool:
    """Whether an address is one of the internet: nobody's own network, and no special one."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # with a zone, so of a link
        return False
    if ip.version == 6 and (ip not in _UNICAST or ip in _SIX_TO_FOUR):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


class ImageUrls:
    """Fetches images.

    Args:
        hosts: that may be named, in lower case; with `:PORT` where it is not the scheme's own.
        most_bytes: of a file.
        seconds: that fetching one may take, redirects included.
        resolve: of names. Addresses that it gives must be public, whoever gives them.
        transport: makes connections to addresses; None: the library's own.
    """

    def __init__(
        self,
        hosts: frozenset[str],
        most_bytes: int,
        seconds: float,
        *,
        resolve: Resolver = resolve,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._hosts, self._most_bytes, self._seconds = hosts, most_bytes, seconds
        self._resolve = resolve
        self._client = httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            timeout=seconds,
            # Connections are known by their addresses, which several hosts may share.
            limits=httpx.Limits(max_keepalive_connections=0),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            # What unpacks to more than it is would be no file of an image.
            headers={"Accept": "image/png, image/jpeg, image/webp", "Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def check(self, image: GivenImage) -> None:
        """Raise InvalidArgument for a URL that will not be fetched, whatever its host says."""
        self._allowed(image.uri, image.field)

    async def fetch(self, image: GivenImage) -> GivenImage:
        """The same with its bytes. Raises InvalidArgument, which says why there are none."""
        try:
            async with asyncio.timeout(self._seconds):
                return GivenImage(await self._fetched(image), image.field)
        except TimeoutError:
            problem = f"took longer than {self._seconds:g} s to fetch (--image-url-timeout)"
            raise InvalidArgument(image.field, problem) from None
        except (OSError, httpx.HTTPError):
            # Its text may name addresses.
            raise InvalidArgument(image.field, "can't be fetched from its host") from None

    async def _fetched(self, image: GivenImage) -> bytes:
        url, field = self._allowed(image.uri, image.field), image.field
        for _ in range(1 + _MOST_REDIRECTS):
            request = await self._request(url, field)
            async with aclosing(await self._client.send(request, stream=True)) as answer:
                if answer.has_redirect_location:
                    url = self._allowed(str(url.join(answer.headers["Location"])), field)
                    continue
                return await self._read(answer, field)
        raise InvalidArgument(field, f"is redirected more than {_MOST_REDIRECTS} times")

    def _allowed(self, text: str, field: str) -> httpx.URL:
        if len(text) > _MOST_URL_CHARACTERS:
            problem = f"has {len(text)} characters; {_MOST_URL_CHARACTERS} are allowed"
            raise InvalidArgument(field, problem)
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL:
            raise InvalidArgument(field, "is no URL") from None
        if url.scheme not in ("http", "https"):
            raise InvalidArgument(field, "is no URL of http or https")
        if url.userinfo:
            raise InvalidArgument(field, "has a user or password")
        if url.netloc.decode("ascii") not in self._hosts:
            problem = f"names the host {url.host!r:.100}, which is not allowed (--image-url-hosts)"
            raise InvalidArgument(field, problem)
        return url

    async def _request(self, url: httpx.URL, field: str) -> httpx.Request:
        """What is asked of which address: the name is for the server and its certificate."""
        port = url.port or (443 if url.scheme == "https" else 80)
        addresses = await self._resolve(url.host, port)
        if not addresses or not all(map(is_public, addresses)):
            raise InvalidArgument(field, "names a host whose address is not public")
        return self._client.build_request(
            "GET",
            url.copy_with(host=addresses[0]),
            headers={"Host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": url.host},
        )

    async def _read(self, answer: httpx.Response, field: str) -> bytes:
        if answer.status_code != httpx.codes.OK:
            raise InvalidArgument(field, f"is answered with HTTP status {answer.status_code}")
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if not kind.startswith("image/"):
            raise InvalidArgument(field, f"is answered with {kind!r:.60}, which is no image")
        data = bytearray()
        async for part in answer.aiter_raw():
            data += part
            if len(data) > self._most_bytes:
                problem = f"has more than {self._most_bytes} bytes (--max-image-bytes)"
                raise InvalidArgument(field, problem)
        return bytes(data)
