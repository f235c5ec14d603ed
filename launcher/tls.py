"""Mutual TLS with one certificate that all participants share. Whoever has the key file can join, and nobody else."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

from launcher.errors import ConfigError

# makes a key file: the command of Python's documentation of `ssl`
MAKE_KEY = (
    "openssl", "req", "-new", "-x509", "-days", "3650", "-nodes", "-newkey", "rsa:2048", "-subj", "/CN=launcher",
    "-out", "FILE", "-keyout", "FILE",
)  # fmt: skip
_MAKE_ONE = f"Make one: {' '.join(MAKE_KEY)}; chmod 600 FILE"


def server_context(path: Path, config_key: str) -> ssl.SSLContext:
    """Return the context of the side that listens.

    Args:
        path: PEM file with a private key and its self-signed certificate.
        config_key: key whose value ``path`` is, for messages.

    Raises:
        ConfigError: the file cannot be used.
    """
    return _context(ssl.PROTOCOL_TLS_SERVER, path, config_key)


def client_context(path: Path, config_key: str) -> ssl.SSLContext:
    """Return the context of the side that connects; as ``server_context``."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, path, config_key)


def _context(protocol: int, path: Path, config_key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is that of a group, not of a host
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        mode = path.stat().st_mode
        context.load_cert_chain(path)
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ConfigError(config_key, path, "holds no private key with its certificate.", _MAKE_ONE) from None
    except OSError as error:
        raise ConfigError(config_key, path, f"{error.strerror}.", _MAKE_ONE) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(config_key, path, "can be read by other users.", f"chmod 600 {path}")
    return context


def is_refusal(error: OSError) -> bool:
    """Return whether the other side has another key, so that no further attempt will succeed."""
    reason = str(getattr(error, "reason", "") or "")
    return isinstance(error, ssl.SSLError) and any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA"))
