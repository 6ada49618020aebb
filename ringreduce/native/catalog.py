"""Which compiled functions there are, and what reduces the elements of a dtype: what can be known without Numba."""

from __future__ import annotations

import platform
from typing import NamedTuple

#: What compiled code needs of the process.
PYTHON_SYMBOLS = ("PyLong_AsLongLong", "PyLong_FromLongLong", "PyEval_SaveThread", "PyEval_RestoreThread")
SYSTEM_SYMBOLS = ("sched_yield", "clock_gettime", "memcpy", "memset")


class Kernel(NamedTuple):
    """What reduces elements, by the names of functions of `ringreduce.native.elementwise`; "": nothing.

    Attributes:
        itemsize: bytes of the numbers that are added; an element may be several.
        pair: reduces two terms.
        finish: divides a sum by the number of terms.
        grow: adds one of three or more terms to a sum of a wider type; else ``pair`` adds all.
        round: rounds that sum.
    """

    itemsize: int
    pair: str
    finish: str = ""
    grow: str = ""
    round: str = ""


#: Integers whose averages are made here. Sums of 64 bits can wrap around.
AVERAGED_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32))


def _wide(dtype: str, op: str, itemsize: int) -> Kernel:
    return Kernel(itemsize, f"{op} {dtype}", grow=f"grow {dtype}", round=f"round {op} {dtype}")


#: By dtype and operation. Others are NumPy's.
KERNELS = {
    **{(name, "sum"): Kernel(size, f"sum {name}") for name, size in (("float32", 4), ("float64", 8))},
    **{
        (name, "average"): Kernel(size, f"sum {name}", f"divide {name}")
        for name, size in (("float32", 4), ("float64", 8))
    },
    # A complex number is two floats, and integers wrap around alike with a sign and without.
    **{(f"complex{16 * size}", "sum"): Kernel(size, f"sum float{8 * size}") for size in (4, 8)},
    **{
        (f"{sign}int{8 * size}", "sum"): Kernel(size, f"sum int{8 * size}")
        for sign in ("", "u")
        for size in (1, 2, 4, 8)
    },
    **{(name, op): _wide(name, op, itemsize=2) for name in ("bfloat16", "float16") for op in ("sum", "average")},
    **{(name, "average"): _wide(name, "average", int(name.strip("uint")) // 8) for name in AVERAGED_INTEGERS},
    **{
        (f"{kind}{8 * size}", op): Kernel(size, f"{op} {kind}{8 * size}")
        # Of a zero and its negative NumPy takes the second on x86, and the smaller one elsewhere.
        for kind in (("float", "int") if platform.machine() in ("x86_64", "AMD64") else ("int",))
        for size in (4, 8)
        for op in ("min", "max")
    },
}
#: All functions that these need.
FUNCTIONS = tuple(dict.fromkeys(name for kernel in KERNELS.values() for name in kernel[1:] if name))
