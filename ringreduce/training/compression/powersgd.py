"""PowerSGD: gradients travel as products of two thin matrices, found by one step of a power iteration.

Sources:
    T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
        Optimization", NeurIPS 2019, arXiv 1905.13727, algorithms 1 (compression) and 2 (error feedback).
    S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression
        Schemes", ICML 2019, arXiv 1901.09847.

For each matrix M_w (rows x cols) that rank w means to send, with a Q (cols x r) that all ranks have from the last step:

    P = sum over w of M_w Q                   one allreduce for all matrices of the bucket, and all that is no matrix
    B = an orthonormal basis of P's columns   on every rank, from the same bits
    Q = sum or average over w of M_w^T B      one allreduce for all matrices
    result = B Q^T                            the sum or average of M_w, projected onto B

What rank w has sent is B (M_w^T B)^T, its own part of that, and the rest of M_w is its residual. Subtracting the common
result instead, which has the same average over the ranks, would leave in each residual how this rank's gradients
differ from the others'. Where ranks have different data these differences add up from step to step without limit, until
their rounding errors drown the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM
from ringreduce.training.compression import Floats, ReducingRanks, Residual, State

#: Matrices are multiplied a few rows at a time, so many elements: these stay in the cache of a core meanwhile, and
#: OpenBLAS is fast for small matrices, but not for a large one and a thin one (2048 x 2048 by rank 2, one core with
#: AVX-512: 1.2 ms instead of 5.5).
_TILE_COUNT = 1 << 16


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Send matrices as products of rank ``rank``; everything else, and matrices too small to gain, as they are.

    Parameters of two or more dimensions are matrices: the first dimension by all others. All settings must agree on
    all ranks.

    Args:
        rank: of the products; a matrix costs rank * (rows + cols) numbers instead of rows * cols.
        seed: of the first guess.
        error_feedback: whether what was not sent is added to the next gradient. Without, it is lost.
        min_ratio: a matrix is compressed if that makes it smaller by more than this factor.

    Raises:
        ConfigError: ``rank`` or ``min_ratio`` is below 1.
    """

    rank: int = 2
    seed: int = 0
    error_feedback: bool = True
    min_ratio: float = 1.0

    def __post_init__(self) -> None:
        whole_number("the rank of PowerSGD", self.rank, 1)
        if not self.min_ratio >= 1.0:
            raise ConfigError(f"min_ratio must be at least 1 (no gain), got {self.min_ratio}")

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Return whether a parameter of this shape is sent as a product."""
        if len(shape) < 2:
            return False
        rows, cols = _as_matrix(shape)
        return self.rank * (rows + cols) * self.min_ratio < rows * cols

    def reducer(self, shapes: Sequence[tuple[int, ...]], places: Sequence[slice]) -> PowerSGDReducer:
        """Return what reduces one bucket on this rank; see `BucketCompression.reducer`."""
        return PowerSGDReducer(shapes, places, self)


class PowerSGDReducer(Residual):
    """Reduces one bucket on one rank by low-rank products; made by `PowerSGD.reducer`.

    Two allreduces, or one if nothing is compressed.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], places: Sequence[slice], settings: PowerSGD) -> None:
        super().__init__(shapes, places, settings.error_feedback)
        self._rank = settings.rank
        # Of each parameter its shape as a matrix; None: it is sent whole.
        self._matrices = [_as_matrix(shape) if settings.compresses(shape) else None for shape in shapes]
        ncolumns = sum(matrix[1] for matrix in self._matrices if matrix)
        # All ranks begin with the same guess.
        self._guess = np.random.default_rng(settings.seed % 2**64).standard_normal(self._rank * ncolumns, np.float32)
        self._bound: tuple[Floats, Floats, list[_Whole | _Product]] | None = None

    @np.errstate(all="ignore")  # what is not finite is passed on like any other number
    def reduce(self, ranks: ReducingRanks, flat: Floats, average: bool) -> None:
        """Replace a bucket by an approximate sum or average over the ranks. Collective.

        A parameter that is not finite on some rank is so in the result: all of it, if it is a matrix.

        Args:
            ranks: the same in every call.
            flat: 1-D float32, contiguous. Same bits on all ranks afterwards, if LAPACK computes the same QR
                factorisation from the same bits, as it does on processors of one kind; all else that the result
                depends on is reduced, or computed element by element, without BLAS.
            average: whether to divide the sum by the number of ranks; must agree.
        """
        first, second, parameters = self._bound = self._bound or self._bind(ranks)
        op = AVERAGE if average else SUM
        self.add(flat)
        for parameter in parameters:
            parameter.start()
        if first.size:
            ranks.allreduce(first, op, out=first)
        for parameter in parameters:
            parameter.subtract()
        if second.size:
            ranks.allreduce(second, op, out=second)
        for parameter, result in zip(parameters, self.pieces(flat), strict=True):
            parameter.finish(result)
        self.settle(bool(np.isfinite(first).all() and np.isfinite(second).all()))

    def kept(self) -> State:
        """Return what the next `reduce` depends on: ``factors``, the same on all ranks, and what `Residual` keeps."""
        return {"factors": self._guess, **super().kept()}

    def _bind(self, ranks: ReducingRanks) -> tuple[Floats, Floats, list[_Whole | _Product]]:
        """Return communication memory for what travels first and second, and the parameters that use it."""
        pieces = self.pieces(self.unsent)
        matrices = self._matrices
        rank = self._rank
        firsts = [rank * matrix[0] if matrix else piece.size for matrix, piece in zip(matrices, pieces, strict=True)]
        seconds = [rank * matrix[1] if matrix else 0 for matrix in matrices]
        first = ranks.empty(sum(firsts))
        second = ranks.empty(sum(seconds))
        parts = zip(_cut(self._guess, seconds), _cut(first, firsts), _cut(second, seconds), strict=True)
        parameters = [
            _Product(piece.reshape(matrix), *(each.reshape(rank, -1) for each in factors))
            if matrix
            else _Whole(piece, factors[1])
            for matrix, piece, factors in zip(matrices, pieces, parts, strict=True)
        ]
        return first, second, parameters


