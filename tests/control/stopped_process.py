"""A process with a channel, for tests that stop it: says what it sees, one line for each that it is sent."""

from __future__ import annotations

import sys
import threading
import time

from mmcache.control.channel import ControlChannel
from mmcache.errors import MMCacheError
from mmcache.key import EmbeddingKey


def main(address: str) -> None:
    channel = ControlChannel(address, name="stopped")
    channel.start()
    assert channel.wait_fresh(20.0) is not None
    print("fresh", flush=True)
    outcome: list[str] = []

    def acquire() -> None:
        try:
            channel.acquire([EmbeddingKey("m", "v", "h")], wait_s=60.0, deadline=time.monotonic() + 60.0)
            outcome.append("acquired")
        except MMCacheError as error:
            outcome.append(type(error).__name__)

    caller = threading.Thread(target=acquire)
    caller.start()
    for line in sys.stdin:
        if line == "fresh?\n":
            print(channel.fresh() is not None, flush=True)
        elif line == "acquired?\n":
            caller.join(20.0)
            print(*outcome, flush=True)
        elif line == "again?\n":
            print(channel.wait_fresh(20.0) is not None, flush=True)
    channel.close()


if __name__ == "__main__":
    main(sys.argv[1])
