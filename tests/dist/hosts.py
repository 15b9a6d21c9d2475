"""Two hosts made of network namespaces, joined by one wire: each has a name, an address, and a loopback of its own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path


class NoNamespaces(Exception):  # noqa: N818
    """This machine lets us make none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A namespace; `command(…)` runs there."""

    name: str
    address: str
    hosts_file: Path

    def command(self, *words: object) -> list[str]:
        """The words of a command that runs `words` on this host, under its name."""
        # A host knows names by its own /etc/hosts, and its own name by its own UTS namespace.
        script = f'mount --bind {self.hosts_file} /etc/hosts && hostname {self.name} && exec "$@"'
        enter = ["ip", "netns", "exec", self.name, "unshare", "--mount", "--uts", "sh", "-c", script, "sh"]
        return [*enter, *map(str, words)]


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts for the block. Raises NoNamespaces where it takes rights or tools that are not there."""
    number = os.getpid() % 65536
    hosts_file = folder / "hosts"
    one, other = (
        Host(name=f"shardwise-{number:x}{end}", address=f"10.77.{number % 256}.{index}", hosts_file=hosts_file)
        for index, end in ((1, "a"), (2, "b"))
    )
    hosts_file.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in (one, other)))
    with ExitStack() as clean_up:
        for host in (one, other):
            _ip("netns", "add", host.name)
            clean_up.callback(_ip, "netns", "del", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        _ip("-n", one.name, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", other.name)
        for host in (one, other):
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "wire")
            _ip("-n", host.name, "link", "set", "wire", "up")
        trial = subprocess.run(one.command("true"), capture_output=True, text=True, check=False)
        if trial.returncode != 0:
            raise NoNamespaces(trial.stderr.strip())
        yield one, other


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoNamespaces("there is no ip command (iproute2)") from None
    if done.returncode != 0:
        raise NoNamespaces(f"ip {' '.join(words)}: {done.stderr.strip()}")
