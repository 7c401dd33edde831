import socket

import pytest

from kvq_cli.server.address import AddressError, bind, url


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("localhost", "localhost"),
    ],
)
def test_the_url_reaches_the_socket_from_this_machine(host, shown):
    with bind(host, 0) as listener:
        port = listener.getsockname()[1]
        assert url(host, listener) == f"http://{shown}:{port}"
        socket.create_connection((shown, port), timeout=5).close()


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_an_ipv6_address_stands_in_brackets(host):
    try:
        listener = bind(host, 0)
    except AddressError as error:
        pytest.skip(f"this machine has no IPv6 address: {error}")
    with listener:
        assert url(host, listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_a_taken_port_and_a_foreign_host_are_refused():
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(AddressError, match=f"port {port}"):
            bind("127.0.0.1", port)
    with pytest.raises(AddressError, match=r"no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


def test_a_port_is_taken_from_the_moment_it_is_bound():
    with bind("127.0.0.1", 0) as first, pytest.raises(AddressError, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])


def test_a_host_that_no_name_can_be_is_refused():
    with pytest.raises(AddressError, match="is not an address"):
        bind("a" * 70, 0)
