"""Private parts of libraries: all are there and do here what functions expect of them. Where one is hidden, the
self-test names it and all else goes on, or says what it lacks.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ringreduce.buffers import numpy_private
from ringreduce.common.errors import ConfigError
from ringreduce.common.private_parts import Part, mentions, missing
from ringreduce.doctor import bindings
from ringreduce.doctor.bindings import PRIVATE, Binding, ask
from ringreduce.doctor.facts import Facts
from ringreduce.doctor.findings import examine
from ringreduce.training.binding.error_text import described


def private_of(library: str) -> ModuleType:
    pytest.importorskip(library)
    return importlib.import_module(PRIVATE[library])


@pytest.fixture
def torch() -> ModuleType:
    return pytest.importorskip("torch")


@pytest.fixture
def keras() -> ModuleType:
    return pytest.importorskip("keras")


@pytest.fixture
def tf() -> ModuleType:
    return pytest.importorskip("tensorflow")


@pytest.fixture
def jax() -> ModuleType:
    return pytest.importorskip("jax")


def private_of_optimizers() -> ModuleType:
    return importlib.import_module("ringreduce.training.binding.keras_private")


def without(module: ModuleType, *hidden: str) -> Any:
    """Load a module a second time, so that it finds nothing under these names; what uses it keeps the first."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_without", module.__file__)
    made: Any = importlib.util.module_from_spec(spec)

    def get(thing: object, name: str, *default: object) -> object:
        return builtins.getattr(thing, f"{name} hidden" if name in hidden else name, *default)

    made.getattr = get
    made.hasattr = lambda thing, name: name not in hidden and builtins.hasattr(thing, name)
    spec.loader.exec_module(made)
    return made


@pytest.mark.smoke
@pytest.mark.parametrize("library", PRIVATE)
def test_all_is_as_expected_in_the_installed_version(library: str):
    """With the version that the tests run with, which is the last of those that were tried."""
    private = private_of(library)
    assert missing(private.PARTS) == {}
    tried = private if hasattr(private, "TRIED") else private_of_optimizers()
    installed = importlib.import_module(library).__version__
    assert installed.partition("+")[0] in tried.TRIED, "run the tests of this binding, and add the version"


def test_a_part_that_fails_is_missing_too():
    """Whatever a changed library raises."""

    def fail() -> None:
        raise KeyError

    parts = Part("a", lambda: True, "A"), Part("b", lambda: None, "B"), Part("c", fail, "C")
    assert missing(parts) == {"b": "B", "c": "C"}


def test_names_are_found_in_the_code_of_a_function():
    """Attributes and texts, also behind a decorator; no others."""

    def function(thing: Any) -> Any:
        return getattr(thing, "text"), thing.attribute  # noqa: B009  # both kinds are looked for

    decorated = wraps(function)(lambda thing: None)
    assert [mentions(decorated, name) for name in ("text", "attribute", "another")] == [True, True, False]


# ---- torch ----


def seen_in_hook(look: Callable[[], Any], *, nested: bool = False) -> Any:
    """Return what a function returns that the hook of a tensor calls; with ``nested`` in a pass within another one."""
    torch: Any = pytest.importorskip("torch")
    seen: list[Any] = []

    def run_pass() -> None:
        with torch.enable_grad():
            parameter = torch.ones(1, requires_grad=True)
            parameter.register_hook(lambda _: seen.append(look()))
            parameter.sum().backward()

    class Nesting(torch.autograd.Function):
        """The identity, of which the evaluation makes a backward pass of its own."""

        @staticmethod
        def forward(ctx: Any, given: Any) -> Any:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            run_pass()
            return gradient

    if nested:
        Nesting.apply(torch.ones(1, requires_grad=True) * 2).sum().backward()
    else:
        run_pass()
    return seen[0]


