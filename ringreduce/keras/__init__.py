"""Data-parallel training with Keras 3, on its backends tensorflow, jax and torch.

    import ringreduce.keras as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=2 * (hvd.rank() == 0))

Import it before the first model is made: on the backend jax, errors are then raised where they happen. Gradients are
reduced in host memory; on the backend jax, the step has to run on the CPU.
"""

from ringreduce.common.libraries import require_framework

require_framework("keras", __name__)

from ringreduce.keras import callbacks, elastic, functions, optimizer  # noqa: E402
from ringreduce.keras.functions import *  # noqa: E402, F403  # what it exports is written down there
from ringreduce.keras.optimizer import *  # noqa: E402, F403
from ringreduce.runtime import names  # noqa: E402
from ringreduce.runtime.names import *  # noqa: E402, F403
from ringreduce.training import built  # noqa: E402
from ringreduce.training.averages import weighted_average  # noqa: E402
from ringreduce.training.built import *  # noqa: E402, F403
from ringreduce.training.objects import allgather_object, broadcast_object  # noqa: E402
from ringreduce.training.ops import *  # noqa: E402, F403
from ringreduce.training.requests import barrier, join  # noqa: E402
from ringreduce.training.shares import loading, share  # noqa: E402

__all__ = ["allgather_object", "barrier", "broadcast_object", "callbacks", "elastic", "join", "loading", "share"]
__all__ += ["weighted_average"]
__all__ += built.__all__
__all__ += names.__all__
__all__ += functions.__all__
__all__ += optimizer.__all__
__all__.sort()
