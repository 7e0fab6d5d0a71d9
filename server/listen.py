"""The socket to listen on, bound before anything slow happens so that a port in use is known at once.

Bound, not listening: until the daemon is ready, connections are refused instead of left waiting.
"""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path

from config.errors import ConfigError

# What OpenSSL says of files that it cannot use, and what that means. For a key it does not say anything.
_TLS_PROBLEMS: dict[str | None, str] = {
    None: "holds no private key in PEM form that can be read: --ssl-keyfile names the file of one",
    "NO_CERTIFICATE_OR_CRL_FOUND": "holds no certificate in PEM form",
    **dict.fromkeys(("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"), "is not the key of the --ssl-certfile"),
}


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to `host` and `port`, 0 being any free one. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"--host {host} cannot be resolved: use an address of this machine, or 0.0.0.0") from None
    bound = socket.socket(family, kind, protocol)
    try:
        # A daemon that has just ended leaves connections in TIME_WAIT; they must not keep the next one from starting.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise refusal(error, host, port) from None
    return bound


def refusal(error: OSError, host: str, port: int) -> ConfigError:
    """Why the port cannot be had, as the operator should read it."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use: stop what listens there, or choose another --port")
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"--host {host} is not an address of this machine: use one that is, or 0.0.0.0")
    if error.errno == errno.EACCES:
        return ConfigError(f"--port {port} needs privileges: use a port above 1023")
    return ConfigError(f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()}")


def check_tls(certfile: Path | None, keyfile: Path | None) -> None:
    """Raises ConfigError for a certificate or key that cannot be used."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return
    flag, context = f"--ssl-certfile {certfile}", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(certfile)
        flag = flag if keyfile is None else f"--ssl-keyfile {keyfile}"
        context.load_cert_chain(certfile, keyfile, password=lambda: _refuse_passphrase(flag))
    except ssl.SSLError as error:
        problem = _TLS_PROBLEMS.get(error.reason) or f"cannot be used: {error.reason.replace('_', ' ').lower()}"
        raise ConfigError(f"{flag} {problem}") from None
    except OSError as error:
        raise ConfigError(f"{flag} cannot be read: {(error.strerror or str(error)).lower()}") from None


def _refuse_passphrase(flag: str) -> str:
    """Instead of OpenSSL's question at the terminal, where a daemon has nobody."""
    raise ConfigError(f"{flag} has a passphrase: write it without one by `openssl pkey -in FILE -out FILE-WITHOUT`")


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    """Where a client on this machine reaches the socket."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
