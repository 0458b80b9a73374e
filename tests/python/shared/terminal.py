"""A terminal that commands write to."""

import fcntl
import os
import pty
import struct
import subprocess
import termios


def on_terminal(*command: object, columns: int = 0, **environment: str) -> str:
    """What a command writes to a terminal; without `columns` to one that does not say how wide it is."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    where = os.environ | environment
    child = subprocess.Popen(list(map(str, command)), stdout=side, stderr=side, stdin=side, env=where)
    os.close(side)
    shown = b""
    while True:
        try:
            part = os.read(main, 4096)
        except OSError:  # the other side is closed
            part = b""
        if not part:
            break
        shown += part
    os.close(main)
    assert child.wait(timeout=60) == 0, shown
    return shown.decode()
