"""Networks that each host of a job has for itself, as those of Docker: MPI would wait for ranks there in vain."""

from __future__ import annotations

import os
from dataclasses import replace

from ringreduce.common.networks import FILES, own_text, own_to_each, read_interfaces
from ringreduce.launcher.reach import others, reaches, texts
from ringreduce.launcher.start import Start

_LIMIT_S = 10.0
#: What Open MPI leaves out anyway, unless it is told something else.
_ANYWAY = "127.0.0.1/8,sppp"


def without_own_networks(start: Start) -> Start:
    """Have Open MPI leave out interfaces whose address two hosts share, unless users choose networks.

    Each host is asked for its addresses; those that do not answer within 10 s count as having none.
    """
    names = others(start)
    chosen = start.spec.interfaces or any("_if_" in word for word in (*os.environ, *start.spec.more))
    if not names or chosen or start.mpirun.kind != "Open MPI" or not reaches(start):
        return start
    said = [own_text(), *texts(start, names, FILES, _LIMIT_S)]
    if not (own := ",".join(own_to_each([read_interfaces(text) for text in said]))):
        return start
    daemons = "PRTE_MCA_prte_if_exclude" if start.mpirun.major >= 5 else "OMPI_MCA_oob_tcp_if_exclude"
    return replace(start, networks={"OMPI_MCA_btl_tcp_if_exclude": f"{_ANYWAY},{own}", daemons: own})