def test_torch_counts_holders_and_changes_of_tensors(torch: Any):
    """A view holds the storage, and a write in place is a change."""
    private = private_of("torch")
    tensor = torch.zeros(1)
    alone = private.references(tensor)
    view = tensor.detach()
    assert private.references(tensor) > alone
    assert private.version_of(view.zero_()) == private.version_of(tensor) == 1


@pytest.mark.parametrize(
    ("hidden", "indices", "values"), [([], [1, 1, 0], [1.0, 2.0, 4.0]), (["_values"], [0, 1], [4.0, 3.0])]
)
def test_torch_shows_entries_of_sparse_tensors(torch: Any, hidden: list[str], indices: list[int], values: list[float]):
    """Two of one index are two; without raw entries they are one."""
    tensor = torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2.0, 4.0], (3,), check_invariants=True)
    found = without(private_of("torch"), *hidden).raw_entries(tensor)
    assert [each.tolist() for each in found] == [[indices], values]


def test_torch_numbers_passes_and_says_when_they_end():
    """Outside of a pass there is no number, and a function for the end is not called before it."""
    private = private_of("torch")
    assert private.current_pass() == private.NO_PASS != seen_in_hook(private.current_pass)
    ended: list[int] = []
    during = seen_in_hook(lambda: private.at_end_of_pass(lambda: ended.append(1)) or len(ended))
    assert (during, ended) == (0, [1])


def test_the_stack_tells_passes_within_others_and_calls_by_autograd():
    """Of a pass within another one the following nodes are known; a function of a hook is not called by autograd."""
    private = private_of("torch")
    assert seen_in_hook(private.following_in_outer_pass, nested=True)
    assert seen_in_hook(private.following_in_outer_pass) is None
    assert seen_in_hook(private.is_called_by_autograd)
    assert not seen_in_hook(lambda: private.is_called_by_autograd())  # by a function that autograd has called


