"""Kafka's address, in the one form that all settings take."""

import re
from ipaddress import IPv6Address

from rollcast.schemas.errors import ContractError

_HOST_AND_PORT = re.compile(r"(?:\[(?P<ipv6>[^][]*)\]|[^][\s/@,:]+):(?P<port>[0-9]{1,5})")


def check_bootstrap_servers(addresses: str) -> None:
    """Returns if the addresses have the form `host:port[,host:port]`, IPv6 addresses in brackets.

    Kafka's own clients ask for the port too. Ours would take some other one, and wait for what is not there.

    Raises:
        ContractError: they have not.
    """
    for address in addresses.split(","):
        if not _is_address(address.strip()):
            raise ContractError(
                f"bootstrap_servers (--bootstrap, ROLLCAST_BOOTSTRAP_SERVERS) is {addresses!r}, and {address!r} is no "
                "host:port; give Kafka's address as host:port[,host:port], an IPv6 address in brackets"
            )


def _is_address(address: str) -> bool:
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65_536:
        return False
    try:
        return found["ipv6"] is None or bool(IPv6Address(found["ipv6"]))
    except ValueError:
        return False
