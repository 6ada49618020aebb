"""What the program makes of the stand-ins of ranks on Ray."""

from __future__ import annotations

import socket

from ringreduce.engines.ray_ranks import StandIns
from ringreduce.launcher.connection import HostConnection


def test_a_stand_in_whose_host_does_not_answer_has_ended() -> None:
    """As one has whose connection ends: the job is over for the executor."""
    stand_ins = StandIns()
    said = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(16))  # its random number
        ours.settimeout(0.01)  # as TCP_USER_TIMEOUT ends a connection
        connection = HostConnection(ours, "token", answers=True)
        stand_ins.offer({"environ": said, "host": "10.0.0.2/0", "pids": "1"}, connection)
    found = stand_ins.take(1.0)
    assert found[0].has_ended
    assert stand_ins.are_over([*found.values()])
