"""The allreduce of device memory by NCCL, through CuPy.

NCCL waits without limit for ranks that do not come, so the ranks first make sure, over messages, that each of them can
come. A rank that fails all the same leaves the others waiting in a thread, up to a limit.

A rendezvous on the host comes first, as a collective that not all ranks call would never end on the GPU. The rest is
enqueued on the caller's stream. NCCL does not notice that a peer has failed; the rendezvous of the next call does
out; kernels that wait for the peer are ended then.

The order of summation is NCCL's: all ranks get the same bits, which depend on the number of ranks and the size, and
16-bit floats may be rounded at every step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from ringreduce.buffers import DType
from ringreduce.buffers.device_arrays import cupy_for
from ringreduce.collectives.call import NCCL
from ringreduce.collectives.context import Context
from ringreduce.common.errors import (
    CollectiveTimeoutError,
    MismatchError,
    RingReduceError,
    TransportError,
    UnsupportedBufferError,
)
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.cupy_driver import Arithmetic, CupyDriver, Stream
from ringreduce.gpu.path import OnDevice
from ringreduce.transport.messages import Messages, StepFailedError, exchange_json, together
from ringreduce.transport.shared.board import Signature
from ringreduce.transport.waiting import Waiter

# As nccl.h numbers them. CuPy passes on whatever it is given, and has no names for the last dtype and the last op.
_DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
_OPS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.AVERAGE: 4}
_OLDEST_WITH_AVERAGE = _OLDEST_WITH_BFLOAT16 = 21000
#: The first that takes several ranks on one GPU, and the variable in which "1" asks for that.
_OLDEST_WITH_SHARED_GPUS = 23000
_SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
#: What NCCL takes for the name of the host. NCCL lets ranks of two hosts be, whatever their GPUs.
_HOST = "NCCL_HOSTID"

#: The longest that a rank waits for the others to connect.
_CONNECTING_S = 60.0

#: What CuPy raises; a KeyError where NCCL has a newer kind of error than CuPy has a name for.
_ERRORS = (RuntimeError, KeyError)


def code_of_dtype(dtype: DType, version: int) -> int | None:
    """Return NCCL's number of a dtype, None if that version has none."""
    if dtype.name == "bfloat16" and version < _OLDEST_WITH_BFLOAT16:
        return None
    return _DTYPES.index(dtype.name) if dtype.name in _DTYPES else None


def code_of_op(op: ReduceOp, dtype: DType, version: int) -> int | None:
    """Return NCCL's number of an op, None if it does something else than this package has it do.

    NCCL leaves open what MIN and MAX make of a NaN, and rounds averages of integers as it likes.
    """
    floating = dtype.kind in ("float", "complex")
    if op in (ReduceOp.MIN, ReduceOp.MAX) and floating:
        return None
    if op is ReduceOp.AVERAGE and (not floating or version < _OLDEST_WITH_AVERAGE):
        return None
    return _OPS.get(op)


def _refusal(everyone: Sequence[tuple[int, str, str, bool]]) -> str | None:
    """Say why ranks with these versions, GPUs, hosts and switches do not go on to connect; None if they do."""
    versions = {version for version, *_ in everyone}
    if len(versions) > 1:
        return f"the ranks have NCCL {', '.join(map(version_text, sorted(versions)))}"
    first: dict[tuple[str, str], int] = {}
    for rank, (version, uuid, host, _) in enumerate(everyone):
        other = first.setdefault((uuid, host), rank)
        if other == rank:
            continue
        if version < _OLDEST_WITH_SHARED_GPUS:
            version_found = version_text(version)
            return f"ranks {other} and {rank} share a GPU, which NCCL takes from 2.30 on; here it is {version_found}"
        if not all(shares for *_, shares in everyone):
            return (
                f"ranks {other} and {rank} share a GPU, where NCCL's kernels wait for each other in turns at best; "
                f"{_SHARED_GPUS}=1 on all ranks lets NCCL try"
            )
    return None


