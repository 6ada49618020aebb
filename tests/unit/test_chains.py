"""The processes between mpirun and the ranks of a host."""

from __future__ import annotations

import subprocess
import sys

from ringreduce.launcher.chains import Chains

#: In place of mpirun: starts a rank for each line that it reads, and says so.
STARTS = """
import os, subprocess, sys
started = []
for rank, _ in enumerate(sys.stdin):
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)}
    command = [sys.executable, "-c", "print(flush=True); input()"]
    started.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE))
for each in started:
    each.communicate()
"""


def test_looks_follow_each_other_soon_until_all_ranks_were_seen() -> None:
    """Mpirun starts one after the other; a look that saw the first alone was taken for the last of the first ones."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    chains = Chains(process.pid, None, print, patience=10.0, has_mpirun=False, ranks=2)
    try:
        for rank in range(2):
            chains.look()
            assert not chains.known
            process.stdin.write("\n")
            process.stdout.readline()  # That rank runs.
            chains.look()
            assert [each.pid for each in chains.ranks()] != []
            assert chains.known == (rank == 1)
    finally:
        process.communicate()
    chains.look()
    assert chains.known
