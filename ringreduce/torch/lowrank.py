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

What rank w has sent is B (M_w^T B)^T, its own part of that, and the rest of M_w is its residual. Taking the common
result away instead, which has the same average over the ranks, would leave in each residual how this rank's gradients
differ from the others'. Where ranks have different data these differences add up from step to step without limit, and
what is to be compressed drowns in their rounding errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from ringreduce.arguments import whole_number
from ringreduce.communicator import Communicator
from ringreduce.errors import ConfigError
from ringreduce.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.torch.feedback import ErrorFeedback

__all__ = ["PowerSGD", "PowerSGDReducer"]


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

    def compresses(self, shape: torch.Size) -> bool:
        """Return whether a parameter of this shape is sent as a product."""
        if len(shape) < 2:
            return False
        rows, cols = _as_matrix(shape)
        return self.rank * (rows + cols) * self.min_ratio < rows * cols

    def reducer(self, shapes: Sequence[torch.Size], places: Sequence[slice]) -> PowerSGDReducer:
        """Return what reduces one bucket on this rank.

        Args:
            shapes: of the bucket's parameters, their dimensions in the order that they have in memory; must agree on
                all ranks.
            places: where each begins and ends in the flat bucket; must agree.
        """
        return PowerSGDReducer(shapes, places, self)


