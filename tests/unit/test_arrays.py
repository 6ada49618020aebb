"""What collectives accept as an array, and what they reject in words."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ringreduce.buffers import DTYPES, DType, Operand, like, new
from ringreduce.common.errors import UnsupportedBufferError

TORCH_DTYPES = [name for name in DTYPES if hasattr(torch, name)]


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_arrays_are_viewed_in_place(name: str) -> None:
    """An operand of a NumPy array is its own memory, with its shape, in the storage type of its dtype."""
    array = np.zeros((2, 3), ml_dtypes.bfloat16 if name == "bfloat16" else name)
    operand = Operand.of(array)
    assert (operand.shape, operand.count, operand.nbytes) == ((2, 3), 6, array.nbytes)
    assert (operand.dtype.name, operand.view.dtype) == (name, DTYPES[name].storage)
    assert operand.address == array.ctypes.data
    assert np.shares_memory(operand.view, array)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_tensors_are_viewed_in_place(name: str) -> None:
    """An operand of a tensor is its own memory: what is stored in the one is in the other."""
    tensor = torch.zeros(2, 3, dtype=getattr(torch, name))
    operand = Operand.of(tensor)
    assert (operand.shape, operand.dtype.name, operand.address) == ((2, 3), name, tensor.data_ptr())
    operand.view[1, 2] = 1
    assert tensor[1, 2] != 0
    assert (tensor != 0).sum() == 1


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_a_tensor_can_be_resized_after_it_was_viewed(name: str) -> None:
    """The view does not forbid it, and says where the elements are now when the tensor is viewed again."""
    tensor = torch.ones(3, 2, dtype=getattr(torch, name)).t()
    assert Operand.of(tensor).view.sum() != 0
    tensor.resize_(100, 100).zero_()
    assert (Operand.of(tensor).shape, Operand.of(tensor).address) == ((100, 100), tensor.data_ptr())


@pytest.mark.parametrize("nbytes", [0, 15])
def test_a_tensor_that_is_larger_than_its_memory_is_rejected(nbytes: int) -> None:
    """So a storage that was made smaller leaves it, and a `resize_` that failed."""
    tensor = torch.ones(5)
    part = tensor[1:4:2]
    tensor.untyped_storage().resize_(nbytes)
    fixed = torch.from_numpy(np.ones(4, np.float32))
    with pytest.raises(RuntimeError):
        fixed.resize_(5)
    for each in tensor, part, fixed:
        with pytest.raises(UnsupportedBufferError, match=f"only {each.untyped_storage().nbytes()} bytes"):
            Operand.of(each)
    assert Operand.of(tensor[:0]).count == 0


def test_a_view_keeps_the_memory_of_a_tensor() -> None:
    """The tensor may be gone or have other memory, but the view's lives as long as the view."""
    tensor = torch.arange(3.0)
    storage, view = StorageWeakRef(tensor.untyped_storage()), Operand.of(tensor).view
    tensor.data = torch.zeros(3)
    assert view.tolist() == [0, 1, 2]
    assert not storage.expired()
    del view
    assert storage.expired()


def test_parameters_and_what_needs_gradients_are_accepted() -> None:
    """A leaf that autograd watches can be read and written like any tensor."""
    parameter = torch.nn.Parameter(torch.ones(3))
    Operand.of(parameter).view[:] = 5
    assert parameter.tolist() == [5, 5, 5]
    assert Operand.of(torch.ones(3, requires_grad=True) * 2).view.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base[::-1],
        lambda base: base.T,
        lambda base: base[1:3, ::2],
        lambda base: base.reshape(2, 2, 6)[:, 1],
        lambda base: base[0, 0:1].reshape(()),
        lambda base: base[:0],
        lambda base: np.lib.stride_tricks.as_strided(base, (3, 2), (16, 8)),
    ],
    ids=["reversed", "transposed", "sliced", "3-d slice", "0-d", "empty", "as_strided"],
)
def test_any_strides_are_accepted_for_results(make) -> None:
    """Views whose elements lie apart from each other, however they are ordered, can take results."""
    view = make(np.arange(24.0).reshape(4, 6))
    operand = Operand.of(view)
    operand.require_writable()
    assert operand.contiguous == view.flags.c_contiguous
    np.testing.assert_array_equal(operand.flat(), view.ravel())


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.broadcast_to(np.zeros(3), (4, 3)).copy()[:, :1] * np.ones(1),
        lambda: torch.zeros(4, 3).t(),
        lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: np.zeros(3, np.complex64).real,
        lambda: np.zeros(3, [("a", "f4"), ("b", "f8")])["b"],
    ],
)
def test_other_layouts_are_accepted_for_results(make) -> None:
    """Parts of larger elements, transposed and channels-last tensors can take results."""
    Operand.of(make()).require_writable()


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.broadcast_to(np.zeros(3), (4, 3)),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(9), (4, 3), (8, 8)),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(9), (4,), (0,)),
        lambda: np.lib.stride_tricks.as_strided(np.zeros(9), (4,), (4,)),
        lambda: torch.zeros(3, 1).expand(3, 4),
        lambda: torch.zeros(9).as_strided((4, 3), (1, 1)),
    ],
)
def test_overlapping_elements_take_no_result(make) -> None:
    """Where several elements share memory the error says so; reading such an array is fine."""
    operand = Operand.of(make())
    assert operand.flat().size == operand.count
    with pytest.raises(UnsupportedBufferError, match=r"share memory|read-only"):
        operand.require_writable()


