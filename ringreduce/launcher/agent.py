"""What mpirun starts in place of ssh: it asks `agent_server` to run a command on a host, and ends with its status.

    python -I -S agent.py SOCKET [options for ssh] HOST COMMAND...

The file of the socket lies in a folder of this user alone. This takes the standard library alone, for a quick start.
"""

from __future__ import annotations

import json
import socket
import sys

#: The status of ssh where it reaches no host.
UNREACHABLE = 255
#: Above it are statuses of shells whose commands a signal has ended.
_SIGNALS = 128


def _main(path: str, *words: str) -> int:
    host, *command = words[next(at for at, word in enumerate(words) if not word.startswith("-")) :]
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rwb") as stream:
        try:
            connection.connect(path)
            stream.write(json.dumps([host, " ".join(command)]).encode() + b"\n")
            stream.flush()
            status = stream.readline()
        except OSError:
            status = b""
    if not status:
        sys.stderr.write(f"ringreduce: nothing starts commands on {host} any more\n")
    elif int(status) < 0 or int(status) > _SIGNALS:
        sys.stderr.write(f"ringreduce: what mpirun has started on {host} is lost\n")  # by the name that mpirun got
    return int(status or UNREACHABLE)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
