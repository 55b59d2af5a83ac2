"""Authorities and certificates for 127.0.0.1, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def _openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True)


def make_authority(folder: Path, name: str) -> None:
    make = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
    _openssl(*make, *made, "-days", "2", cwd=folder)


def make_certificate(folder: Path, name: str, authority: str) -> None:
    make = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl(
        *make, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}", cwd=folder
    )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signer = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial"]
    made = ["-in", f"{name}.csr", "-out", f"{name}.pem", "-days", "2", "-extfile", "names"]
    _openssl("x509", "-req", *signer, *made, cwd=folder)
