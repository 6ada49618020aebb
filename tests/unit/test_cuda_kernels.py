"""CUDA kernels without a GPU: results of the same sources compiled as C++, and that CUDA's compiler takes them."""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ringreduce.buffers import DTYPES, DType, kernels_for, narrow
from ringreduce.buffers.device_driver import Device
from ringreduce.buffers.kernels import NumpyHalfKernels
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu import kernels
from ringreduce.gpu.kernels import FAMILIES, Arithmetic, Peers, Table

HOST = Path(__file__).parents[1] / "host_cuda"
STREAM = 0
#: What lies around arrays, and in results before they are written.
POISON = 0xA5
COUNTS = (0, 1, 3, 17, 1003)
#: NumPy rounds these at its own discretion: it fuses products with sums, and multiplies by the inverse.
LOOSE = [(name, op) for name in ("complex64", "complex128") for op in (ReduceOp.PRODUCT, ReduceOp.AVERAGE)]
REDUCTIONS = [
    (row.name, op)
    for row in DTYPES.values()
    for op in ReduceOp
    if op is not ReduceOp.AVERAGE or row.kind in ("float", "complex")
]
#: Types of every kind of arithmetic and most widths, where what differs between types is proved elsewhere.
FEW = ("float32", "bfloat16", "complex64", "int8", "bool", "float64")

CXX = shutil.which("g++")
NVCC = shutil.which("nvcc")
needs_cxx = pytest.mark.skipif(CXX is None, reason="there is no g++ to compile kernels for the CPU with")


def instances(family: str) -> list[str]:
    """Return the instances that are compiled for tests: all that are not the same code around other types."""
    return [name for name in FAMILIES[family] if family != "shots" or name.split("<")[1].split(",")[0] in FEW]


