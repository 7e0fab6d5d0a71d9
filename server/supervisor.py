"""What the process says to whoever started it: systemd's notification protocol, and exit codes.

    0  ended on a signal       1  could not go on: start it again       2  a mistake in how it was started

Any thread may call these.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from typing import NoReturn

COULD_NOT_GO_ON = 1


def tell(state: str) -> None:
    """Send systemd a line such as `READY=1`, if it listens: see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.settimeout(1.0)
        datagrams.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
        datagrams.send(state.encode())


def leave(code: int) -> NoReturn:
    """End the process now, whatever its threads and tasks are doing."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
