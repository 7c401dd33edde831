"""Where the server listens."""

from __future__ import annotations

import ipaddress
import os
import socket

from kvq_cli.config import ConfigError


class AddressError(ConfigError):
    """An address that the server cannot listen on."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port` (0 = any free one); clients wait until it serves.

    Raises
    ------
    AddressError : the port is taken or not allowed, the host is not this machine's
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise AddressError(f"--host {host!r} is not an address: {error}") from error
    listener = socket.socket(family, kind, protocol)
    if os.name == "posix":  # a port whose last connections linger is free; elsewhere this steals
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()  # only then is the port taken: two sockets may bind the same one
    except OSError as error:
        listener.close()
        raise AddressError(
            f"cannot listen on {host} port {port}: {error.strerror}; "
            "choose another --host or --port (0 = any free port)"
        ) from error
    return listener


def url(host: str, listener: socket.socket) -> str:
    """The URL that reaches the socket from this machine."""
    port = listener.getsockname()[1]
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"  # a name
    if ip.is_unspecified:  # every address of the machine
        ip = ipaddress.ip_address("127.0.0.1" if ip.version == 4 else "::1")
    return f"http://{ip}:{port}" if ip.version == 4 else f"http://[{ip}]:{port}"