@dataclass(slots=True)
class _Whole:
    """A parameter that is sent as it is.

    Args:
        unsent: its part of the residual.
        sent: what is reduced first; as long.
    """

    unsent: Floats
    sent: Floats

    def start(self) -> None:
        np.copyto(self.sent, self.unsent)

    def subtract(self) -> None:
        self.unsent.fill(0.0)

    def finish(self, result: Floats) -> None:
        np.copyto(result, self.sent)


class _Product:
    """A parameter that is sent as a product of rank r.

    Factors are kept transposed, so that NumPy's loops run along rows, which are long then.

    Args:
        unsent: its part of the residual, rows x cols.
        guess: r x cols, from which the image is computed.
        image: r x rows, what is reduced first.
        factor: r x cols, what is reduced second.
    """

    __slots__ = ("_factor", "_guess", "_image", "_tiles", "_unsent")

    def __init__(self, unsent: Floats, guess: Floats, image: Floats, factor: Floats) -> None:
        self._unsent = unsent
        self._guess = guess
        self._image = image
        self._factor = factor
        rows, cols = unsent.shape
        height = max(1, _TILE_COUNT // cols)
        self._tiles = [slice(start, start + height) for start in range(0, rows, height)]

    def start(self) -> None:
        """Compute this rank's image of the guess, for the first reduction."""
        for rows in self._tiles:
            np.matmul(self._guess, self._unsent[rows].T, out=self._image[:, rows])

    def subtract(self) -> None:
        """Make the reduced image a basis, compute this rank's factor for it, and subtract their product."""
        basis = self._image
        factor = self._factor
        basis[:] = _orthonormal(basis)
        factor.fill(0.0)
        for rows in self._tiles:
            factor += basis[:, rows] @ self._unsent[rows]
        scratch = np.empty_like(self._unsent[self._tiles[0]])
        for rows in self._tiles:
            unsent = self._unsent[rows]
            unsent -= np.matmul(basis[:, rows].T, factor, out=scratch[: len(unsent)])

    def finish(self, result: Floats) -> None:
        """Write the product of the basis and the reduced factor; the factor becomes the guess of the next step."""
        basis = self._image
        factor = self._factor
        matrix = result.reshape(self._unsent.shape)
        for rows in self._tiles:
            # Element by element: no BLAS that on another rank could sum in another order.
            np.einsum("ri,rj->ij", basis[:, rows], factor, out=matrix[rows])
        # Scaled to rows of maximum 1, which changes no span. A row that is zero, where the gradient had a smaller rank
        # or was zero, would stay zero for ever, and one that is not finite as well; there the old guess remains.
        largest = np.abs(factor).max(axis=1, keepdims=True)
        np.divide(factor, largest, out=self._guess, where=(largest > 0.0) & np.isfinite(largest))


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], prod(shape[1:])


def _cut(flat: Floats, sizes: Sequence[int]) -> list[Floats]:
    """Return consecutive parts of a flat array."""
    return [flat[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _orthonormal(image: Floats) -> Floats:
    """Return orthonormal rows whose span contains those of ``image``; NaNs if it is not finite.

    They are orthonormal even if those of ``image`` are zero or depend on each other. Computed in float64, of which the
    result keeps so little that it hardly ever shows if ranks do not compute the same last bits.
    """
    if not np.isfinite(image).all():
        return np.full_like(image, np.nan)
    basis: Floats = np.linalg.qr(image.T.astype(np.float64))[0].T.astype(np.float32)
    return basis
