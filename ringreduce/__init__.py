"""Ring and tree allreduce over MPI and shared memory, and data-parallel training on top of it.

    import ringreduce as rr

    rr.init()
    total = rr.allreduce(array)                 # NumPy arrays or torch tensors
    buffer = rr.empty(1_000_000, "float32")     # shared by the node: allreduced without a copy
    rr.allreduce(buffer, op="average", out=buffer)

PyTorch users start at `ringreduce.torch`. Importing this package starts nothing and reads no settings; `init` does.
"""

from ringreduce import runtime
from ringreduce.collectives import Choice, Feedback
from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.reproducible import ReproducibleAccumulator, reproducible_allreduce
from ringreduce.common import errors, reduce_ops
from ringreduce.common.config import VERSION, Config
from ringreduce.common.conventions import Conventions
from ringreduce.common.errors import *  # noqa: F403  # what it exports is written down there, and not once more
from ringreduce.common.instruments import Instrument
from ringreduce.common.reduce_ops import *  # noqa: F403
from ringreduce.common.topology import Topology
from ringreduce.launcher.function import run
from ringreduce.observe.audit import fingerprint
from ringreduce.observe.metrics import Metrics
from ringreduce.runtime import *  # noqa: F403
from ringreduce.runtime.blocking import *  # noqa: F403  # once more, for type checkers
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.averages import weighted_average
from ringreduce.training.objects import allgather_object, broadcast_object

__version__ = VERSION

__all__ = [
    "Choice",
    "Communicator",
    "Config",
    "Conventions",
    "Feedback",
    "Instrument",
    "Metrics",
    "ProcessSet",
    "ReproducibleAccumulator",
    "Topology",
    "allgather_object",
    "broadcast_object",
    "fingerprint",
    "reproducible_allreduce",
    "run",
    "weighted_average",
]
__all__ += errors.__all__
__all__.remove("name_ranks")  # which words errors, and is for nobody outside
__all__ += reduce_ops.__all__
__all__ += runtime.__all__
for _for_bindings in ("failure", "follow_timelines", "group", "rank_and_size"):
    __all__.remove(_for_bindings)
__all__.sort(key=lambda name: (not name.isupper(), name))


def __dir__() -> list[str]:
    """Return the public names alone."""
    return __all__