def _connect(nccl: Nccl, messages: Messages, waiter: Waiter, unique_id: bytes) -> NcclRanks:
    """Connect in a thread, and leave it there if the others do not come in time.

    Raises:
        TransportError: NCCL failed, or the others did not come.
    """
    future: Future[NcclRanks] = Future()

    def connect() -> None:
        try:
            ranks = nccl.connect(messages.size, unique_id, messages.rank)
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(ranks)
        else:
            with suppress(TransportError):  # No other rank may be there.
                ranks.abort()  # Left to Python, it would wait for all the others once more.

    threading.Thread(target=connect, name="ringreduce nccl", daemon=True).start()
    # Shorter than the ranks wait for each other over messages, where one that failed at once is by then.
    brief = Waiter(min(_CONNECTING_S, waiter.timeout_s / 2), waiter.crowded)
    try:
        brief.until(future.done, lambda: "all ranks to connect over NCCL")
    except CollectiveTimeoutError as error:
        if not future.cancel() and future.exception() is None:
            future.result().abort()
        raise TransportError(str(error)) from error
    failure = future.exception()
    if failure is not None and not isinstance(failure, TransportError):
        raise TransportError(f"NCCL: {failure}") from failure
    return future.result()


def version_text(code: int) -> str:
    """Return 2.22.3 for 22203; versions before 2.9 have one digit less."""
    if code < 10000:
        return f"{code // 1000}.{code // 100 % 10}.{code % 100}"
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


class NcclAllreduce(OnDevice):
    """Carries out allreduces of one process set by NCCL. See `of`."""

    transport = NCCL
    algorithm = NCCL

    def __init__(self, context: Context, driver: CupyDriver, nccl: Nccl, ranks: NcclRanks) -> None:
        super().__init__(context, driver)
        self._version = nccl.version
        self._ranks: NcclRanks | None = ranks
        self.description = f"NCCL {version_text(nccl.version)}"

    @classmethod
    def of(
        cls, context: Context, driver: CupyDriver, find: Callable[[int], Nccl], switches: Mapping[str, str]
    ) -> NcclAllreduce | str:
        """Return one if all ranks can have one; on all ranks the reason in words otherwise. Collective.

        Args:
            context: the ranks.
            driver: this rank's GPU.
            find: returns NCCL on a GPU by its ordinal, or raises `RingReduceError`, saying why there is none.
            switches: this rank's variables that NCCL reads.
        """
        messages = context.messages
        if context.config.key_file is not None and not context.single_node:
            return "RINGREDUCE_KEY_FILE is set, and NCCL does not encrypt what it sends to ranks without shared memory"
        try:
            nccl = together(messages, lambda: find(driver.device.number))
            shares = switches.get(_SHARED_GPUS) == "1"
            mine = [nccl.version, driver.device.uuid, switches.get(_HOST, ""), shares]
            why_not = _refusal(exchange_json(messages, mine))
            if why_not is not None:
                return why_not
            unique_id = together(messages, lambda: nccl.unique_id().hex() if messages.rank == 0 else "")
            unique_id = exchange_json(messages, unique_id)[0]
            connect = partial(_connect, nccl, messages, context.waiter, bytes.fromhex(unique_id))
            ranks = together(messages, connect, lambda ranks: ranks.abort())  # To close them would take all the others.
        except StepFailedError as error:
            return str(error)
        try:
            return cls(context, driver, nccl=nccl, ranks=ranks)
        except TransportError:
            ranks.abort()  # Python would destroy it, which waits for all ranks.
            raise

    def supports(self, dtype: DType, op: ReduceOp) -> bool:
        return code_of_dtype(dtype, self._version) is not None and code_of_op(op, dtype, self._version) is not None

    def run(self, source: int, target: int, arithmetic: Arithmetic, stream: Stream, signature: Signature) -> bool:
        """Reduce; see `OnDevice.run`.

        Returns:
            True.

        Raises:
            MismatchError, CollectiveTimeoutError, PeerLostError: see `Context.rendezvous`. Between nodes, ranks can
                confuse two calls that all have made before; then NCCL waits, or mixes them up.
            TransportError: NCCL failed, in this call or an earlier one.
        """
        dtype = code_of_dtype(arithmetic.dtype, self._version)
        op = code_of_op(arithmetic.op, arithmetic.dtype, self._version)
        assert dtype is not None and op is not None, "see `supports`"
        try:
            ranks = self._working()
            self._context.rendezvous(signature)
            if arithmetic.count == 0:
                return True
            # NCCL's calls have one order on all ranks, whatever streams they are on.
            self._driver.wait(stream, self._done)
            ranks.allreduce(source, target, arithmetic.count, dtype, op, stream)
            self._driver.record(self._done, stream)
        except MismatchError:
            raise  # Nothing was enqueued, and all ranks know.
        except RingReduceError:
            self.abandon()
            raise
        return True

    def close(self) -> None:
        ranks = self._ranks
        self._ranks = None
        if ranks is not None:
            ranks.close()

    def abandon(self) -> None:
        """End kernels that wait for what will not come: they would keep the GPU busy for good.

        NCCL itself would wait for it wherever Python drops the ranks.
        """
        ranks = self._ranks
        self._ranks = None
        if ranks is not None:
            ranks.abort()

    def _working(self) -> NcclRanks:
        if self._ranks is None:
            raise TransportError("NCCL was given up after an error")
        problem = self._ranks.error()
        if problem is not None:
            raise TransportError(f"NCCL reports {problem}")
        return self._ranks


