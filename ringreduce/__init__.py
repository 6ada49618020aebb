"""Ring and tree allreduce over MPI and shared memory, and data-parallel training on top of it.

    import ringreduce as rr

    rr.init()
    total = rr.allreduce(array)                 # NumPy arrays or torch tensors
    buffer = rr.empty(1_000_000, "float32")     # shared by the node: allreduced without a copy
    rr.allreduce(buffer, op="average", out=buffer)

PyTorch users start at `ringreduce.torch`. Importing this package starts nothing and reads no settings; `init` does.
"""

from ringreduce.communicator import Communicator
from ringreduce.config import VERSION, Config
from ringreduce.conventions import Conventions
from ringreduce.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigError,
    MismatchError,
    PeerLostError,
    RingReduceError,
    ShutdownError,
    TransportError,
    UnsupportedBufferError,
)
from ringreduce.instruments import Instrument
from ringreduce.metrics import Metrics
from ringreduce.paths import Choice, Feedback
from ringreduce.process_sets import ProcessSet
from ringreduce.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.reproducible import ReproducibleAccumulator, reproducible_allreduce
from ringreduce.runtime import (
    add_process_set,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    config,
    cross_rank,
    cross_size,
    empty,
    explain,
    global_process_set,
    init,
    is_initialized,
    local_rank,
    local_size,
    metrics,
    rank,
    reduce_scatter,
    remove_process_set,
    set_conventions,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    world,
)
from ringreduce.topology import Topology

__version__ = VERSION

__all__ = [
    "AVERAGE",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "Choice",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Communicator",
    "Config",
    "ConfigError",
    "Conventions",
    "Feedback",
    "Instrument",
    "Metrics",
    "MismatchError",
    "PeerLostError",
    "ProcessSet",
    "ReduceOp",
    "ReproducibleAccumulator",
    "RingReduceError",
    "ShutdownError",
    "Topology",
    "TransportError",
    "UnsupportedBufferError",
    "add_process_set",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "config",
    "cross_rank",
    "cross_size",
    "empty",
    "explain",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "metrics",
    "rank",
    "reduce_scatter",
    "remove_process_set",
    "reproducible_allreduce",
    "set_conventions",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "world",
]
