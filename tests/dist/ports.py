"""Ports for jobs that are told where to meet before any rank listens there."""

import random
import socket

import pytest

# Below the ports that Linux hands out by itself (32768 and up): those may go to any connection of another
# test between the moment a port is found free and the moment rank 0 listens on it.
_PORTS = range(20_000, 32_000)
# A generator of its own, seeded by the system: tests that run side by side seed the shared one alike.
_RANDOM = random.SystemRandom()


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nothing listens on; the test is skipped where the machine has no such address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:
        pytest.skip(f"no {address} here")
    while True:
        port = _RANDOM.choice(_PORTS)
        try:
            socket.create_server((address, port), family=family).close()
        except OSError:
            continue
        return port
