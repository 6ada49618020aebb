"""What can be read of a job on the link between two hosts, with and without a key: captured there by tcpdump."""

from __future__ import annotations

import base64
import shutil
import struct
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from machines import Cluster, cluster_of

from ringreduce.common.keys import write_secret

cluster = cluster_of("ssh", 2)

PIECE = 64
#: What a rank gives to the other one: by itself, encoded to 8 bits, in an object, and as the name of an operation.
ARRAY = np.random.default_rng(41).bytes(2_000 * PIECE)
#: The largest is in each piece, so all blocks of the encoding have scale 1, and codes are the values.
CODES = np.random.default_rng(42).integers(-127, 128, 10_240).astype(np.int8)
CODES[::32] = 127
OBJECT = b"a diagnosis that nobody else is to read, in an object"
NAME = b"the name of a gradient, in a note"
MESSAGE = np.random.default_rng(43).bytes(PIECE)

JOB = f"""
import numpy as np
import ringreduce as rr
from ringreduce.torch import allreduce_async, synchronize
import torch

rr.init()
me = rr.rank()
array = np.frombuffer(np.random.default_rng(41).bytes({len(ARRAY)}), np.uint8)
assert (rr.broadcast(array if me == 0 else np.zeros_like(array), root=0) == array).all()
assert rr.broadcast_object({{"said": {OBJECT.decode()!r}}} if me == 0 else None)["said"] == {OBJECT.decode()!r}
values = np.random.default_rng(42).integers(-127, 128, {len(CODES)}).astype(np.float32)
values[::32] = 127
assert (rr.allreduce(values if me == 0 else np.zeros_like(values), rr.SUM, compression="int8") == values).all()
synchronize(allreduce_async(torch.ones(3), name={NAME.decode()!r}))
if me == 0:
    rr.send(np.frombuffer(np.random.default_rng(43).bytes({PIECE}), np.uint8), 1)
else:
    rr.recv(np.zeros({PIECE}, np.uint8), 0)
print("rank", me, flush=True)
"""


@contextmanager
def captured(cluster: Cluster, path: Path) -> Iterator[None]:
    """Write to a file all that goes over TCP to the first host, and from it."""
    at_switch = ["ip", "netns", "exec", f"{cluster.name}-switch"]
    # Without the mode, the packets of the last second may not be in the file.
    command = [*at_switch, "tcpdump", "--immediate-mode", "-i", "port0", "-w", path, "-B", "65536", "-Z", "root", "tcp"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as dump:
        assert dump.stderr is not None
        assert "listening on port0" in dump.stderr.readline()
        try:
            yield
        finally:
            dump.terminate()
            said = dump.stderr.read()
    assert "\n0 packets dropped by kernel" in said, said


def streams(path: Path) -> list[bytes]:
    """Return what each end of each connection has sent, from its begin, put together by sequence numbers."""
    file = path.read_bytes()
    assert file[:4] == struct.pack("<I", 0xA1B2C3D4)
    pieces: defaultdict[bytes, dict[int, bytes]] = defaultdict(dict)
    first: dict[bytes, int] = {}
    place = 24
    while place < len(file):
        (length,) = struct.unpack_from("<I", file, place + 8)
        ip = memoryview(file)[place + 16 + 14 : place + 16 + length]
        place += 16 + length
        tcp = ip[(ip[0] & 15) * 4 : int.from_bytes(ip[2:4], "big")]
        ends, sequence = bytes(ip[12:20]) + bytes(tcp[:4]), int.from_bytes(tcp[4:8], "big")
        if tcp[13] & 2:  # SYN: the first byte has the next number
            first[ends] = sequence + 1
        elif data := bytes(tcp[(tcp[12] >> 4) * 4 :]):
            offset = (sequence - first[ends]) % (1 << 32)
            pieces[ends][offset] = max(pieces[ends].get(offset, b""), data, key=len)
    return [joined(each) for each in pieces.values()]


def joined(pieces: dict[int, bytes]) -> bytes:
    """Return bytes from pieces by their places; some may be there twice, and none may be missing."""
    stream = bytearray()
    for place, data in sorted(pieces.items()):
        assert place <= len(stream), "the capture lacks a packet"
        stream[place:] = data if place + len(data) > len(stream) else stream[place:]
    return bytes(stream)


def pieces(known: bytes) -> list[bytes]:
    return [known[place : place + PIECE] for place in range(0, len(known), PIECE)]


def found(known: Sequence[bytes], sent: Sequence[bytes]) -> int:
    return sum(any(each in stream for stream in sent) for each in known)


def run(cluster: Cluster, folder: Path, *options: str) -> list[bytes]:
    """Return what the hosts have sent each other, as `streams`, while they ran the job with options."""
    path = folder / "capture"
    hosts = f"{cluster.host(0)}:1,{cluster.host(1)}:1"
    with captured(cluster, path):
        done = cluster.run(0, "ringreduce", "run", *options, "-H", hosts, "python", "job.py")
    assert (done.status, done.ranks()) == (0, ["rank 0", "rank 1"]), done.text
    return streams(path)


@pytest.mark.skipif(shutil.which("tcpdump") is None, reason="there is no tcpdump")
def test_what_travels_can_be_read_without_a_key_alone(cluster: Cluster, tmp_path: Path) -> None:
    """An array, an encoded one, an object, the name of an operation, a message; the key cannot be found ever."""
    key = cluster.shared / "key"
    write_secret(key)
    cluster.write("job.py", JOB)
    text = key.read_bytes().splitlines()[1]
    raw = base64.b64decode(text)
    array, codes = pieces(ARRAY), pieces(CODES.tobytes())

    sent = run(cluster, tmp_path)
    assert found(array, sent) >= 0.99 * len(array)  # others have a header of MPI's in between
    assert found(codes, sent) >= 0.9 * len(codes)
    assert [found([each], sent) for each in (OBJECT, NAME, MESSAGE)] == [1, 1, 1]

    sent = run(cluster, tmp_path, f"--encrypt={key}")
    assert sum(map(len, sent)) > len(ARRAY)
    assert [found(each, sent) for each in (array, codes, [OBJECT, NAME, MESSAGE])] == [0, 0, 0]
    assert str(key).encode() in b"".join(sent)  # what mpirun sends has the path
    assert found([raw, text, text[:20], raw.hex().encode(), raw[:16], raw[16:]], sent) == 0