def test_read_only_arrays_take_no_result() -> None:
    """The error names the reason and the remedy."""
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(UnsupportedBufferError, match=r"read-only.*pass a copy"):
        Operand.of(array).require_writable()


@pytest.mark.parametrize("lazy", [lambda z: z.conj(), lambda z: z.conj().imag], ids=["conjugate", "negative"])
def test_lazy_tensors_are_read_but_take_no_result(lazy) -> None:
    """A lazy conjugate or negative is read by its value; a result stored in that copy would be lost."""
    tensor = lazy(torch.tensor([1 + 2j, 3 - 4j]))
    operand = Operand.of(tensor)
    np.testing.assert_array_equal(operand.view, np.array(tensor.tolist()))
    with pytest.raises(UnsupportedBufferError, match="conjugate"):
        operand.require_writable()


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_subclasses_of_arrays_behave_like_arrays(tmp_path) -> None:
    """A matrix is flattened to one dimension, and a memory map is written to in place."""
    assert Operand.of(np.matrix([[1.0, 2.0]])).flat().shape == (2,)
    mapped = np.memmap(tmp_path / "file", np.float32, "w+", shape=(3,))
    Operand.of(mapped).view[:] = 4
    assert mapped.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        ([1.0, 2.0], r"expected a NumPy array or a torch tensor, got list; pass np.asarray\(...\)"),
        (np.str_("text"), "str"),
        (np.longdouble(1), np.dtype(np.longdouble).name),
        (None, "got NoneType"),
        (2**70, "not supported"),
        (b"bytes", "got bytes"),
        (np.ma.masked_array([1.0], [True]), "masked arrays"),
        (np.array([object()]), "object"),
        (np.array(["text"]), "str"),
        (np.array(["2020-01-01"], "datetime64[D]"), "datetime64"),
        (np.zeros(2, ">f4"), "float32 in foreign byte order"),
        (np.zeros(2, np.longdouble), np.dtype(np.longdouble).name),
        (np.zeros(2, [("a", "f4")]), "void"),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        (torch.zeros(2, dtype=torch.float8_e5m2), "float8_e5m2"),
        (torch.eye(2).to_sparse(), "sparse_coo.*pass a dense one"),
        (torch.zeros(2, device="meta"), "on meta"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_is_no_array_of_numbers_is_rejected(array: object, words: str) -> None:
    """The error is typed, is a TypeError too, and says what came and what is possible."""
    with pytest.raises(UnsupportedBufferError, match=words) as caught:
        Operand.of(array)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("number", [np.float32(1.5), 1.5, 3, True, 1j, ml_dtypes.bfloat16(1.5)], ids=repr)
def test_a_number_is_an_array_of_no_dimension(number: object) -> None:
    """Its value is seen, and nothing can be stored there."""
    operand = Operand.of(number)
    assert operand.shape == ()
    assert operand.dtype.name == np.asarray(number).dtype.name
    assert operand.view.tobytes() == np.asarray(number).tobytes()
    with pytest.raises(UnsupportedBufferError, match="read-only"):
        operand.require_writable()


def test_an_unsupported_dtype_names_the_choices() -> None:
    """The message for a wrong element type lists the right ones."""
    with pytest.raises(UnsupportedBufferError) as caught:
        Operand.of(np.zeros(1, np.longdouble))
    assert all(name in str(caught.value) for name in DTYPES)


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_is_found_under_all_its_names(name: str) -> None:
    """The name, the NumPy dtype and the torch dtype lead to one row."""
    row = DType.of(name)
    assert row is DTYPES[name]
    assert DType.of(np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)) is row
    if name in TORCH_DTYPES:
        assert DType.of(getattr(torch, name)) is row


@pytest.mark.parametrize("dtype", ["float8", "nonsense", [("a", int)], object, np.dtype("V3"), torch.qint8, {}])
def test_what_is_no_supported_dtype_is_rejected(dtype: object) -> None:
    """Whatever is given as a dtype, the answer is a row or a typed error."""
    with pytest.raises(UnsupportedBufferError, match="not supported"):
        DType.of(dtype)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_new_arrays_have_the_kind_that_is_asked_for(library: str, name: str) -> None:
    """`new` and `like` make private, contiguous arrays of the library, shape and dtype."""
    array = new((2, 3), DTYPES[name], library)
    for made in (array, like(array), like(array, (2, 3))):
        assert type(made).__module__.split(".")[0] == library
        assert tuple(made.shape) == (2, 3)
        assert Operand.of(made).dtype.name == name
        assert Operand.of(made).contiguous