@pytest.mark.parametrize(("hidden", "order"), [([], [2, 1]), (["hooks_dict_ref"], [1, 2])])
def test_hooks_of_torch_are_called_in_our_order(torch: Any, hidden: list[str], order: list[int]):
    """One that is registered later is called first; without an order they are called as registered."""
    called: list[int] = []
    parameter = torch.ones(1, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(lambda _: called.append(1))
    handle = parameter.register_post_accumulate_grad_hook(lambda _: called.append(2))
    without(private_of("torch"), *hidden).call_first(handle)
    (parameter * 2).sum().backward()
    assert called == order


def test_a_scaler_of_gradients_is_recognised_by_its_method(torch: Any):
    """By the one in which it asks for an optimizer's parameters; then it has looked for overflows."""
    private = private_of("torch")
    asking: list[Any] = []

    class Asked(torch.optim.SGD):
        @property
        def param_groups(self) -> Any:
            asking.append(private.scaler_of(private.frame_above(1)))
            return self.__dict__["groups"]

        @param_groups.setter
        def param_groups(self, groups: Any) -> None:
            self.__dict__["groups"] = groups

    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    optimizer = Asked([parameter], 0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    assert set(asking) == {None}
    scaler.unscale_(optimizer)
    assert asking[-1] is scaler
    assert private.has_looked(private.scaler_state(scaler, id(optimizer)))


@pytest.mark.parametrize("marked", [False, True])
def test_schedules_of_torch_warn_of_a_step_that_is_not_marked(torch: Any, marked: bool):
    """And of none that is."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    if marked:
        private_of("torch").mark_stepped(optimizer)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        schedule.step()
    assert bool(warned) is not marked


@pytest.mark.parametrize(("hidden", "names"), [([], ["0", "1"]), (["_pytree", "_modules"], ["0"])])
def test_trees_of_torch_are_known(torch: Any, hidden: list[str], names: list[str]):
    """Children have all their names, or one, and what is in mappings, lists and tuples is found."""
    private = without(private_of("torch"), *hidden)
    inner = torch.nn.Identity()
    assert private.children_of(torch.nn.ModuleList([inner, inner])) == [(name, inner) for name in names]
    assert private.leaves({"a": [1, (2, {"b": 3})], "c": 4}) == [1, 2, 3, 4]


def test_functions_are_skipped_by_torchs_compiler_and_loaders_make_iterators(torch: Any):
    """A function is marked; an iterator of a loader is of the class whose method is replaced."""
    private = private_of("torch")

    def function() -> None: ...

    private.skip_in_compiler(function, [function.__code__], callees=True)
    assert vars(function)
    assert isinstance(iter(torch.utils.data.DataLoader([0])), private._Iterator)


@pytest.mark.parametrize(
    ("hidden", "named"),
    [
        ("_version", {"version_of"}),
        ("_cdata", {"holders_at", "forbid_resizing"}),
        ("_storage_Use_Count", {"holders_at", "forbid_resizing"}),
        ("_indices", {"raw_entries"}),
        ("_foreach_copy_", {"copy_all"}),
        ("_foreach_zero_", {"copy_all"}),
        ("_current_graph_task_id", {"current_pass"}),
        ("_execution_engine", {"at_end_of_pass"}),
        ("_engine_run_backward", {"following_in_outer_pass", "is_called_by_autograd"}),
        ("BackwardCFunction", {"following_in_outer_pass"}),
        ("hooks_dict_ref", {"call_first"}),
        ("_unscale_grads_", {"scaler_of"}),
        ("_per_optimizer_states", {"scaler_state"}),
        ("_modules", {"children_of"}),
        ("_pytree", {"leaves"}),
        ("set_code_exec_strategy", {"skip_in_compiler"}),
        ("_FrameAction", {"skip_in_compiler"}),
        ("_is_profiler_enabled", {"is_profiling"}),
        ("_disable_profiler", {"is_profiling"}),
        ("_call_end_callbacks_on_future", {"is_profiling"}),
        ("_BaseDataLoaderIter", {"get_batches_by"}),
        ("_distributed_c10d", {"backend_class", "keep_whole_works"}),
        ("_create_work_from_future", {"keep_whole_works"}),
        ("_set_forward_pass_work_handle", {"keep_whole_works"}),
        ("_get_backend", {"cpu_backend_of"}),
    ],
)
def test_the_table_of_torch_names_what_is_hidden(hidden: str, named: set[str]):
    """That, and nothing else."""
    assert set(missing(without(private_of("torch"), hidden).PARTS)) == named


def test_without_counts_torch_resizes_no_storage_again(torch: Any):
    """And only holders of the tensor itself are noticed."""
    for hidden in ("_storage_Use_Count", "_cdata"):
        private = without(private_of("torch"), hidden)
        tensor = torch.zeros(3)
        alone = private.references(tensor)
        view = tensor.detach()
        assert private.references(tensor) == alone
        other = tensor
        assert private.references(other) == alone + 1
        assert private.forbid_resizing(view.untyped_storage()) is None
        with pytest.raises(RuntimeError, match="resiz"):
            tensor.untyped_storage().resize_(100)


def test_without_versions_torchs_tensors_are_taken_for_unchanged(torch: Any):
    """The count is always 0."""
    assert without(private_of("torch"), "_version").version_of(torch.zeros(1).add_(1)) == 0


def test_without_calls_for_many_tensors_each_is_copied(torch: Any):
    """And cleared."""
    private = without(private_of("torch"), "_foreach_copy_", "_foreach_zero_")
    targets = [torch.zeros(2), torch.zeros(3)]
    private.copy_all(targets, [torch.ones(2), torch.ones(3)])
    assert [each.sum() for each in targets] == [2, 3]
    private.zero_all(targets)
    assert [each.sum() for each in targets] == [0, 0]


@pytest.mark.parametrize(
    ("hidden", "act", "part"),
    [
        ("_execution_engine", lambda private: private.at_end_of_pass(print), "Variable._execution_engine"),
        ("_per_optimizer_states", lambda private: private.scaler_state(object(), 1), "_per_optimizer_states"),
        ("nothing", lambda private: private.has_looked({}), "found_inf_per_device"),
        ("_distributed_c10d", lambda private: private.backend_class(), "_distributed_c10d.Backend"),
    ],
)
def test_what_torch_cannot_do_without_is_an_error(torch: Any, hidden: str, act: Callable[[Any], object], part: str):
    """It names torch, its version, what is missing, and what to do."""
    with pytest.raises(ConfigError, match=part) as caught:
        act(without(private_of("torch"), hidden))
    assert str(caught.value).startswith(f"torch {torch.__version__} has no ")
    assert "doctor" in str(caught.value)


def test_without_numbers_of_passes_each_end_is_heard(torch: Any, monkeypatch: pytest.MonkeyPatch):
    """Once, and also after a pass that an exception has ended."""
    gradients = importlib.import_module("ringreduce.torch.tensors.gradients")
    less = without(private_of("torch"), "_current_graph_task_id")
    assert seen_in_hook(less.current_pass) == less.NO_PASS
    monkeypatch.setattr(gradients, "current_pass", less.current_pass)
    passes = gradients._Passes()
    ended: list[bool] = []

    class Watcher:
        number = 1

        def pass_ended(self, nested: bool) -> None:
            ended.append(nested)

    watcher = Watcher()
    parameters = [torch.ones(1, requires_grad=True) for _ in range(3)]
    for each in parameters:
        each.register_hook(lambda _: passes.notify_end(watcher))
    for count in (1, 2):
        sum(parameters).backward()
        assert ended == [False] * count
    failing = parameters[0] * 1.0
    failing.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (failing + parameters[1] * parameters[2]).backward()
    sum(parameters).backward()
    assert ended == [False] * 3


def test_passes_within_others_are_told_by_less():
    """Without what runs passes they count like others; without what evaluates nodes it is unknown which made them."""
    pytest.importorskip("torch")
    whole = private_of("torch")
    for hidden, expected in (("_engine_run_backward", None), ("BackwardCFunction", [])):
        assert seen_in_hook(without(whole, hidden).following_in_outer_pass, nested=True) == expected
    assert seen_in_hook(without(whole, "_engine_run_backward").following_in_outer_pass) is None


def test_a_scaler_of_gradients_is_recognised_by_any_method(torch: Any):
    """Where its method has another name, and not in functions or in methods of others."""
    private = without(private_of("torch"), "_unscale_grads_")

    class Scaler(torch.amp.GradScaler):
        def renamed(self) -> object:
            return private.scaler_of(private.frame_above(0))

    class Other:
        renamed = Scaler.renamed

    scaler = Scaler("cpu")
    assert scaler.renamed() is scaler
    assert Other().renamed() is None
    assert private.scaler_of(private.frame_above(0)) is None
    assert private_of("torch").scaler_of(private.frame_above(0)) is None


def test_what_torch_lacks_for_compilers_and_profilers_is_left_out():
    """Functions stay as they are, and the profiler shows nothing."""
    pytest.importorskip("torch")
    whole = private_of("torch")
    private = without(whole, "set_code_exec_strategy", "_disable_profiler", "_world", "_get_backend", "_shared_state")

    def function() -> None: ...

    private.skip_in_compiler(function, [function.__code__], callees=True)
    assert vars(function) == {}
    disable = whole._profiler._disable_profiler
    private.before_profiler_stops(print)
    assert whole._profiler._disable_profiler is disable
    assert not private.is_profiling()
    keep = whole._c10d.Reducer._set_forward_pass_work_handle
    without(whole, "_create_work_from_future").keep_whole_works(print)
    assert whole._c10d.Reducer._set_forward_pass_work_handle is keep
    following = whole._Iterator.__next__
    without(whole, "_BaseDataLoaderIter").get_batches_by(print)
    assert whole._Iterator.__next__ is following
    assert not private.is_open_group(object())
    assert private.cpu_backend_of(function) is function
    assert private.accelerate_state() is None
    assert seen_in_hook(without(whole, "_engine_run_backward").is_called_by_autograd) is False


# ---- NumPy ----


def test_without_numpys_field_the_address_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    """It is the same, and the array is not kept."""
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="another"))
    assert set(missing(numpy_private.PARTS)) == {"address_field", "layout_of"}
    array = np.zeros(1000)
    field = numpy_private.address_field(array)
    assert field.value == array.ctypes.data
    del array
    assert field.value is None


# ---- Keras, TensorFlow, JAX ----


@pytest.mark.parametrize(
    ("hidden", "named"),
    [
        ("_learning_rate", {"learning_rate_of"}),
        ("_iterations", {"passes_made"}),
        ("_trainable_variables", {"trained_variables"}),
        ("_accumulated_gradients", {"accumulated"}),
        ("_get_variable_index", {"accumulated"}),
    ],
)
def test_the_table_of_keras_names_what_is_hidden(keras: Any, hidden: str, named: set[str]):
    """Of optimizers; so does that of models."""
    optimizers = private_of_optimizers()
    assert set(missing(without(optimizers, hidden).parts_of_optimizers(keras))) == named
    private = private_of("keras")
    assert set(missing(without(private, "_flatten_layers").PARTS)) == {"layers_of"}
    assert set(missing(without(private, "momentums").PARTS)) == {"velocities_of"}


def test_optimizers_of_keras_are_known_by_less(keras: Any):
    """Counters by their names, accumulated gradients by their places; without those, the error is clear."""
    optimizers = private_of_optimizers()
    variables = [keras.Variable([1.0]), keras.Variable([2.0, 3.0])]
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer.build(variables)
    private = without(optimizers, "_learning_rate", "_iterations", "_get_variable_index")
    assert private.learning_rate_of(optimizer) is None
    assert private.passes_made(optimizer) is optimizers.passes_made(optimizer)
    found = private.accumulated(optimizer, variables[::-1])
    assert list(map(id, found)) == list(map(id, optimizers.accumulated(optimizer, variables[::-1])))
    for act, part in (
        (lambda private: private.accumulated(optimizer, variables), "_accumulated_gradients"),
        (lambda private: private.trained_variables(optimizer), "_trainable_variables"),
        (lambda private: private.passes_made(SimpleNamespace(variables=[])), "_iterations"),
    ):
        with pytest.raises(ConfigError, match=f"Keras {keras.__version__} has no Optimizer.{part}"):
            act(without(optimizers, part))


def test_layers_of_keras_are_looked_for_in_layers(keras: Any):
    """The public list has the outermost ones."""
    private = private_of("keras")
    inner = keras.Sequential([keras.layers.Identity()])
    model = keras.Sequential([inner, keras.layers.Identity()])
    names = {id(each) for each in private.layers_of(model)}
    assert {id(each) for each in without(private, "_flatten_layers").layers_of(model)} == names
    assert without(private, "momentums", "_momentums").velocities_of(keras.optimizers.SGD(0.5, momentum=0.5)) == ()


def test_optimizers_of_keras_have_what_is_expected(keras: Any):
    """A schedule, a counter, the variables and their sums are those that the optimizer works with."""
    private = private_of_optimizers()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    assert private.learning_rate_of(keras.optimizers.SGD(schedule)) is schedule
    variable = keras.Variable([1.0])
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer.build([variable])
    made = {id(each) for each in optimizer.variables}
    (kept,) = private.accumulated(optimizer, [variable])
    assert {id(kept), id(private.passes_made(optimizer))} <= made
    assert (kept.shape, private.passes_made(optimizer).shape) == (variable.shape, ())
    assert [id(each) for each in private.trained_variables(optimizer)] == [id(variable)]


def test_it_is_seen_who_sets_how_losses_are_scaled(keras: Any):
    """The optimizer that is put around another one."""
    private = private_of_optimizers()
    setting: list[Any] = []

    class Noticing(keras.optimizers.SGD):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "loss_scale_factor":
                setting.append(private.setting_object())
            super().__setattr__(name, value)

    inner = Noticing(0.5)
    scaling = keras.optimizers.LossScaleOptimizer(inner)
    assert setting[-1] is scaling
    assert scaling.inner_optimizer is inner


def test_errors_of_tensorflow_come_back_from_graphs(tf: Any):
    """An error of ours that fails a graph is raised, and its own errors have all their attributes."""
    importlib.import_module("ringreduce.tensorflow")  # sets what makes errors
    ours = ConfigError("this is a test")

    def fail(_: object) -> None:
        raise RuntimeError(described(ours))

    graph = tf.function(lambda: tf.numpy_function(fail, [tf.constant(0)], tf.int32), autograph=False)
    with pytest.raises(ConfigError) as caught:
        graph()
    assert caught.value is ours
    error = Exception.__new__(tf.errors.InvalidArgumentError)
    error.__dict__.update(private_of("tensorflow").error_fields("a text", 3))
    fields = error.message, error.error_code, error.op, error.node_def, error.experimental_payloads
    assert (*fields, str(error)) == ("a text", 3, None, None, {}, "a text")


def test_graphs_and_variables_of_tensorflow_are_known(tf: Any):
    """Variables of one name have an order; a graph that is made outside of branches and XLA is in none."""
    private = private_of("tensorflow")
    first, second = (tf.Variable(0.0, name="same") for _ in range(2))
    assert private.creation_number(first) < private.creation_number(second)
    with tf.Graph().as_default() as graph:
        assert private.control_flow_of(graph) is None
        assert not private.is_for_xla(graph)


def test_tapes_of_tensorflow_can_be_stopped_and_copied(tf: Any):
    """A stopped one records nothing, and the end of a copy does not end the recording."""
    private = private_of("tensorflow")
    tensor = tf.constant([1.0])
    assert private.possible_gradients([tensor]) == 0
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        assert private.possible_gradients([tensor]) > 0
        private.end_recording(tape)
        assert private.possible_gradients([tensor]) == 0
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        result = tensor * 2.0
        made = private.copy_of_tape(tape)
    assert float(made.gradient(result, tensor)[0]) == 2.0


def test_programs_and_traces_of_jax_are_seen(jax: Any):
    """Two places of one trace are equal, one outside is not, and each lowered program is shown."""
    private = private_of("jax")
    seen: list[Any] = []

    def program() -> tuple[()]:
        seen.extend(private.trace_state(convention="ringreduce") for _ in range(2))
        return ()

    jax.make_jaxpr(program)()
    assert seen[0] == seen[1] != private.trace_state(convention="ringreduce")
    programs: list[Any] = []
    private.before_compiling(programs.append)
    try:
        jax.jit(lambda: ()).lower()
    finally:
        private._changes.pop()
    assert programs


def test_transformations_of_optax_that_leave_out_steps_are_seen(jax: Any):
    """Not `MultiSteps` alone; the step that it leaves out is traced, too, for its shapes."""
    optax: Any = pytest.importorskip("optax")
    private = private_of("jax")
    seen: list[str | None] = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        seen.append(private.around_that_skips())
        return updates, state

    inner = optax.GradientTransformation(lambda params: (), update)
    skipping = optax.MultiSteps(inner, 1, should_skip_update_fn=optax.skip_not_finite)
    for each in (inner, optax.apply_if_finite(inner, 1), optax.MultiSteps(inner, 1), skipping):
        jax.eval_shape(lambda updates, each=each: each.update(updates, each.init(updates)), 1.0)
    assert list(map(bool, seen[:2])) == [False, True]
    assert not any(seen[2:4])
    assert any(seen[4:])


def test_the_table_of_tensorflow_names_what_is_hidden(tf: Any):
    """And all else goes on, or says what it lacks."""
    private = private_of("tensorflow")
    for hidden, named in (
        ("_unique_id", "creation_number"),
        ("TFE_Py_TapeSetPossibleGradientTypes", "possible_gradients"),
        ("GraphOrParentsInXlaContext", "is_for_xla"),
        ("_get_control_flow_context", "control_flow_of"),
        ("_pop_tape", "end_recording"),
    ):
        assert named in missing(without(private, hidden).PARTS)
    less = without(
        *(private, "_unique_id", "TFE_Py_TapeSetPossibleGradientTypes", "GraphOrParentsInXlaContext"),
        *("_get_control_flow_context", "_pop_tape"),
    )
    assert less.creation_number(tf.Variable(1.0)) == 0
    assert less.possible_gradients([tf.constant(1.0)]) == 1
    assert less.is_for_xla(tf.Graph()) is False
    with pytest.raises(ConfigError, match=f"TensorFlow {tf.__version__} has no Graph._get_control_flow_context"):
        less.control_flow_of(tf.Graph())
    with tf.GradientTape() as tape:
        less.end_recording(tape)


def test_the_table_of_jax_names_what_is_hidden(jax: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another interface of XLA, and traces that cannot be told apart."""
    private = private_of("jax")
    less = without(private, "get_opaque_trace_state")
    assert set(missing(less.PARTS)) == {"trace_state"}
    with pytest.raises(ConfigError, match=f"JAX {jax.__version__} has no jax.extend.core.get_opaque_trace_state"):
        less.trace_state(convention="ringreduce")
    optax: Any = pytest.importorskip("optax")
    with monkeypatch.context() as patch:
        patch.delattr(optax, "apply_if_finite")
        assert set(missing(without(private).PARTS)) == {"around_that_skips"}
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    for text, major in (("#define XLA_FFI_API_MAJOR 1\n", 1), ("", -1)):
        header.write_text(text)
        assert private.foreign_interface() == major
        assert set(missing(private.PARTS)) == {"foreign_interface"}


# ---- doctor ----


def test_doctor_asks_another_process_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    """In one line, with what is lost in the next one."""
    hide = "import numpy, sys; sys.implementation.name = 'another'; "
    monkeypatch.setattr(bindings, "_SOURCE", hide + bindings._SOURCE)
    found = ask({"numpy": "2.9", "mpi4py": "4"})
    assert list(found) == ["numpy"]
    (line,) = examine([Facts(packages={"numpy": "2.9"}, bindings=found)])["Bindings"]
    assert line.value == "numpy 2.9: 0 of 2 private parts as expected, not address_field, layout_of"
    assert line.remedy.startswith(
        "Without address_field small calls with NumPy's arrays take a fifth longer; without layout"
    )


@pytest.mark.parametrize(
    ("source", "limit_s", "problem"),
    [
        ("import {} as x; raise ImportError('a broken one')", 60.0, "ImportError: a broken one"),
        ("import {} as x, os; os._exit(3)", 60.0, "its import ended with exit status 3"),
        ("import {} as x; print('nothing')", 60.0, "its import ends with 'nothing\\n'"),
        # It waits for a signal that never comes, so that the limit ends it, however long its start takes.
        ("import {} as x, signal; signal.pause()", 0.5, "its import takes longer than 0.5 s"),
    ],
)
def test_a_binding_that_cannot_be_asked_is_a_finding(
    source: str, limit_s: float, problem: str, monkeypatch: pytest.MonkeyPatch
):
    """And not the end of the command, whatever its process does."""
    monkeypatch.setattr(bindings, "_SOURCE", source)
    monkeypatch.setattr(bindings, "_LIMIT_S", limit_s)
    assert ask({"numpy": "2.9"}) == {"numpy": Binding(problem=problem)}
