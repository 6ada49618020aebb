"""Data-parallel training with TensorFlow 2.18 and newer: Horovod's interface on ringreduce's collectives.

    import ringreduce.tensorflow as hvd

    hvd.init()
    with tf.GradientTape() as tape:
        loss = ...
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)

Everything works at once, in a `tf.function`, and in graphs and sessions of TensorFlow 1. It runs on the host, so that
XLA cannot compile it (``jit_compile=True``).
"""

from ringreduce.common.libraries import require_framework

require_framework("tensorflow", __name__)

# ruff: noqa: E402  # what follows imports TensorFlow
import tensorflow

from ringreduce.runtime.names import *  # noqa: F403  # for type checkers, which see no further than one star
from ringreduce.tensorflow import (
    compression,
    elastic,
    functions,
    gradient_aggregation,
    gradients,
    mpi_ops,
    optimizer,
    sync_batch_norm,
    util,
)
from ringreduce.tensorflow.compression import Compression
from ringreduce.tensorflow.functions import *  # noqa: F403  # what these export is written down there, and not once more
from ringreduce.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
from ringreduce.tensorflow.local import DiLoCo, LocalSGD
from ringreduce.tensorflow.mpi_ops import *  # noqa: F403
from ringreduce.tensorflow.optimizer import DistributedOptimizer
from ringreduce.tensorflow.sync_batch_norm import SyncBatchNormalization
from ringreduce.training.averages import weighted_average
from ringreduce.training.built import *  # noqa: F403
from ringreduce.training.ops import *  # noqa: F403
from ringreduce.training.shares import loading, share

_executing_eagerly = tensorflow.executing_eagerly

__all__ = [
    "Compression",
    "DiLoCo",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalSGD",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "compression",
    "elastic",
    "functions",
    "gradient_aggregation",
    "gradients",
    "loading",
    "mpi_ops",
    "optimizer",
    "share",
    "sync_batch_norm",
    "util",
    "weighted_average",
]
__all__ += functions.__all__
__all__ += mpi_ops.__all__
__all__.sort()
