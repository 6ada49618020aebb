"""Ring and tree allreduce over MPI and shared memory, and data-parallel training on top of it.

    import ringreduce as rr

    rr.init()
    total = rr.allreduce(array)                 # NumPy arrays or torch tensors
    buffer = rr.empty(1_000_000, "float32")     # shared by the node: allreduced without a copy
    rr.allreduce(buffer, op="average", out=buffer)

PyTorch users start at `ringreduce.torch`. Importing this package starts nothing and reads no settings; `init` does.
"""

from ringreduce.audit.fingerprints import fingerprint
from ringreduce.collectives import Choice, Feedback
from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.send_recv import PendingMessage
from ringreduce.collectives.sums.reproducible import ReproducibleAccumulator, reproducible_allreduce
from ringreduce.common.config import VERSION, Config
from ringreduce.common.conventions import Conventions
from ringreduce.common.errors import (
    ChangedMessageError,
    CollectiveError,
    CollectiveTimeoutError,
    ConfigError,
    ForeignFileError,
    MismatchError,
    NotFiniteError,
    PeerLostError,
    RingReduceError,
    ShutdownError,
    TransportError,
    UnsupportedBufferError,
    since,
)
from ringreduce.common.instruments import Instrument
from ringreduce.common.reduce_ops import (
    AVERAGE,
    BAND,
    BOR,
    BXOR,
    LAND,
    LOR,
    LXOR,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    ReduceOp,
)
from ringreduce.common.topology import Topology
from ringreduce.launcher.function import run
from ringreduce.observe.job.job_report import JobReport
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.runtime import (
    add_process_set,
    audit,
    audited,
    busy,
    config,
    count,
    cross_rank,
    cross_size,
    dump,
    global_process_set,
    go_on,
    hosts_changed,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    metrics,
    rank,
    record,
    recoveries,
    remove_process_set,
    report,
    report_value,
    request_stop,
    set_conventions,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    stopping,
)
from ringreduce.runtime.blocking import (
    Plan,
    allgather,
    allgather_init,
    allreduce,
    allreduce_init,
    alltoall,
    alltoall_init,
    barrier,
    broadcast,
    broadcast_init,
    empty,
    explain,
    exscan,
    gather,
    irecv,
    isend,
    maxloc,
    minloc,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_init,
    scan,
    scatter,
    send,
    sendrecv,
    world,
)
from ringreduce.runtime.process import Recovery
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.calls.averages import weighted_average
from ringreduce.training.calls.objects import allgather_object, broadcast_object
from ringreduce.transport.point_to_point import PROC_NULL

__version__ = VERSION

__all__ = [
    "AVERAGE",
    "BAND",
    "BOR",
    "BXOR",
    "LAND",
    "LOR",
    "LXOR",
    "MAX",
    "MIN",
    "PROC_NULL",
    "PRODUCT",
    "SUM",
    "ChangedMessageError",
    "Choice",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Communicator",
    "Config",
    "ConfigError",
    "Conventions",
    "Feedback",
    "ForeignFileError",
    "Instrument",
    "JobReport",
    "Metrics",
    "MismatchError",
    "NotFiniteError",
    "PeerLostError",
    "PendingMessage",
    "Plan",
    "ProcessSet",
    "Recovery",
    "ReduceOp",
    "ReproducibleAccumulator",
    "RingReduceError",
    "ShutdownError",
    "Topology",
    "TransportError",
    "UnsupportedBufferError",
    "add_process_set",
    "allgather",
    "allgather_init",
    "allgather_object",
    "allreduce",
    "allreduce_init",
    "alltoall",
    "alltoall_init",
    "audit",
    "audited",
    "barrier",
    "broadcast",
    "broadcast_init",
    "broadcast_object",
    "busy",
    "config",
    "count",
    "cross_rank",
    "cross_size",
    "dump",
    "empty",
    "explain",
    "exscan",
    "fingerprint",
    "gather",
    "global_process_set",
    "go_on",
    "hosts_changed",
    "init",
    "irecv",
    "is_homogeneous",
    "is_initialized",
    "isend",
    "local_rank",
    "local_size",
    "maxloc",
    "metrics",
    "minloc",
    "rank",
    "record",
    "recoveries",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_init",
    "remove_process_set",
    "report",
    "report_value",
    "reproducible_allreduce",
    "request_stop",
    "run",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "set_conventions",
    "shutdown",
    "since",
    "size",
    "start_timeline",
    "stop_timeline",
    "stopping",
    "weighted_average",
    "world",
]


def __dir__() -> list[str]:
    """Return the public names alone."""
    return __all__
