"""New results of several arrays in host memory: where they are, and that they can be reduced there."""

from __future__ import annotations

import numpy as np
import pytest

from ringreduce.common.config import Config
from ringreduce.testing import run_ranks
from ringreduce.training.binding.host import laid_out
from ringreduce.transport.shared.arena import NOWHERE


@pytest.mark.parametrize("limit_nbytes", [0, 64 << 20])
def test_results_keep_to_their_limit(limit_nbytes: int) -> None:
    """Those beyond ``RINGREDUCE_RESULTS_BYTES`` are private; frameworks can use both."""

    def body(world):
        given = [np.zeros(shape, dtype) for shape, dtype in (((3, 5), "f4"), ((1 << 18,), "f4"), ((1 << 18,), "f8"))]
        buffers, results = laid_out(world, given)
        for each in results:
            each[...] = world.rank + 1
        for each in buffers:
            world.allreduce(each, out=each)
        for source, result in zip(given, results, strict=True):
            assert (result.shape, result.dtype) == (source.shape, source.dtype)
            assert result.ctypes.data % 64 == 0
            assert (result == 3).all()
        locate = world._context.arena.locate
        return [locate(each.ctypes.data, each.nbytes) != NOWHERE for each in buffers]

    settings = Config(timeout_s=30.0, results_nbytes=limit_nbytes)
    assert run_ranks(2, body, config=settings) == [[limit_nbytes > 0] * 2] * 2
