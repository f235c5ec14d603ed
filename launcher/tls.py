"""Mutual TLS with one certificate that all sides share: each presents it, and trusts nothing else."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

from launcher.errors import ConfigError

# makes a key file: the command of Python's documentation of `ssl`
MAKE_KEY = (
    "openssl", "req", "-new", "-x509", "-days", "3650", "-nodes", "-newkey", "rsa:2048", "-subj", "/CN=launcher",
    "-out", "FILE", "-keyout", "FILE",
)  # fmt: skip


def server_context(path: str | Path, name: str) -> ssl.SSLContext:
    """Return the context of the side that accepts connections.

    Args:
        path: PEM file with a private key and its self-signed certificate.
        name: config key of ``path``, for messages.

    Raises:
        ConfigError: The file is missing, readable by others, incomplete or expired.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, Path(path), name)
    context.num_tickets = 0  # nobody resumes a session, and a peer that only writes need not read
    return context


def client_context(path: str | Path, name: str) -> ssl.SSLContext:
    """Return the context of the side that connects. Arguments and errors: those of ``server_context``."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, Path(path), name)


def _context(protocol: int, path: Path, name: str) -> ssl.SSLContext:
    command = " ".join(MAKE_KEY).replace("FILE", str(path))
    make = f"Make a new one: {command}\n  Every side needs a copy of the same file."
    missing = {"--key": "Add --make-key to make it.", "outer.key": "Copy the file of the server here."}.get(name, make)
    try:
        mode = path.stat().st_mode
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(name, str(path), f"cannot be read: {error.strerror}.", missing) from None
    if mode & 0o077:
        raise ConfigError(name, str(path), "others can read this private key.", f"chmod 600 {path}")
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate names no host: whoever has its private key belongs here
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(path, password=lambda: "")  # without ``password`` OpenSSL asks the terminal for one
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        why = getattr(error, "reason", None) or error.strerror or str(error)
        problem = f"is not a private key without a passphrase and its certificate ({why.lower().replace('_', ' ')})."
        raise ConfigError(name, str(path), problem, make) from None
    certificates = context.get_ca_certs()
    if context.cert_store_stats()["x509"] != 1 or len(certificates) != 1 or (
        certificates[0].get("subject") != certificates[0].get("issuer")
    ):  # fmt: skip
        raise ConfigError(name, str(path), "must hold one self-signed certificate, and no other.", make)
    first, last = str(certificates[0]["notBefore"]), str(certificates[0]["notAfter"])
    if time.time() > ssl.cert_time_to_seconds(last):
        raise ConfigError(name, str(path), f"the certificate expired on {last}.", make)
    if time.time() < ssl.cert_time_to_seconds(first):
        raise ConfigError(name, str(path), f"the certificate is not valid before {first}.", "Set this host's clock.")
    return context


def is_refusal(error: OSError) -> bool:
    """Return whether the other side has another key, so that no further attempt will succeed."""
    reason = str(getattr(error, "reason", "") or "")
    return isinstance(error, ssl.SSLError) and any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA"))
