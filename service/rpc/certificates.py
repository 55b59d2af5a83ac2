"""The server's certificates, served anew when their files change."""

from __future__ import annotations

import logging
import ssl
from datetime import datetime
from pathlib import Path

import grpc

from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.rpc.listen import StartError

log = logging.getLogger("tokenpod")


class Certificates:
    """The server's certificate; gRPC asks at each handshake, from its own threads.

    Files that can't be used leave the last good ones in place: a renewal is often several writes.

    Args:
        cert, key: the server's, in PEM.
        client_ca: authorities that sign clients' certificates; None: clients need none.

    Raises:
        OSError: ssl.SSLError among them, if key and certificate differ.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._seen = self._state()
        self.first = self._load()

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificate to serve from now on; None: the current one."""
        try:
            state = self._state()
            if state == self._seen:
                return None
            fresh = self._load()
            if self._state() != state:
                # Written to just now: the next handshake looks again.
                return None
        except OSError as error:
            log.warning("the certificates can't be read anew", extra={"reason": str(error)})
            return None
        self._seen = state
        log.info("the certificates have been read anew")
        return fresh

    def _state(self) -> tuple[tuple[int, int, int], ...]:
        """Numbers that change when a file is replaced or written."""
        there = [path for path in (self._cert, self._key, self._client_ca) if path is not None]
        stats = [path.stat() for path in there]
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in stats)

    def _load(self) -> grpc.ServerCertificateConfiguration:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key)
        pair = (self._key.read_bytes(), self._cert.read_bytes())
        client_ca = self._client_ca.read_bytes() if self._client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], client_ca)


def credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """TLS as the operator wants it; raises StartError for files that can't be used."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    client_ca = settings.tls_client_ca
    try:
        certificates = Certificates(settings.tls_cert, settings.tls_key, client_ca)
    except ssl.SSLError as error:
        why = f"--tls-cert and --tls-key can't be used: {error.reason or error}"
        raise StartError(why) from error
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from error
    return grpc.dynamic_ssl_server_credentials(
        certificates.first,
        certificates.renewed,  # type: ignore[arg-type]
        client_ca is not None,
    )


def expiry(cert: Path) -> float | None:
    """Unix time at which the first certificate of a PEM file expires; None: it can't be read.

    Python's ssl tells no dates of a server's own certificate, so they are read from its DER:
    Certificate > TBSCertificate > validity, which follows serial, algorithm and issuer.
    """
    try:
        text = cert.read_text()
        end = text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        der = ssl.PEM_cert_to_DER_cert(text[text.index(ssl.PEM_HEADER) : end])
        _, at, _ = _element(der, 0)
        _, at, _ = _element(der, at)
        tag, _, after = _element(der, at)
        # The version may be left out.
        at = after if tag == _VERSION else at
        for _ in ("serial", "algorithm", "issuer"):
            _, _, at = _element(der, at)
        _, at, _ = _element(der, at)
        _, _, at = _element(der, at)
        tag, at, after = _element(der, at)
        moment = der[at:after].decode()
        # UTCTime has two digits of the year, of 1950 to 2049 (RFC 5280).
        if tag == _UTC_TIME:
            moment = ("19" if moment >= "50" else "20") + moment
        return datetime.strptime(moment, "%Y%m%d%H%M%S%z").timestamp()
    except (OSError, ValueError, IndexError):
        return None


#: Tags of DER.
_VERSION, _UTC_TIME = 0xA0, 0x17


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Of the DER element at `at`: its tag, where its content begins and where it ends."""
    tag, size = der[at], der[at + 1]
    begin = at + 2
    if size >= 0x80:
        # So many bytes that hold the size.
        begin += size - 0x80
        size = int.from_bytes(der[at + 2 : begin])
    return tag, begin, begin + size
