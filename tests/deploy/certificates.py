"""Secrets as cert-manager makes them: tls.crt, tls.key and ca.crt, signed by one authority."""

from __future__ import annotations

import subprocess
from pathlib import Path

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    """A certificate authority that writes secrets to folders in `secrets`."""

    def __init__(self, secrets: Path) -> None:
        self._secrets = secrets
        secrets.mkdir(parents=True)
        made = ["-keyout", "authority.key", "-out", "authority.crt", "-subj", "/CN=authority"]
        self._openssl("req", "-x509", *_KEY, *made, "-days", "2")

    def issue(self, secret: str, *names: str) -> Path:
        """A secret with a certificate for these names; its folder."""
        folder = self._secrets / secret
        folder.mkdir()
        made = ["-keyout", f"{secret}/tls.key", "-out", "request", "-subj", f"/CN={secret}"]
        self._openssl("req", *_KEY, *made)
        (self._secrets / "names").write_text(f"subjectAltName={','.join(names)}\n")
        signer = ["-CA", "authority.crt", "-CAkey", "authority.key", "-CAcreateserial"]
        made = ["-in", "request", "-out", f"{secret}/tls.crt", "-days", "2", "-extfile", "names"]
        self._openssl("x509", "-req", *signer, *made)
        (folder / "ca.crt").write_bytes((self._secrets / "authority.crt").read_bytes())
        return folder

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._secrets, check=True, capture_output=True)
