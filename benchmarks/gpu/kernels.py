"""Every family of kernels against NumPy, on whatever a driver drives."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gpu.report import Check

from ringreduce.buffers import DTYPES, DType, narrow, widen
from ringreduce.buffers.device_driver import Driver
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu import kernels
from ringreduce.gpu.kernels import FAMILIES, Arithmetic, Peers, Table

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from gpu_doubles.driver import check_driver
from gpu_doubles.kernels import reduced

Array = npt.NDArray[Any]

COUNT = 10_007
STREAM = 0
#: Errors after which the rest of a family is not tried.
ENOUGH = 5
_HOLE = 16  # bytes around arrays, which begin at odd places


class Desk:
    """Device memory of one check, filled and read at once; all of it goes back at the end of a ``with``.

    Args:
        driver: of the GPU.
        count: elements of the arrays that are checked.
    """

    def __init__(self, driver: Driver, count: int) -> None:
        self.driver = driver
        self.count = count
        self._addresses: list[int] = []
        self._tables: list[Table] = []
        self._event = driver.make_event()

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for table in self._tables:
            table.close()
        for address in self._addresses:
            self.driver.free(address)
        self.driver.free_event(self._event)

    def put(self, values: Array, shift: int = 0) -> int:
        """Return the address of a copy, ``shift`` bytes beyond an aligned one."""
        values = np.ascontiguousarray(values)
        base = self.driver.allocate(values.nbytes + shift + _HOLE)
        self._addresses.append(base)
        self.driver.copy(base + shift, values.ctypes.data, values.nbytes, STREAM)
        self.wait()
        return base + shift

    def poisoned(self, nbytes: int, shift: int = 0) -> int:
        """Return the address of memory that is full of 0xFF: NaNs."""
        return self.put(np.full(nbytes, 0xFF, np.uint8), shift)

    def get(self, address: int, count: int, dtype: npt.DTypeLike) -> Array:
        """Return what is there when all is done."""
        values = np.zeros(count, dtype)
        self.wait()
        self.driver.copy(values.ctypes.data, address, values.nbytes, STREAM)
        self.wait()
        return values

    def table(self, addresses: list[int]) -> Table:
        """Return a table of addresses."""
        self._tables.append(Table(self.driver, addresses, STREAM))
        self.wait()
        return self._tables[-1]

    def wait(self) -> None:
        """Return when the stream is done."""
        self.driver.record(self._event, STREAM)
        self.driver.synchronize(self._event)


def check_contract(driver: Driver) -> Check:
    """Look at what any driver must do."""
    try:
        check_driver(driver)
    except Exception as error:  # and the kernels are looked at all the same
        return Check("the driver over CuPy does what any driver must", False, f"{type(error).__name__}: {error}")
    return Check("the driver over CuPy does what any driver must", True, driver.device.name)


def check_kernels(driver: Driver, seed: int, count: int = COUNT) -> Iterator[Check]:
    """Yield one check for each family; each names the instances that are wrong."""
    families: dict[str, Callable[[Desk, str, np.random.Generator], bool]] = {
        "reduce": combine_is_right,
        "shots": shot_is_right,
    }
    for number, (family, right) in enumerate(families.items()):
        names = [name for name in FAMILIES[family] if family != "shots" or is_tried_alone(name)]
        wrong, errors = [], 0
        for name in names:
            try:
                with Desk(driver, count) as desk:
                    if not right(desk, name, np.random.default_rng((seed, number))):
                        wrong.append(name)
            except Exception as error:  # whatever it is, the other instances may show what it means
                wrong.append(f"{name} ({type(error).__name__}: {error})")
                errors += 1
                if errors == ENOUGH:
                    wrong.append("the rest was not tried")
                    break
        detail = f"{len(names)} instances on {count} elements" if not wrong else f"wrong: {', '.join(wrong)}"
        yield Check(f"kernels of the family {family} equal NumPy", not wrong, detail)


def is_tried_alone(name: str) -> bool:
    """Return whether an instance of the kernels that meet is worth compiling where each meets only itself."""
    return name.endswith(",sum>") or "<float32," in name


def combine_is_right(desk: Desk, name: str, rng: np.random.Generator) -> bool:
    """Reduce three arrays at odd addresses into another one and into the second of them."""
    row, op = _row_and_op(name)
    arrays = [numbers(row, desk.count, rng) for _ in range(3)]
    shift = row.itemsize
    sources = [desk.put(array, shift * place) for place, array in enumerate(arrays)]
    targets = [desk.poisoned(arrays[0].nbytes, shift), sources[1]]
    kernels.combine(desk.driver, Arithmetic(row, op, desk.count), desk.table(sources), desk.table(targets), 3, STREAM)
    with np.errstate(all="ignore"):
        wanted = reduced(arrays, row, op, 3)
    return all(same(desk.get(target, desk.count, row.storage), wanted, row, op) for target in targets)


def shot_is_right(desk: Desk, name: str, rng: np.random.Generator) -> bool:
    """Run a kernel that meets its peers with no peer but itself, three times: flags go on from where they were."""
    row, op = _row_and_op(name)
    flags = desk.put(np.zeros(kernels.FLAGS_NBYTES, np.uint8))
    scratch, error = desk.poisoned(kernels.SCRATCH_NBYTES), desk.put(np.zeros(1, np.uint32))
    peers = Peers(0, desk.table([flags]), desk.table([scratch]), error, 5.0)
    good, reduction = True, Arithmetic(row, op, desk.count)
    for _ in range(3):
        values = numbers(row, desk.count, rng)
        source, target = desk.put(values), desk.poisoned(values.nbytes)
        if name.startswith("one_shot"):
            kernels.one_shot(desk.driver, reduction, peers, source, target, STREAM)
        else:
            tables = desk.table([source]), desk.table([target])
            kernels.two_shot(desk.driver, reduction, peers, *tables, STREAM)
        with np.errstate(all="ignore"):
            wanted = reduced([values], row, op, 1)
        good &= same(desk.get(target, desk.count, row.storage), wanted, row, op)
    return bool(good and desk.get(error, 1, np.uint32)[0] == 0)


def numbers(row: DType, count: int, rng: np.random.Generator) -> Array:
    """Return random elements in ``row.storage``; of real floats, some are NaN or infinite."""
    if row.kind == "bool":
        return rng.integers(0, 2, count).astype(row.storage)
    if row.kind in ("int", "uint"):
        info = np.iinfo(row.storage)
        return rng.integers(info.min, info.max, count, dtype=row.storage, endpoint=True)
    wide = rng.standard_normal(count)
    if row.kind == "complex":
        return (wide + 1j * rng.standard_normal(count)).astype(row.storage)
    wide[rng.integers(0, count, 1 + count // 100)] = np.nan
    wide[rng.integers(0, count, 1 + count // 100)] = -np.inf
    made = np.empty(count, row.storage)
    if row.half:
        narrow(wide.astype(np.float32), row, made)
    else:
        made[:] = wide
    return made


def same(ours: Array, wanted: Array, row: DType, op: ReduceOp | None = None) -> bool:
    """Return whether two arrays are equal, NaNs being equal; complex products and averages within rounding."""
    if row.kind not in ("float", "complex"):
        return bool(np.array_equal(ours, wanted))
    if row.half:
        ours, wanted = widen(ours, row), widen(wanted, row)
    if row.kind == "complex" and op in (ReduceOp.PRODUCT, ReduceOp.AVERAGE):
        # NumPy fuses products with sums at its own discretion.
        tolerance = 8 * np.finfo(row.storage).eps
        return bool(np.all(abs(ours - wanted) <= tolerance * (1 + abs(wanted))))
    return bool(np.array_equal(ours, wanted, equal_nan=True))


def _row_and_op(name: str) -> tuple[DType, ReduceOp]:
    parsed = re.fullmatch(r"\w+<(\w+),(\w+)>", name)
    assert parsed is not None
    return DTYPES[parsed[1]], ReduceOp(parsed[2])
