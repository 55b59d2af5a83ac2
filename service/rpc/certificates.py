"""The server's certificates, served anew when their files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import grpc

from tokenpod.service.config import ServerSettings
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
