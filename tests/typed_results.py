"""What type checkers are told of results; `scripts/lint` checks it, and nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

import ringreduce as rr

if TYPE_CHECKING:
    from typing_extensions import assert_type

    import ringreduce.jax as rj
    import ringreduce.keras as hk
    import ringreduce.tensorflow as ht
    import ringreduce.torch as hvd

    Floats = npt.NDArray[np.float32]

    def check(array: Floats, number: float, communicator: rr.Communicator) -> None:
        """Arrays are arrays of the same kind, numbers are numbers; who is not the root has none."""
        assert_type(rr.allreduce(array), Floats)
        assert_type(rr.allreduce(number), float)
        assert_type(rr.reduce_scatter(array), Floats)
        assert_type(rr.allgather(array), Floats)
        assert_type(rr.broadcast(array, 0), Floats)
        assert_type(rr.alltoall(array), Floats)
        assert_type(rr.reduce(array, 0), Floats | None)
        assert_type(rr.gather(array), Floats | None)
        assert_type(communicator.allreduce(array), Floats)
        assert_type(communicator.alltoall(array, [1, 2]), tuple[Floats, list[int]])
        assert_type(rr.weighted_average(number, 2.0), float)
        assert_type(rr.weighted_average({"loss": number}, 2.0), dict[str, float])

    def check_names() -> None:
        """What bindings have from elsewhere is there."""
        assert_type((rj.rank(), hk.rank(), ht.rank(), hvd.rank()), tuple[int, int, int, int])
        assert_type((hk.mpi_built(), ht.mpi_built(), hvd.mpi_built()), tuple[bool, bool, bool])
        assert_type((rj.Sum, hk.Sum, ht.Sum, hvd.Sum), tuple[rr.ReduceOp, rr.ReduceOp, rr.ReduceOp, rr.ReduceOp])
