"""The server's certificates, served anew when their files change."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from tokenpod.service.config import ServerSettings
from tokenpod.service.rpc.listen import StartError

log = logging.getLogger("tokenpod")


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where they are, in PEM.

    Args:
        cert, key: the server's.
        client_ca: authorities that sign clients' certificates; None: clients need none.
    """

    cert: Path
    key: Path
    client_ca: Path | None

    def state(self) -> tuple[tuple[int, int, int], ...]:
        """What differs once a file has been replaced or written."""
        there = [path for path in (self.cert, self.key, self.client_ca) if path is not None]
        stats = [path.stat() for path in there]
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in stats)

    def load(self) -> grpc.ServerCertificateConfiguration:
        """Read them. Raises OSError, ssl.SSLError among them if key and certificate differ."""
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key)
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        client_ca = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], client_ca)


class Certificates:
    """Asked by gRPC at each handshake, from its own threads.

    Files that can't be used leave the last good ones in place: a renewal is often several writes.

    Args:
        files: where they are.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._state = files.state()
        self.first = files.load()

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """What to serve from now on; None: what is served already."""
        try:
            state = self._files.state()
            if state == self._state:
                return None
            fresh = self._files.load()
            if self._files.state() != state:
                # Written to just now: the next handshake looks again.
                return None
        except OSError as error:
            log.warning("the certificates can't be read anew", extra={"reason": str(error)})
            return None
        self._state = state
        log.info("the certificates have been read anew")
        return fresh


def credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """TLS as the operator wants it; raises StartError for files that can't be used."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    files = CertificateFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    try:
        certificates = Certificates(files)
    except ssl.SSLError as error:
        why = f"--tls-cert and --tls-key can't be used: {error.reason or error}"
        raise StartError(why) from error
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from error
    return grpc.dynamic_ssl_server_credentials(
        certificates.first,
        certificates.renewed,  # type: ignore[arg-type]
        files.client_ca is not None,
    )