# ---- CuPy ----


def cupy_nccl(number: int) -> Nccl:
    """Return NCCL as CuPy has it, for a GPU by its ordinal.

    Raises:
        UnsupportedBufferError: CuPy is missing, or was built without NCCL.
    """
    cupy = cupy_for("NCCL")
    try:
        import cupy.cuda.nccl as library
    except ImportError:  # CuPy has the module, but the shared library is missing.
        library = None
    if not getattr(library, "available", False):
        raise UnsupportedBufferError(
            f"CuPy {cupy.__version__} finds no NCCL: pip install nvidia-nccl-cu12, or nvidia-nccl-cu13"
        )
    return Nccl(cupy, library, number)


class Nccl:
    """NCCL on one GPU.

    Attributes:
        version: of the library, 22203 for 2.22.3.
    """

    def __init__(self, cupy: Any, library: Any, number: int) -> None:
        self._cupy = cupy
        self._library = library
        self._number = number
        self.version = int(_ask(library.get_version))

    def unique_id(self) -> bytes:
        """Return what ranks find each other by; one of them asks, and sends it to the others."""
        unique = _ask(self._library.get_unique_id)
        # Bytes since CuPy 14, a tuple of C's chars before, which have a sign on some machines.
        return unique if isinstance(unique, bytes) else bytes(number & 0xFF for number in unique)

    def connect(self, size: int, unique_id: bytes, rank: int) -> NcclRanks:
        """Connect; blocks until all ranks do, without limit."""
        # For good: this is a thread of its own, and to go back to the GPU that it has never chosen would make a context
        # there, which takes memory.
        self._cupy.cuda.Device(self._number).use()
        return NcclRanks(self._cupy, self._number, _ask(lambda: self._communicator(size, unique_id, rank)))

    def _communicator(self, size: int, unique_id: bytes, rank: int) -> Any:
        make = self._library.NcclCommunicator
        if int(self._cupy.__version__.split(".")[0]) >= 14:
            return make(size, unique_id, rank)
        try:
            return make(size, tuple(np.frombuffer(unique_id, np.int8).tolist()), rank)
        except OverflowError:  # Chars are without a sign here; nothing was asked of NCCL yet.
            return make(size, tuple(unique_id), rank)


class NcclRanks:
    """The ranks of a process set, connected by NCCL. All calls are enqueued and return at once.

    Errors become `TransportError`.
    """

    def __init__(self, cupy: Any, number: int, communicator: Any) -> None:
        self._cupy = cupy
        self._number = number
        self._communicator = communicator

    def allreduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: Stream) -> None:
        """Reduce ``count`` elements; ``dtype`` and ``op`` are NCCL's numbers, the target may be the source."""
        with self._cupy.cuda.Device(self._number):
            _ask(self._communicator.allReduce, source, target, count, dtype, op, stream)

    def error(self) -> str | None:
        """Return what went wrong since in what was enqueued, None if nothing did."""
        try:
            self._communicator.check_async_error()
        except _ERRORS as error:
            return f"error {error}"
        return None

    def abort(self) -> None:
        """End what is under way; nothing can be called any more."""
        _ask(self._communicator.abort)

    def close(self) -> None:
        """Give everything back, when all that was enqueued is done."""
        _ask(self._communicator.destroy)


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NCCL, and translate its errors."""
    try:
        return function(*arguments)
    except _ERRORS as error:
        raise TransportError(f"NCCL: {error}") from error
