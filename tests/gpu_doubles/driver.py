"""GPUs that are not there: a driver that does everything in host memory, late and in an order drawn by lot.

What is enqueued waits in the queues of its streams. It is done when somebody waits for it, or at random before; of what
streams and events allow to be next, a seeded generator chooses. So a wait that is missing somewhere shows as a wrong
result under most seeds, which on a GPU it does once a month. Beyond what a GPU checks:

- copies and sums touch only memory that their rank allocated or pinned, and that still exists;
- new memory is full of NaNs (the first megabyte of it);
- no kernel waits for kernels of other processes on a GPU that they share.

Breaches are assertions. Every driver keeps a list of what it was asked for, with names in place of addresses.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import TransportError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.cupy_driver import Arithmetic, CupyDriver, Device, Event, Stream, reduced

Array = npt.NDArray[Any]

_ALIGNMENT = 256
_POISON, _POISONED_NBYTES = 0xFF, 1 << 20  # a NaN in every float type
_EAGERNESS = 0.25  # how often something that could be done is done before anybody waits for it
_PATIENCE_S = 20.0


@dataclass(eq=False, slots=True)
class _Task:
    """Something enqueued: what to do, and what must be done first."""

    work: Callable[[], Iterator[None] | None]
    before: list[_Task]
    driver: HostDriver
    running: Iterator[None] | None = None
    done: bool = False

    def ready(self) -> bool:
        return all(each.done for each in self.before)


@dataclass(eq=False, slots=True)
class _Memory:
    """Device memory of one `allocate`."""

    owner: HostDriver
    name: str
    address: int
    nbytes: int
    array: Array
    freed: bool = False


@dataclass(eq=False, slots=True)
class _Queue:
    """A stream, whose last task this is, or an event, which stands for one."""

    name: str
    last: _Task | None = None


class HostMachine:
    """The GPUs of one node, for drivers of ranks that are threads of this process.

    Args:
        seed: chooses the order in which things are done.
    """

    def __init__(self, seed: int = 0) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.drivers: list[HostDriver] = []
        self._random = random.Random(seed)
        self._pending: list[_Task] = []
        self._bases: list[int] = []
        self._memory: dict[int, _Memory] = {}
        self._error: BaseException | None = None

    def shared(self, uuid: str) -> bool:
        """Return whether several drivers use a GPU."""
        return sum(driver.device.uuid == uuid for driver in self.drivers) > 1

    def add(self, memory: _Memory) -> None:
        insort(self._bases, memory.address)
        self._memory[memory.address] = memory

    def find(self, address: int) -> _Memory | None:
        """Return the device memory that an address lies in, None for host memory."""
        index = bisect_right(self._bases, address) - 1
        memory = self._memory[self._bases[index]] if index >= 0 else None
        return memory if memory is not None and address < memory.address + memory.nbytes else None

    def enqueue(self, task: _Task) -> None:
        self._check()
        self._pending.append(task)
        while self._random.random() < _EAGERNESS:
            self._advance(self._pending)
        self.lock.notify_all()

    def finish(self, tasks: Sequence[_Task]) -> None:
        """Return when all of these are done; what others must enqueue first is waited for."""
        deadline = time.monotonic() + _PATIENCE_S
        while not all(task.done for task in tasks):
            needed = _needed(tasks)
            if not self._advance(needed if self._random.random() > _EAGERNESS else self._pending):
                assert time.monotonic() < deadline, "a kernel waits for what nobody launches"
                self.lock.wait(0.001)
        self._check()

    def pending(self, driver: HostDriver) -> list[_Task]:
        return [task for task in self._pending if task.driver is driver]

    def advance(self) -> None:
        """Do one thing that can be done, if there is one: time goes by on a GPU."""
        self._advance(self._pending)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _advance(self, tasks: Sequence[_Task]) -> bool:
        """Take one of the tasks that are ready a step further; return whether it was anything but waiting."""
        ready = [task for task in tasks if not task.done and task.ready()]
        if not ready:
            return False
        task = self._random.choice(ready)
        try:
            if task.running is None:
                task.running = task.work() or iter(())
            next(task.running)
            return False
        except StopIteration:
            pass
        except BaseException as error:
            self._error = error  # as on a GPU, nothing works after a kernel that failed
        task.done = True
        task.before = []
        self._pending.remove(task)
        self.lock.notify_all()
        return True


def _needed(tasks: Sequence[_Task]) -> list[_Task]:
    """Return the tasks and all that must be done before them, without what is done."""
    found: dict[int, _Task] = {}
    left = list(tasks)
    while left:
        task = left.pop()
        if not task.done and id(task) not in found:
            found[id(task)] = task
            left += task.before
    return list(found.values())


class HostDriver(CupyDriver):
    """A `ringreduce.gpu.cupy_driver.CupyDriver` of one rank over host memory; see the module.

    Args:
        machine: what it shares with the drivers of other ranks; None: a machine of its own.
        gpu: which of the machine's GPUs; several drivers may use one.

    Attributes:
        name: "rank 0" for the first driver of the machine, and so on.
        log: what was asked, one line each; polling (`done`) is left out. Memory, pinned memory, streams and events are
            named m, h, s and e and numbered as they were made. Stream 0 is s0, other host memory ``host``.
    """

    def __init__(self, machine: HostMachine | None = None, gpu: int = 0) -> None:
        self.machine = machine if machine is not None else HostMachine()
        with self.machine.lock:
            self.name = f"rank {len(self.machine.drivers)}"
            self.machine.drivers.append(self)
        self.device = Device(gpu, f"GPU-{gpu}", "GPU in host memory", 90, 1 << 30)
        self.log: list[str] = []
        self._pinned: dict[int, tuple[str, int]] = {}  # address -> (name, nbytes)
        self._streams: dict[Stream, _Queue] = {0: _Queue("s0")}
        self._made: dict[str, int] = {}
        self.faults: set[str] = set()

    def fail(self, method: str) -> None:
        """Let calls of a method (allocate, register, combine, copy, ...) fail from now on."""
        self.faults.add(method)

    def view(self, address: int, nbytes: int) -> Array:
        """Return bytes that this rank's kernels may touch, as they are now."""
        memory = self.machine.find(address)
        if memory is None:
            pinned = any(
                base <= address and address + nbytes <= base + size for base, (_, size) in self._pinned.items()
            )
            assert pinned or nbytes == 0, (
                f"{self.name}: {nbytes} bytes at {address:#x} are neither device nor pinned memory"
            )
            return _host_bytes(address, nbytes)
        assert not memory.freed, f"{self.name}: {self.place(address)} was freed"
        assert memory.owner is self, f"{self.name}: {memory.owner.name}:{memory.name} is another process's"
        offset = address - memory.address
        assert offset + nbytes <= memory.nbytes, (
            f"{self.name}: {nbytes} bytes at {self.place(address)} reach over its end"
        )
        return memory.array[offset : offset + nbytes]

    def put(self, values: Array, stream: Stream | None = None) -> HostArray:
        """Return a new device array with the values.

        Args:
            values: any array; bfloat16 as that of ml_dtypes or as uint16.
            stream: what fills it, as late as it may; None: it is filled at once.
        """
        values = np.array(values)
        with self.machine.lock:
            address = self.allocate(values.nbytes)
            if stream is None:
                self.view(address, values.nbytes)[:] = _bytes_of(values)
            else:
                self.log.append(f"fill {values.nbytes} {self.place(address)} on {self._streams[stream].name}")
                self._enqueue(stream, lambda: np.copyto(self.view(address, values.nbytes), _bytes_of(values)))
        return HostArray(self, address, values.shape, values.dtype)

    def put_late(self, values: Array) -> HostArray:
        """Return a new device array that a stream of its own, which its interface names, fills as late as it may."""
        stream = self.make_stream()
        array = self.put(values, stream)
        array.stream = stream
        return array

    def place(self, address: int) -> str:
        """Return the name that the log has for an address."""
        memory = self.machine.find(address)
        known = {} if memory is None else {memory.address: (memory.name, memory.nbytes)}
        for base, (name, nbytes) in (known or self._pinned).items():
            if base <= address < base + nbytes:
                return f"{name}+{address - base}" if address > base else name
        return "host"

    # ---- memory ----

    def allocate(self, nbytes: int) -> int:
        with self.machine.lock:
            self._may_fail("allocate", MemoryError)
            room = np.empty(max(1, nbytes) + _ALIGNMENT, np.uint8)
            room[:_POISONED_NBYTES] = _POISON
            skip = -room.__array_interface__["data"][0] % _ALIGNMENT
            address = room.__array_interface__["data"][0] + skip
            memory = _Memory(self, self._new("m"), address, max(1, nbytes), room[skip : skip + max(1, nbytes)])
            self.machine.add(memory)
            self.log.append(f"allocate {memory.name} {nbytes}")
            return int(address)

    def free(self, address: int) -> None:
        with self.machine.lock:
            self.log.append(f"free {self.place(address)}")
            self.machine.finish(self.machine.pending(self))
            memory = self.machine.find(address)
            assert memory is not None and memory.address == address, "no allocation begins there"
            assert memory.owner is self and not memory.freed, f"{memory.name} is not (or no longer) this driver's"
            memory.freed = True  # and kept, so that no other is ever at this address

    def register(self, address: int, nbytes: int) -> None:
        with self.machine.lock:
            self._may_fail("register")
            self._pinned[address] = self._new("h"), nbytes
            self.log.append(f"register {self.place(address)} {nbytes}")

    def unregister(self, address: int) -> None:
        with self.machine.lock:
            self.log.append(f"unregister {self.place(address)}")
            del self._pinned[address]  # what is enqueued and touches it fails

    # ---- order ----

    def make_stream(self) -> Stream:
        with self.machine.lock:
            name = self._new("s")
            self._streams[self._made["s"]] = _Queue(name)
            self.log.append(f"make {name}")
            return self._made["s"]

    def free_stream(self, stream: Stream) -> None:
        with self.machine.lock:
            # What is enqueued there is still done.
            self.log.append(f"free {self._streams.pop(stream).name}")

    def make_event(self) -> Event:
        with self.machine.lock:
            self._may_fail("make_event")
            made = _Queue(self._new("e"))
            self.log.append(f"make {made.name}")
            return made

    def record(self, event: Event, stream: Stream) -> None:
        with self.machine.lock:
            self.log.append(f"record {event.name} on {self._streams[stream].name}")
            event.last = self._streams[stream].last

    def wait(self, stream: Stream, event: Event) -> None:
        with self.machine.lock:
            self.log.append(f"{self._streams[stream].name} waits for {event.name}")
            if event.last is not None and not event.last.done:
                self._enqueue(stream, lambda: None, [event.last])

    def done(self, event: Event) -> bool:
        with self.machine.lock:
            self.machine.advance()
            return event.last is None or event.last.done

    def synchronize(self, event: Event) -> None:
        with self.machine.lock:
            self._may_fail("synchronize")
            self.log.append(f"synchronize {event.name}")
            if event.last is not None:
                self.machine.finish([event.last])

    def synchronize_device(self) -> None:
        with self.machine.lock:
            self.log.append("synchronize the device")
            self.machine.finish(self.machine.pending(self))

    # ---- work ----

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        with self.machine.lock:
            self._may_fail("copy")
            name = self._streams[stream].name
            self.log.append(f"copy {nbytes} {self.place(source)} -> {self.place(target)} on {name}")
            if nbytes == 0:
                return
            into, out = (self._reach(address, nbytes) for address in (target, source))
            if self.place(source) == "host":  # the bytes have left it when the call returns, and may still be under way
                content = out().copy()
                task = self._enqueue(stream, lambda: np.copyto(into(), content))
            else:
                task = self._enqueue(stream, lambda: np.copyto(into(), out()))
            if self.place(target) == "host":
                self.machine.finish([task])

    def combine(self, arithmetic: Arithmetic, sources: Sequence[int], target: int, size: int, stream: Stream) -> None:
        self._may_fail("combine")
        dtype, op = arithmetic.dtype, arithmetic.op
        assert op is not ReduceOp.AVERAGE or dtype.kind in ("float", "complex"), "integers are not averaged"

        def work() -> None:
            terms = [self.view(address, arithmetic.nbytes).copy().view(dtype.storage) for address in sources]
            with np.errstate(all="ignore"):
                self.view(target, arithmetic.nbytes)[:] = reduced(np, terms, arithmetic, size).view(np.uint8)

        self.launch(f"combine {dtype.name} {op.value} {arithmetic.count}", work, stream)

    def launch(self, name: str, code: Callable[[], Iterator[None] | None], stream: Stream) -> None:
        """Enqueue a kernel; one that waits for other kernels yields wherever it would spin."""
        with self.machine.lock:
            self._may_fail("launch")
            self.log.append(f"launch {name} on {self._streams[stream].name}")

            def work() -> Iterator[None] | None:
                waiting = code()
                assert waiting is None or not self.machine.shared(self.device.uuid), f"{name} spins on a shared GPU"
                return waiting

            self._enqueue(stream, work)

    # ---- own ----

    def _enqueue(self, stream: Stream, work: Callable[[], Iterator[None] | None], after: Sequence[_Task] = ()) -> _Task:
        queue = self._streams[stream]
        task = _Task(work, [*([queue.last] if queue.last is not None else []), *after], self)
        queue.last = task
        self.machine.enqueue(task)
        return task

    def _reach(self, address: int, nbytes: int) -> Callable[[], Array]:
        """Return what gives the bytes when they are touched; that they exist and may be is checked now, too."""
        if self.place(address) == "host":
            return lambda: _host_bytes(address, nbytes)
        self.view(address, nbytes)
        return lambda: self.view(address, nbytes)

    def _new(self, kind: str) -> str:
        self._made[kind] = self._made.get(kind, 0) + 1
        return f"{kind}{self._made[kind]}"

    def _may_fail(self, method: str, error: type[Exception] = TransportError) -> None:
        if method in self.faults:
            raise error(f"{self.name} was told to fail to {method}")


class HostArray:
    """A C-contiguous array in the memory of a `HostDriver`, as CuPy's arrays are in that of a GPU.

    Attributes:
        driver: whose memory it is.
        address: where it begins.
        shape, dtype: as NumPy's.
        stream: what its interface names as the stream that its content waits for; None: none.
    """

    __hash__: ClassVar[Callable[[object], int]] = object.__hash__

    def __init__(self, driver: HostDriver, address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.driver = driver
        self.address = address
        self.shape = shape
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.stream: Stream | None = None

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # Stream 0 may not be named in the interface: 1 stands for it.
        stream = None if self.stream is None else self.stream or 1
        data = (self.address if self.size else 0, False)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "version": 3, "stream": stream}

    def get(self, stream: Stream | None = None) -> Array:
        """Return the content as a NumPy array: when the stream is done, or (None) as it is now."""
        driver = self.driver
        with driver.machine.lock:
            if stream is not None:
                last = driver._streams[stream].last
                driver.machine.finish([last] if last is not None else [])
            content: Array = driver.view(self.address, self.nbytes).copy().view(self.dtype).reshape(self.shape)
            return content


def _host_bytes(address: int, nbytes: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _bytes_of(values: Array) -> Array:
    return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
