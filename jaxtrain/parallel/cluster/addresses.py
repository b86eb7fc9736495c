"""Addresses of hosts, and the sockets on which process 0 listens."""

import errno
import ipaddress
import socket
from collections.abc import Iterator, Sequence


def is_loopback(host: str) -> bool:
    """Tell whether only this machine reaches a host of this name or address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.strip("[]").lower() == "localhost"


def is_ipv6(text: str) -> bool:
    """Tell whether a text is an IPv6 address, without brackets or a port."""
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def on_this_machine(host: str, port: int) -> list[str]:
    """Return the addresses of ``host`` on this machine, where process 0 listens, [] = everywhere.

    [] if the name leads to no address of this machine, as that of a service in front of it, or to
    loopback, as a machine's own name does on some systems although others reach it by that name.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    resolved = dict.fromkeys(str(info[4][0]) for info in infos)
    if not is_loopback(host):
        resolved = dict.fromkeys(address for address in resolved if not is_loopback(address))
    return [address for address in resolved if _is_of_this_machine(address)]


def _is_of_this_machine(address: str) -> bool:
    try:
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listeners(places: Sequence[str], port: int) -> Iterator[socket.socket]:
    """Listen at each of ``places``, or on every interface if there are none. Raises OSError."""
    # With SO_REUSEADDR, which create_server sets, another listener is still an error.
    for address in places:
        yield socket.create_server((address, port), family=_family(address), backlog=1024)
    if places:
        return
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    yield socket.create_server(("", port), family=family, dualstack_ipv6=dual_stack, backlog=1024)