class PowerSGDReducer:
    """Reduces one bucket on one rank by low-rank products; made by `PowerSGD.reducer`.

    Two allreduces, or one if nothing is compressed. Factors are kept transposed, r x rows and r x cols: products of a
    large matrix with two columns take up to 70 times as long (one thread, 2048 x 2048) as those with two rows.

    Attributes:
        error: the part of this rank's contribution that the last `reduce` left unsent, |sent - meant| / |meant|.
    """

    wire = None

    __slots__ = ("_compressed", "_feedback", "_first", "_guess", "_matrices", "_others", "_rank", "_second")

    def __init__(self, shapes: Sequence[torch.Size], places: Sequence[slice], settings: PowerSGD) -> None:
        self._feedback = ErrorFeedback(shapes, places, settings.error_feedback)
        self._rank = settings.rank
        self._compressed = [settings.compresses(shape) for shape in shapes]
        meant, self._others = self._sorted(self._feedback.pieces(self._feedback.meant))
        matrices = [shape for shape, compressed in zip(shapes, self._compressed, strict=True) if compressed]
        self._matrices = [piece.view(_as_matrix(shape)) for piece, shape in zip(meant, matrices, strict=True)]
        # A generator of its own: all ranks begin with the same guess, and the program's random numbers stay what they
        # would be without compression.
        generator = torch.Generator().manual_seed(settings.seed)
        ncolumns = sum(matrix.shape[1] for matrix in self._matrices)
        self._guess = torch.randn(self._rank * ncolumns, generator=generator, device="cpu")
        self._first: torch.Tensor | None = None
        self._second: torch.Tensor | None = None

    @property
    def error(self) -> float:
        return self._feedback.error

    @torch.no_grad()
    def reduce(self, communicator: Communicator, flat: torch.Tensor, average: bool) -> None:
        """Replace a bucket by an approximate sum or average over the ranks. Collective.

        A parameter that is not finite on some rank is so in the result: all of it, if it is a matrix.

        Args:
            communicator: the ranks; the same as in earlier calls.
            flat: 1-D float32, contiguous. Same bits on all ranks afterwards, if LAPACK computes the same QR
                factorisation from the same bits, as it does on processors of one kind; all else that the result
                depends on is reduced, or computed element by element, without BLAS.
            average: whether to divide the sum by the number of ranks; must agree.
        """
        self._feedback.add(flat)
        op = AVERAGE if average else SUM
        first, second = self._buffers(communicator)
        sent, images = self._parts_of_first(first)
        factors = _rows(second, self._rank, [matrix.shape[1] for matrix in self._matrices])

        _copy(sent, self._others)
        for matrix, guess, image in zip(self._matrices, self._guesses(), images, strict=True):
            torch.mm(guess, matrix.t(), out=image)
        _allreduce(communicator, first, op)

        bases = [_orthonormal(image) for image in images]
        for matrix, basis, factor in zip(self._matrices, bases, factors, strict=True):
            torch.mm(basis, matrix, out=factor)
            _subtract_product(matrix, basis, factor)
        for other in self._others:
            other.zero_()
        _allreduce(communicator, second, op)

        results, others = self._sorted(self._feedback.pieces(flat))
        _copy(others, sent)
        for result, basis, factor in zip(results, bases, factors, strict=True):
            _write_product(result.view(basis.shape[1], factor.shape[1]), basis, factor)
        for guess, factor in zip(self._guesses(), factors, strict=True):
            _improve(guess, factor)
        self._feedback.settle(bool(first.isfinite().all() and second.isfinite().all()))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return clones of what the next `reduce` depends on.

        ``factors``, the same on all ranks, and, with error feedback, ``residual``, different on each.
        """
        return {"factors": self._guess.clone(), **self._feedback.state_dict()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what `state_dict` has returned.

        Raises:
            ConfigError: it is of another bucket, or of one compressed with other settings; nothing was loaded.
        """
        self._feedback.load_state_dict(state, factors=self._guess)

    def _buffers(self, communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return communication memory for what travels first, and for what travels second."""
        if self._first is None or self._second is None:
            rows = sum(matrix.shape[0] for matrix in self._matrices)
            first = sum(other.numel() for other in self._others) + self._rank * rows
            self._first = torch.from_numpy(communicator.empty(first))
            self._second = torch.from_numpy(communicator.empty(self._guess.numel()))
        return self._first, self._second

    def _parts_of_first(self, first: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return where the uncompressed parameters and where the matrices' images travel."""
        lengths = [other.numel() for other in self._others]
        start = sum(lengths)
        images = _rows(first[start:], self._rank, [matrix.shape[0] for matrix in self._matrices])
        return list(first[:start].split_with_sizes(lengths)), images

    def _guesses(self) -> list[torch.Tensor]:
        return _rows(self._guess, self._rank, [matrix.shape[1] for matrix in self._matrices])

    def _sorted(self, pieces: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the parts of parameters that are compressed, and those of the others."""
        compressed: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for piece, is_compressed in zip(pieces, self._compressed, strict=True):
            (compressed if is_compressed else others).append(piece)
        return compressed, others


def _as_matrix(shape: torch.Size) -> tuple[int, int]:
    return shape[0], prod(shape[1:])


def _rows(flat: torch.Tensor, rank: int, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return the parts of a flat tensor as matrices of ``rank`` rows and the given lengths."""
    parts = flat.split_with_sizes([rank * length for length in lengths])
    return [part.view(rank, length) for part, length in zip(parts, lengths, strict=True)]


def _copy(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, source)


def _allreduce(communicator: Communicator, buffer: torch.Tensor, op: ReduceOp) -> None:
    if buffer.numel():
        communicator.allreduce(buffer, op, out=buffer)


def _orthonormal(image: torch.Tensor) -> torch.Tensor:
    """Return orthonormal rows whose span contains those of ``image``; NaNs if it is not finite.

    They are orthonormal even if those of ``image`` are zero or depend on each other. Computed in float64, of which the
    result keeps so little that it hardly ever shows if ranks do not compute the same last bits.
    """
    if not image.isfinite().all():
        return torch.full_like(image, torch.nan)
    basis: torch.Tensor = torch.linalg.qr(image.t().double()).Q
    return basis.t().to(torch.float32, memory_format=torch.contiguous_format)


def _write_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    # Element by element, one row after the other: no BLAS that on another rank could sum in another order, and up to
    # rank 8 it is faster than torch.mm, whose inner loop is as short as the rank.
    torch.mul(left[0].unsqueeze(1), right[0], out=out)
    for column, row in zip(left[1:], right[1:], strict=True):
        out.addcmul_(column.unsqueeze(1), row)


def _subtract_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    for column, row in zip(left, right, strict=True):
        out.addcmul_(column.unsqueeze(1), row, value=-1.0)


def _improve(guess: torch.Tensor, factor: torch.Tensor) -> None:
    """Make a reduced factor the guess of the next step, scaled to rows of maximum 1, which changes no span.

    A row that is zero, where the gradient had a smaller rank or was zero, would stay zero for ever, and one that is
    not finite as well; there the old guess remains.
    """
    largest = factor.abs().amax(dim=1, keepdim=True)
    usable = (largest > 0.0) & largest.isfinite()
    torch.where(usable, factor / largest, guess, out=guess)
