"""A self-signed certificate for development, made once and kept."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Iterable

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from twisted.logger import Logger

CERTIFICATE_NAME = "development-certificate.pem"
KEY_NAME = "development-key.pem"
_VALID = timedelta(days=3650)
# A clock that is a little behind must not find the certificate "not valid yet".
_BACKDATED = timedelta(hours=1)

log = Logger()


def development_certificate(directory: Path) -> tuple[Path, Path]:
    """The paths of a certificate and its key in `directory`, made if they are not there.

    Anybody who needs to be sure whom he speaks to needs a real certificate: this one is
    signed by nobody, and says so in the log at every start.
    """
    certificate, key = directory / CERTIFICATE_NAME, directory / KEY_NAME
    if not (certificate.exists() and key.exists()):
        directory.mkdir(parents=True, exist_ok=True)
        key_bytes, certificate_bytes = self_signed(["localhost"])
        _write(key, key_bytes, 0o600)
        _write(certificate, certificate_bytes, 0o644)
    log.warn(
        "QUIC uses the self-signed development certificate {certificate}: "
        "set certKey and privateKey for anything else than development",
        certificate=str(certificate),
    )
    return certificate, key


def self_signed(names: Iterable[str]) -> tuple[bytes, bytes]:
    """A new key and a certificate for it, both as PEM, valid for the names and the loopback."""
    private_key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "multibroker development")])
    now = datetime.now(timezone.utc)
    alternatives = [
        *(x509.DNSName(name) for name in names),
        x509.IPAddress(IPv4Address("127.0.0.1")),
        x509.IPAddress(IPv6Address("::1")),
    ]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private_key, SHA256())
    )
    key_bytes = private_key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    return key_bytes, certificate.public_bytes(Encoding.PEM)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Whole or not at all: a start that was interrupted must not leave half a key."""
    unfinished = path.with_name(path.name + ".new")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(unfinished, path)
