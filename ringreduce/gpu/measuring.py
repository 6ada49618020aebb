"""What measuring on a GPU takes beside its driver: memory of CuPy's own, and times between events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringreduce.gpu.cupy_driver import Driver, cuda_driver


def cupy_tools(local_rank: int = 0) -> CupyTools:
    """Make a GPU this process's current one and return what measures on it.

    Args:
        local_rank: ranks of a node take its GPUs in turn.

    Raises:
        UnsupportedBufferError: CuPy is missing, or finds no GPU.
    """
    cuda_driver()  # which says what is missing
    import cupy

    number = local_rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(number).use()
    return CupyTools(cuda_driver(number))


class CupyTools:
    """Plain arrays and a stopwatch on one GPU, which is the current one; all on CuPy's current stream.

    Attributes:
        driver: the GPU's.
    """

    def __init__(self, driver: Driver) -> None:
        import cupy

        self.driver = driver
        self._cupy = cupy
        self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def empty(self, nbytes: int) -> Any:
        """Return an uninitialised uint8 array that no peer can reach."""
        return self._cupy.empty(nbytes, "uint8")

    def ready(self) -> None:
        """Return when the current stream is idle."""
        self._cupy.cuda.get_current_stream().synchronize()

    def time(self, call: Callable[[], object]) -> float:
        """Return the seconds between events before and after a call, for the GPU; waits until all of it is done."""
        self._begin.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(self._begin, self._end)) / 1e3