class Host:
    """A driver for kernels' launchers that runs them on the CPU; memory begins poisoned."""

    device = Device(number=0, uuid="host", name="host", capability=0, multiprocessors=2, nbytes=0)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}
        self._memory: dict[int, np.ndarray] = {}
        self.launched: list[tuple[str, int, int]] = []

    def allocate(self, nbytes: int) -> int:
        memory = np.full(nbytes + 256, POISON, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        del self._memory[address]

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def kernel(self, family: str, name: str) -> HostKernel:
        if family not in self._libraries:
            self._libraries[family] = ctypes.CDLL(str(build(family, self._folder)))
        return HostKernel(self, self._libraries[family], family, name)


class HostKernel:
    """A kernel that has run when it is launched."""

    def __init__(self, host: Host, library: ctypes.CDLL, family: str, name: str) -> None:
        self._host, self._library, self._family, self._name = host, library, family, name

    def launch(self, grid: int, block: int, arguments: Sequence[object], stream: int) -> None:
        values = [np.uint64(each) if isinstance(each, int) else each for each in arguments]
        sizes = (ctypes.c_int * len(values))(*(value.nbytes for value in values))
        rows = [np.array([value]) for value in values]
        pointers = (ctypes.c_void_p * len(values))(*(row.ctypes.data for row in rows))
        together = self._family == "shots"
        rc = self._library.launch(self._name.encode(), grid, block, len(values), sizes, pointers, together)
        assert rc == 0, (self._name, list(sizes), "no such instance" if rc == 1 else "other arguments")
        self._host.launched.append((self._name, grid, block))


def build(family: str, folder: Path) -> Path:
    """Compile a family for the CPU, with its instances in a table by name."""
    rows = "".join(
        f'{{"{name}", host::instance_of({kernels.expression(family, name)})}},\n' for name in instances(family)
    )
    table = (
        "static const std::map<std::string, host::Instance>& instances() {\n"
        f"static const std::map<std::string, host::Instance> all = {{\n{rows}}};\nreturn all;\n}}\n"
    )
    source, library = folder / f"{family}.cpp", folder / f"{family}.so"
    source.write_text('#include "host.h"\n' + kernels.source(family) + table, encoding="utf-8")
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    # The CPU would forgive these; a GPU takes no access that is not aligned. They end in an illegal instruction.
    traps = ["-fsanitize=alignment,shift,signed-integer-overflow", "-fsanitize-undefined-trap-on-error"]
    command = [CXX, *flags, *traps, "-shared", "-fPIC", "-pthread", f"-I{HOST}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """The host's driver; what has been compiled serves all tests."""
    return Host(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def host(compiled: Host) -> Iterator[Host]:
    """The host's driver; overflows and NaN are values here."""
    compiled.launched.clear()
    with np.errstate(all="ignore"):
        yield compiled


class Placed:
    """An array that begins ``offset`` bytes behind a multiple of 256, between guards.

    Attributes:
        array: the elements, in their storage type.
    """

    def __init__(self, values: np.ndarray, offset: int = 0) -> None:
        self._memory = np.full(values.nbytes + offset + 768, POISON, np.uint8)
        self._begin = -(-self._memory.ctypes.data // 256) * 256 + 256 + offset - self._memory.ctypes.data
        self.array = self._memory[self._begin : self._begin + values.nbytes].view(values.dtype)
        self.array[:] = values

    @classmethod
    def empty(cls, count: int, dtype: object, offset: int = 0) -> Placed:
        """Return memory full of poison."""
        storage = np.dtype(dtype)
        return cls(np.full(count * storage.itemsize, POISON, np.uint8).view(storage), offset)

    @property
    def address(self) -> int:
        return self._memory.ctypes.data + self._begin

    def check(self) -> None:
        """Hold that nothing was written outside."""
        assert (self._memory[: self._begin] == POISON).all()
        assert (self._memory[self._begin + self.array.nbytes :] == POISON).all()


def numbers(row: DType, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return elements of all sizes, in the storage type; among floats infinities, NaN, signed zeros, subnormals."""
    if row.kind == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if row.kind in ("int", "uint"):
        return np.frombuffer(rng.bytes(count * row.itemsize), row.storage)
    if row.kind == "complex":
        part = DTYPES[f"float{row.itemsize * 4}"]
        return numbers(part, 2 * count, rng).view(row.storage)
    largest = {"float16": 4.0, "bfloat16": 30.0}.get(row.name, 30.0)
    values = rng.standard_normal(count) * 10 ** rng.uniform(-largest, largest / 2, count)
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, -6e-8, 65519.0, 65520.0, 1.0])
    chosen = rng.random(count) < 0.2
    values[chosen] = rng.choice(special, chosen.sum())
    target = np.empty(count, row.storage)
    narrow(values.astype(np.float32 if row.half else row.storage), row, target)
    return target


def values_of(array: np.ndarray, row: DType) -> np.ndarray:
    """Return elements in the storage type as numbers that NumPy compares."""
    return array.view(ml_dtypes.bfloat16).astype(np.float32) if row.name == "bfloat16" else array


def assert_same(row: DType, op: ReduceOp, ours: np.ndarray, theirs: np.ndarray) -> None:
    """Hold that bits are the same, but for NaN's; of two zeros, either is the least."""
    left, right = values_of(ours, row), values_of(theirs, row)
    np.testing.assert_array_equal(left, right)
    if op not in (ReduceOp.MIN, ReduceOp.MAX) and row.kind == "float":
        number = ~np.isnan(left)
        np.testing.assert_array_equal(np.signbit(left[number]), np.signbit(right[number]))


def cpu_reduction(row: DType, op: ReduceOp, sources: Sequence[np.ndarray]) -> np.ndarray:
    """Return what our kernels for the CPU make of the sources."""
    made = NumpyHalfKernels(row, op, len(sources)) if row.half else kernels_for(row, op, len(sources))
    target = np.empty_like(sources[0])
    made.combine(sources)(target)
    return target


def combine(
    host: Host, row: DType, op: ReduceOp, sources: Sequence[Placed], targets: Sequence[Placed], size: int
) -> None:
    """Reduce on the host's device."""
    tables = [Table(host, [each.address for each in arrays], STREAM) for arrays in (sources, targets)]
    kernels.combine(host, Arithmetic(row, op, sources[0].array.size), *tables, size, STREAM)
    for table in tables:
        table.close()


# ---- reduce ----


@needs_cxx
@pytest.mark.parametrize(("name", "op"), [each for each in REDUCTIONS if each not in LOOSE], ids=str)
def test_combining_equals_our_cpu_kernels(name: str, op: ReduceOp, host: Host, rng: np.random.Generator) -> None:
    """Any dtype, op, count, alignment and number of sources gives what the CPU's kernels give, in all targets."""
    row = DTYPES[name]
    step = row.itemsize // 2 if row.kind == "complex" else row.itemsize
    layouts = [(0, 0), (step, step), (3 * step, 3 * step), (0, step), (step, 0)]
    for nsources, (count, (here, there)) in zip(
        itertools.cycle((2, 3, 1, 5, 4, 8, 6, 17)), itertools.product(COUNTS, layouts), strict=False
    ):
        arrays = [numbers(row, count, rng) for _ in range(nsources)]
        sources = [Placed(array, here) for array in arrays]
        targets = [Placed.empty(count, row.storage, there) for _ in range(2)]
        combine(host, row, op, sources, targets, nsources)
        wanted = cpu_reduction(row, op, arrays)
        for target in targets:
            assert_same(row, op, target.array, wanted)
            target.check()
        for source, array in zip(sources, arrays, strict=True):
            assert source.array.tobytes() == array.tobytes(), "a source was written to"
            source.check()


@needs_cxx
@pytest.mark.parametrize(("name", "op"), LOOSE, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_complex_products_and_averages(
    name: str, op: ReduceOp, size: int, host: Host, rng: np.random.Generator
) -> None:
    """They agree with a reference in twice the precision, to a rounding or two for each source."""
    row = DTYPES[name]
    arrays = [rng.standard_normal(2 * 1003).astype(f"f{row.itemsize // 2}").view(row.storage) for _ in range(size)]
    target = Placed.empty(1003, row.storage)
    combine(host, row, op, [Placed(array) for array in arrays], [target], size)
    wide = np.stack(arrays).astype(np.clongdouble)
    wanted, bound = (
        (wide.prod(axis=0), abs(wide).prod(axis=0))
        if op is ReduceOp.PRODUCT
        else (wide.sum(axis=0) / size, abs(wide).sum(axis=0) / size)
    )
    assert (abs(target.array - wanted) <= 2 * size * np.finfo(row.storage).eps * bound).all()


@needs_cxx
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_target_may_be_a_source(name: str, place: int, host: Host, rng: np.random.Generator) -> None:
    """In place of any of the sources, or of all of them, the result is that of new memory."""
    row = DTYPES[name]
    arrays = [numbers(row, 1003, rng) for _ in range(3)]
    sources = [Placed(array) for array in arrays]
    targets = sources if place == 3 else [sources[place]]
    combine(host, row, ReduceOp.SUM, sources, targets, 3)
    for target in targets:
        assert_same(row, ReduceOp.SUM, target.array, cpu_reduction(row, ReduceOp.SUM, arrays))


@needs_cxx
@pytest.mark.parametrize(("name", "op"), [("float32", ReduceOp.SUM), ("bfloat16", ReduceOp.AVERAGE)], ids=str)
def test_more_elements_than_threads(name: str, op: ReduceOp, host: Host, rng: np.random.Generator) -> None:
    """An array that the device cannot do at once is done in turns by as many blocks as it is given."""
    row = DTYPES[name]
    arrays = [numbers(row, 1000003, rng) for _ in range(3)]
    sources = [Placed(array, 2 * row.itemsize) for array in arrays]
    combine(host, row, op, sources, sources[:1], 3)
    assert_same(row, op, sources[0].array, cpu_reduction(row, op, arrays))
    sources[0].check()
    assert host.launched == [(f"combine<{name},{op.value}>", 8, 512)]


@needs_cxx
def test_an_average_is_divided_by_the_size_it_is_given(host: Host) -> None:
    """Where sources are sums of several ranks already, the size is not their number: (3 + 6) / 6 and 9 / 6."""
    row = DTYPES["float32"]
    for values in ([3.0, 6.0], [9.0]):
        sources = [Placed(np.full(5, value, np.float32)) for value in values]
        combine(host, row, ReduceOp.AVERAGE, sources, sources[:1], 6)
        assert sources[0].array.tolist() == [1.5] * 5


@needs_cxx
def test_nothing_to_do_launches_nothing(host: Host) -> None:
    """Empty arrays need no kernel, whatever their addresses are."""
    empty = Placed.empty(0, np.float32)
    combine(host, DTYPES["float32"], ReduceOp.SUM, [empty], [empty], 1)
    assert host.launched == []


@needs_cxx
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_halves_widen_and_narrow_as_numpy_has_it(name: str, host: Host) -> None:
    """All 2**16 halves, multiplied in float32 and rounded to nearest even once: normal, subnormal, ties, overflows."""
    row = DTYPES[name]
    native = ml_dtypes.bfloat16 if name == "bfloat16" else np.float16
    halves = np.arange(1 << 16, dtype=np.uint16).view(native)
    for factor in (1.0, -1.0, 1.5, 1.25, 0.75, 1 + 2.0**-7, 3.0, 0.5, 0.375, 2.0**-11, 2.0**13, 1 / 3):
        factors = np.full_like(halves, native(factor))
        target = Placed.empty(halves.size, row.storage)
        sources = [Placed(each.view(row.storage)) for each in (halves, factors)]
        combine(host, row, ReduceOp.PRODUCT, sources, [target], 2)
        ours, wide = target.array.view(native), halves.astype(np.float32) * factors.astype(np.float32)
        np.testing.assert_array_equal(ours.astype(np.float32), wide.astype(native).astype(np.float32))
        np.testing.assert_array_equal(np.signbit(ours.astype(np.float32)), np.signbit(wide))
        target.check()


# ---- shots ----


class Ranks:
    """Ranks with a device each, which reach each other's memory; `each` runs them in threads."""

    def __init__(self, host: Host, size: int, timeout_s: float = 30.0) -> None:
        self._host = host
        self.size = size
        flags = [Placed(np.zeros(kernels.FLAGS_NBYTES, np.uint8)) for _ in range(size)]
        scratch = [Placed.empty(kernels.SCRATCH_NBYTES, np.uint8) for _ in range(size)]
        self.errors = [Placed(np.zeros(1, np.uint32)) for _ in range(size)]
        self.areas = flags, scratch
        tables = [self.table(area) for area in self.areas]
        self.peers = [Peers(rank, *tables, self.errors[rank].address, timeout_s) for rank in range(size)]

    def table(self, arrays: Sequence[Placed]) -> Table:
        return Table(self._host, [array.address for array in arrays], STREAM)

    def each(self, work: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(self.size) as pool:
            for done in [pool.submit(work, rank) for rank in range(self.size)]:
                done.result()
        for each in (*self.areas[0], *self.areas[1], *self.errors):
            each.check()
        assert [error.array[0] for error in self.errors] == [0] * self.size


@needs_cxx
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "int8"])
def test_a_two_shot_leaves_the_result_everywhere(name: str, size: int, host: Host, rng: np.random.Generator) -> None:
    """Call after call, with nothing between that would hold ranks together, every rank finds the reduction in place."""
    row = DTYPES[name]
    counts = (1, 17, 20011, 3, 1003)
    inputs = [[numbers(row, count, rng) for _ in range(size)] for count in counts]
    ranks = Ranks(host, size)
    arrays = [[Placed.empty(count, row.storage, row.itemsize) for _ in range(size)] for count in counts]
    tables = [ranks.table(each) for each in arrays]

    def work(rank: int) -> None:
        for call, count in enumerate(counts):
            arrays[call][rank].array[:] = inputs[call][rank]
            op = ReduceOp.MAX if call % 2 else ReduceOp.SUM
            table = tables[call]
            kernels.two_shot(host, Arithmetic(row, op, count), ranks.peers[rank], table, table, STREAM)
            found = arrays[call][rank].array.copy()
            arrays[call][rank].array.view(np.uint8)[:] = 0  # it is this rank's again
            with np.errstate(all="ignore"):
                assert_same(row, op, found, cpu_reduction(row, op, inputs[call]))

    ranks.each(work)
    for array in itertools.chain(*arrays):
        array.check()


@needs_cxx
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "int8"])
def test_one_shots_follow_each_other(name: str, size: int, host: Host, rng: np.random.Generator) -> None:
    """Arrays of any memory, in place or not and of changing sizes, are reduced although ranks meet only once a call."""
    row = DTYPES[name]
    counts = [1, 30000 // row.itemsize + 1, 17, 3, 40000 // row.itemsize, 5, 1003]
    inputs = [[numbers(row, count, rng) for _ in range(size)] for count in counts]
    ranks = Ranks(host, size)

    def work(rank: int) -> None:
        for call, count in enumerate(counts):
            source = Placed(inputs[call][rank], row.itemsize * (call % 2))
            target = source if call % 3 else Placed.empty(count, row.storage, row.itemsize)
            peers = ranks.peers[rank]
            kernels.one_shot(host, Arithmetic(row, ReduceOp.SUM, count), peers, source.address, target.address, STREAM)
            with np.errstate(all="ignore"):
                assert_same(row, ReduceOp.SUM, target.array, cpu_reduction(row, ReduceOp.SUM, inputs[call]))
            target.check()

    ranks.each(work)


@needs_cxx
def test_the_largest_one_shot_and_two_shots_share_flags(host: Host, rng: np.random.Generator) -> None:
    """Both kinds of kernel may follow each other with grids from one block to the most there are."""
    row, size = DTYPES["float32"], 2
    count = kernels.ONE_SHOT_NBYTES // 4
    inputs = [rng.standard_normal(count).astype(np.float32) for _ in range(size)]
    ranks = Ranks(host, size)
    arrays = [Placed(array) for array in inputs]
    table = ranks.table(arrays)

    def work(rank: int) -> None:
        mine, peers = arrays[rank], ranks.peers[rank]
        for some in (count, 100):
            result = Placed.empty(some, np.float32)
            kernels.one_shot(host, Arithmetic(row, ReduceOp.AVERAGE, some), peers, mine.address, result.address, STREAM)
            np.testing.assert_array_equal(result.array, (inputs[0][:some] + inputs[1][:some]) / 2)
        kernels.two_shot(host, Arithmetic(row, ReduceOp.AVERAGE, count), peers, table, table, STREAM)
        np.testing.assert_array_equal(mine.array, (inputs[0] + inputs[1]) / 2)

    ranks.each(work)
    assert sorted(grid for _, grid, _ in host.launched) == [1, 1, 36, 36, 64, 64]


@needs_cxx
@pytest.mark.parametrize("wrapped", [0, 2**32 - 3])
def test_counters_may_wrap_around(wrapped: int, host: Host) -> None:
    """After 2**32 barriers numbers begin again at 0, and ranks go on meeting."""
    row, size = DTYPES["float32"], 2
    ranks = Ranks(host, size)
    for area in ranks.areas[0]:
        area.array.view(np.uint32)[:] = wrapped
    arrays = [Placed(np.zeros(5, np.float32)) for _ in range(size)]
    table = ranks.table(arrays)

    def work(rank: int) -> None:
        for _ in range(4):
            arrays[rank].array[:] = rank + 1
            kernels.two_shot(host, Arithmetic(row, ReduceOp.SUM, 5), ranks.peers[rank], table, table, STREAM)
            assert arrays[rank].array.tolist() == [3.0] * 5

    ranks.each(work)


@needs_cxx
@pytest.mark.parametrize("shot", ["one", "two"])
def test_a_peer_that_does_not_come_is_named(shot: str, host: Host) -> None:
    """A kernel ends after its time limit and leaves 1 + the peer's number; the next one does nothing at all."""
    ranks = Ranks(host, 3, timeout_s=1e-3)
    row, peers = DTYPES["float32"], ranks.peers[1]
    arrays = [Placed(np.full(5, rank, np.float32)) for rank in range(3)]
    table, target = ranks.table(arrays), Placed.empty(5, np.float32)
    for area in ranks.areas[0][1:]:  # rank 2 has come
        area.array.view(np.uint32)[kernels.MAX_BLOCKS + 2] = 1

    def launch() -> None:
        if shot == "two":
            kernels.two_shot(host, Arithmetic(row, ReduceOp.SUM, 5), peers, table, table, STREAM)
        else:
            address = arrays[1].address
            kernels.one_shot(host, Arithmetic(row, ReduceOp.SUM, 5), peers, address, target.address, STREAM)

    launch()
    assert [error.array[0] for error in ranks.errors] == [0, 1, 0]
    before = [area.array.tobytes() for area in itertools.chain(*ranks.areas)]
    launch()
    assert [area.array.tobytes() for area in itertools.chain(*ranks.areas)] == before
    assert [array.array.tolist() for array in arrays] == [[rank] * 5 for rank in range(3)]
    assert (target.array.view(np.uint8) == POISON).all()


# ---- compilers ----


def architectures() -> list[str]:
    """Return the oldest one that is supported here and by the compiler, and that of H100 and H200 if it knows that."""
    if NVCC is None:
        return ["compute_70", "compute_90"]
    listed = subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    oldest = min((arch for arch in listed if int(arch.removeprefix("compute_")) >= 70), key=lambda arch: int(arch[8:]))
    return sorted({oldest, "compute_90"} & set(listed))


def instances_to_compile(family: str) -> list[str]:
    """Return one name of each kind, as there are many."""
    few = ("float32,sum", "float32,average", "bfloat16,max", "complex64,product", "bool,min", "int8,product")
    return [name for name in FAMILIES[family] if name.endswith(tuple(f"{each}>" for each in few))]


def compile_with_nvcc(family: str, names: list[str], folder: Path, *options: str) -> str:
    """Compile these instances; return what the compiler says of them."""
    table = "".join(f"(void*)&{kernels.expression(family, name)},\n" for name in names)
    source = folder / f"{family}.cu"
    source.write_text(f"{kernels.source(family)}\nvoid* instances[] = {{\n{table}}};\n", encoding="utf-8")
    done = subprocess.run([str(NVCC), *kernels.OPTIONS, str(source), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.parametrize("arch", architectures())
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_compiles(family: str, arch: str, tmp_path: Path) -> None:
    """CUDA's compiler takes every family, and makes a kernel of each kind of instance."""
    names, target = instances_to_compile(family), tmp_path / "kernels.ptx"
    compile_with_nvcc(family, names, tmp_path, "-ptx", f"-arch={arch}", "-Werror=all-warnings", "-o", str(target))
    assert target.read_text(encoding="utf-8").count(".entry ") == len(names)


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
@pytest.mark.parametrize("family", ["reduce", "shots"])
def test_nothing_is_spilled(family: str, tmp_path: Path) -> None:
    """What an element takes on its way stays in registers, for the widest instances too."""
    kinds = ("float32,sum", "float16,average", "complex128,max", "complex64,product", "int8,product")
    names = [name for name in FAMILIES[family] if name.endswith(tuple(f"{each}>" for each in kinds))]
    said = compile_with_nvcc(family, names, tmp_path, "-cubin", "-arch=sm_90", "-Xptxas", "-v", "-o", "/dev/null")
    spilled = re.findall(r"(\d+) bytes spill stores", said)
    assert spilled == ["0"] * len(names)


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    """The compiler that compiles kernels at run time; of CUDA 12, which still knows the oldest GPUs."""
    package = pytest.importorskip("nvidia.cuda_nvrtc", reason="the package nvidia-cuda-nvrtc-cu12 is not installed")
    (library,) = Path(package.__path__[0]).glob("lib/libnvrtc.so.12")
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("arch", ["compute_70", "compute_90"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile_at_run_time(family: str, arch: str, nvrtc: ctypes.CDLL) -> None:
    """For V100 and H100, with the options that are used: a kernel of each kind, none of which flushes subnormals."""
    expressions = [kernels.expression(family, name) for name in instances_to_compile(family)]
    options = [option.encode() for option in (*kernels.OPTIONS, f"--gpu-architecture={arch}")]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = kernels.source(family).encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, f"{family}.cu".encode(), 0, None, None) == 0
    for expression in expressions:
        assert nvrtc.nvrtcAddNameExpression(program, expression.encode()) == 0
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert ptx.value.count(b".entry ") == len(expressions)
    assert b".ftz" not in ptx.value


def test_sources_stand_alone() -> None:
    """What a compiler gets includes no file, so that it works without the toolkit's headers."""
    for family in FAMILIES:
        assert "\n#include" not in kernels.source(family)
        assert len({kernels.expression(family, name) for name in FAMILIES[family]}) == len(FAMILIES[family])


def test_a_table_keeps_what_it_is_copied_from() -> None:
    """The copy may read the rows after the call that began it."""
    copied: list[int] = []
    driver: Any = SimpleNamespace(
        allocate=lambda nbytes: 4096,
        copy=lambda target, source, nbytes, stream: copied.append(source),
        free=lambda at: None,
    )
    table = kernels.Table(driver, [7, 8, 9], 0)
    gc.collect()
    assert np.ctypeslib.as_array((ctypes.c_uint64 * 3).from_address(copied[0])).tolist() == [7, 8, 9]
    table.close()
