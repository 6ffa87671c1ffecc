"""Two network namespaces with a router between them that can stop forwarding: packets then vanish without a word."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence

CLIENT_ADDRESS = "10.78.1.2"
SERVER_ADDRESS = "10.78.2.2"
_TIMEOUT_S = 20.0


class Namespace:
    """A network namespace, kept by a process that does nothing."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            [_tool("unshare"), "--net", "sh", "-c", "echo there; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._keeper.stdout is not None
        self._keeper.stdout.readline()  # from then on it has a namespace of its own
        self.pid = self._keeper.pid
        self.within = [_tool("nsenter"), "--net", "--target", str(self.pid)]
        """The beginning of a command line that runs in it; the process id stays."""
        self.run("ip", "link", "set", "lo", "up")

    def run(self, *command: str) -> None:
        """Run a command in it. Raises CalledProcessError."""
        subprocess.run([*self.within, *command], check=True, timeout=_TIMEOUT_S, capture_output=True)

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.communicate()


class Network:
    """Namespaces `client` and `server`, and the way between them."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.client, self.server, self._router = (self._namespace(stack) for _ in range(3))
        for number, (end, address) in enumerate([(self.client, CLIENT_ADDRESS), (self.server, SERVER_ADDRESS)], 1):
            gateway = f"{address[:-1]}1"
            link = f"toward{number}"
            self._router.run(
                *("ip", "link", "add", link, "type", "veth", "peer", "name", "uplink", "netns", str(end.pid))
            )
            self._router.run("ip", "address", "add", f"{gateway}/24", "dev", link)
            self._router.run("ip", "link", "set", link, "up")
            end.run("ip", "address", "add", f"{address}/24", "dev", "uplink")
            end.run("ip", "link", "set", "uplink", "up")
            end.run("ip", "route", "add", "default", "via", gateway)
        self._forward(True)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """No packet arrives within a `with` block, and nobody is told."""
        self._forward(False)
        try:
            yield
        finally:
            self._forward(True)

    def _forward(self, on: bool) -> None:
        self._router.run("sh", "-c", f"echo {int(on)} > /proc/sys/net/ipv4/ip_forward")

    @staticmethod
    def _namespace(stack: contextlib.ExitStack) -> Namespace:
        return stack.enter_context(contextlib.closing(Namespace()))


def why_not() -> str:
    """Why there can be no such network here; empty if there can."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine"
    try:
        with contextlib.ExitStack() as stack:
            Network(stack)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.decode(errors='replace').strip()}"
    return ""


def answers(within: Sequence[str], python: str, address: str) -> bool:
    """Whether a Mooncake process or a controller answers at an address, asked from within a namespace."""
    program = f"import sys; from mmcache.store.launch import port_answers; sys.exit(not port_answers({address!r}))"
    return subprocess.run([*within, python, "-c", program], check=False, timeout=_TIMEOUT_S).returncode == 0


def _tool(name: str) -> str:
    return shutil.which(name) or name
