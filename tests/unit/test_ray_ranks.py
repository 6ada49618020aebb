"""What the program makes of the stand-ins of ranks on Ray."""

from __future__ import annotations

from io import BufferedRWPair, BytesIO, RawIOBase

from ringreduce.engines.ray_ranks import StandIns


class LostConnection(RawIOBase):
    """A connection to a host that does not answer any more."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        raise TimeoutError


def test_a_stand_in_whose_host_does_not_answer_has_ended() -> None:
    """As one has whose connection ends: the job is over for the executor."""
    stand_ins = StandIns()
    said = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    stream = BufferedRWPair(LostConnection(), BytesIO())
    stand_ins.offer({"environ": said, "host": "10.0.0.2/0", "pids": "1"}, stream)
    found = stand_ins.take(1.0)
    assert found[0].has_ended
    assert stand_ins.are_over([*found.values()])
