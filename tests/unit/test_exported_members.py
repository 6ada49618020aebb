"""Public names: complete where a module lists those of others, and what programs, scripts and documents use stays."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import ringreduce
from ringreduce import cli, runtime

PACKAGE = Path(__file__).parents[2] / "ringreduce"

SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}

LISTING = [path for path, source in SOURCES.items() if "\n__all__ = " in source]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the public names that a module defines at its top level, not those that it imports."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            # Constants; type variables and short names for types are nobody else's business.
            names = [
                target.id
                for target in targets
                if isinstance(target, ast.Name) and target.id.isupper() and len(target.id) > 1
            ]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def rank_of(name: str) -> tuple[int, str]:
    """Order names as ruff does: CONSTANTS, Classes, functions; alphabetical within each."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("path", LISTING, ids=name_of)
def test_all_is_sorted_complete_and_true(path: Path, monkeypatch: pytest.MonkeyPatch):
    """`__all__` has each public name that the module defines, in order, and only names that exist."""
    source = SOURCES[path]
    for library in ("jax", "keras", "mpi4py", "tensorflow", "torch"):
        if f"import {library}" in source or f"ringreduce.{library}" in name_of(path):
            pytest.importorskip(library)
    # Importing Horovod's names chooses its conventions, which the worlds of later tests shall not have.
    monkeypatch.setattr(runtime._process, "conventions", runtime._process.conventions)
    module = importlib.import_module(name_of(path))
    assert sorted(set(module.__all__), key=rank_of) == list(module.__all__)
    assert set(defined_names(ast.parse(source))) <= set(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_all_lists_names_of_others():
    """A list of what a module defines itself says nothing that its names do not say."""
    needless = []
    for path in LISTING:
        imported = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(SOURCES[path]))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        listed = next(
            ast.literal_eval(node.value)
            for node in ast.parse(SOURCES[path]).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
        needless += [] if imported & {*listed} else [name_of(path)]
    assert needless == []


def test_dir_shows_what_is_public():
    """`dir(ringreduce)` is `__all__`, so that completion offers no internals; all names of it are there."""
    assert dir(ringreduce) == sorted(ringreduce.__all__)
    assert all(hasattr(ringreduce, name) for name in dir(ringreduce))


#: By module as programs import it: what they find there. Names may be added.
NAMES = {
    "ringreduce": """
        AVERAGE BAND BOR BXOR ChangedMessageError Choice CollectiveError CollectiveTimeoutError Communicator
        Config ConfigError Conventions Feedback ForeignFileError Instrument LAND LOR LXOR MAX MIN Metrics
        MismatchError NotFiniteError PROC_NULL PRODUCT PeerLostError PendingMessage ProcessSet Recovery ReduceOp
        ReproducibleAccumulator RingReduceError SUM ShutdownError Topology TransportError
        UnsupportedBufferError add_process_set allgather allgather_object allreduce alltoall audit audited
        barrier broadcast broadcast_object config count cross_rank cross_size dump empty explain exscan
        fingerprint gather global_process_set go_on hosts_changed init irecv is_homogeneous is_initialized
        isend local_rank local_size maxloc metrics minloc rank record recoveries recv reduce reduce_scatter
        remove_process_set reproducible_allreduce scan scatter send sendrecv set_conventions shutdown since
        size start_timeline stop_timeline weighted_average world
    """,
    "ringreduce.torch": """
        Adasum Average Compression DistributedOptimizer DistributedSampler Handle HorovodInternalError Max Min
        ProcessSet Product ReproducibleSum Shard Sum SyncBatchNorm add_process_set allgather allgather_async
        allgather_object allreduce allreduce_ allreduce_async allreduce_async_ alltoall alltoall_async barrier
        broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object broadcast_optimizer_state
        broadcast_parameters ccl_built checkpoint compression cross_rank cross_size cuda_built data ddl_built
        elastic functions global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async
        grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_
        grouped_reducescatter grouped_reducescatter_async init is_homogeneous is_initialized join
        load_checkpoint local_rank local_size metrics mpi_built mpi_enabled mpi_ops mpi_threads_supported
        nccl_built optimizer poll rank reducescatter reducescatter_async remove_process_set rocm_built
        save_checkpoint set_conventions shutdown size sparse_allreduce_async start_timeline stop_timeline
        sync_batch_norm synchronize weighted_average
    """,
    "ringreduce.elastic": "CommitStore Generators HostsUpdatedInterrupt NumpyState ObjectState State run run_fn",
    "ringreduce.torch.elastic": """
        ElasticSampler Generators HostsUpdatedInterrupt ObjectState State TorchState run run_fn seed
    """,
    "ringreduce.testing": "caught run_engines run_process_sets run_ranks run_threads",
    "ringreduce.torch.distributed.ddp": "AllreduceState adopt allreduce_hook",
    "ringreduce.torch.lightning": "RingreduceEnvironment RingreduceStrategy",
    "ringreduce.torch.lightning.pytorch_lightning": "RingreduceEnvironment RingreduceStrategy",
    "ringreduce.algorithms": "ALGORITHMS Algorithm Collective Cost Schedule Step Transfer find names schedule_for",
    "ringreduce.algorithms.verify": "Kind Move Outcome ScheduleError run verify",
    "ringreduce.common.topology": "Topology",
    "ringreduce.common.errors": """
        ChangedMessageError CollectiveError CollectiveTimeoutError ConfigError ForeignFileError MismatchError
        NotFiniteError PeerLostError RingReduceError ShutdownError TransportError UnsupportedBufferError
        name_ranks since
    """,
    "ringreduce.torch.sync_batch_norm": "SyncBatchNorm convert_sync_batchnorm",
    "ringreduce.horovod": "run",
    "horovod": "run",
    "horovod.runner": "run",
    "horovod.runner.common.util.env": "get_env_rank_and_size",
    "horovod.runner.util.threads": "in_thread",
    "horovod.common.util": """
        EXTENSIONS HorovodVersionMismatchError ccl_built check_extension check_installed_version cuda_built
        ddl_built env extension_available get_average_backwards_compatibility_fun get_ext_suffix
        get_extension_full_path get_version_mismatch_message gloo_built gpu_available is_iterable
        is_version_greater_equal_than mpi_built nccl_built num_rank_is_power_2 rocm_built split_list
    """,
    "horovod.common.exceptions": """
        HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt get_version_mismatch_message
    """,
    "horovod.common.elastic": "ObjectState State WorkerNotificationManager notification_manager run_fn",
    "horovod.data": "AsyncDataLoaderMixin BaseDataLoader",
    "horovod.data.data_loader_base": "AsyncDataLoaderMixin BaseDataLoader",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "horovod.torch.compression": """
        BF16Compressor Compression Compressor FP16Compressor Float8Compressor Int4Compressor Int8Compressor
        NoneCompressor
    """,
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.elastic.state": """
        ModelStateHandler OptimizerStateHandler SamplerStateHandler StateHandler TorchState get_handler_registry
        set_handler_registry
    """,
    "horovod.torch.optimizer": "DistributedOptimizer _DistributedOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.torch.functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "ringreduce.common.conventions": "Conventions",
}

#: What Horovod's module of operations lacks of the names of the binding.
NO_OPERATIONS = """
    DistributedOptimizer DistributedSampler Handle ReproducibleSum Shard SyncBatchNorm allgather_object broadcast_object
    broadcast_optimizer_state broadcast_parameters checkpoint compression data elastic functions load_checkpoint metrics
    mpi_ops optimizer save_checkpoint set_conventions sync_batch_norm weighted_average
"""

NAMES["horovod.torch"] = f"check_extension {NAMES['ringreduce.torch']}"

operations = {*NAMES["ringreduce.torch"].split()} - {*NO_OPERATIONS.split()}

NAMES["horovod.torch.mpi_ops"] = " ".join([*sorted(operations), "_basics", "_handle_map"])

NAMES["horovod.torch.elastic"] = NAMES["ringreduce.torch.elastic"]

#: By command: its options and arguments.
OPTIONS = {
    "audit show": "file",
    "audit verify": "--has file",
    "bench": """
        --agg_iters --algorithm --buffers --check --datatype --device --format --iters --maxbytes --minbytes
        --op --output_file --per_iter_timing --plot --report --results --root --run_cycles --stepbytes
        --stepfactor --vs --warmup_iters -I -J -N -b -c -d -e -f -i -m -n -o -r -w collective
    """,
    "explain": "--datatype --device --json --maxbytes --minbytes --stepfactor -b -d -e -f collective",
    "doctor": "--dump --json",
    "export": "--commit --force --name folder out",
    "reproduce": "--world file",
    "run": """
        --cooldown --dry-run --elastic --host-discovery-script --hostfile --hosts --keep --log-dir --max-np
        --max-restarts --min-np --mpi-args --network-interface --no-prefix --num-proc --prefix --reset-limit
        --ship --ship-path --slots --slots-per-host --ssh-port --start-timeout --verbose -H -n -np -x program
    """,
    "simulate": """
        --algorithm --barrier --bucket --burst --compute --from --gradients --json --late --latency --link --maxbytes
        --memory --message --minbytes --nodes --noise --overlap --period --plot --ranks-per-node --reduction --scaling
        --shard --slow-link --staleness --stepfactor --update --wire --within -b -e -f
    """,
    "submit k8s": "--cores-per-rank --image --name --nodes --ranks-per-node --time --yes program",
    "submit slurm": "--cores-per-rank --name --nodes --ranks-per-node --time --yes program",
    "timeline": "",
    "top": "--every --job --json --once --prometheus",
    "tune": "--budget --directory --even-if-busy",
}

#: Prints what is missing, and what is not the same in two modules of Horovod's; no library is needed that is not here.
PROGRAM = """
import importlib, json, sys
import ringreduce.horovod
once = {}
for module, names in json.load(sys.stdin).items():
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in ("keras", "tensorflow", "torch", "lightning", "pytorch_lightning"):
            print(module, error)
        continue
    print(*(f"{module}.{name}" for name in names.split() if not hasattr(found, name)))
    if module.startswith("horovod.") and module not in ("horovod.common.util", "horovod.runner"):
        things = {name: getattr(found, name) for name in names.split()}
        print(*(name for name, thing in things.items() if once.setdefault(name, thing) is not thing))
"""


def test_public_names_are_where_programs_import_them() -> None:
    """All of them, in all modules that documents and examples have shown, and in those that Horovod's scripts use."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    printed = subprocess.run(command, input=json.dumps(NAMES), check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout.split() == []


def test_commands_have_their_options() -> None:
    """Each command takes the options and arguments that scripts give it."""
    missing = {}
    for name, options in OPTIONS.items():
        command: click.Command | None = cli.main
        for word in name.split():
            assert isinstance(command, click.Group), name
            command = command.get_command(click.Context(command), word)
        assert command is not None, name
        taken = {each for one in command.params for each in (*one.opts, *one.secondary_opts)}
        missing[name] = set(options.split()) - taken
    assert not any(missing.values()), missing


#: What `DiLoCo` of torch takes by name, and what it takes where a user says nothing.
LOCAL = {"period": 100, "outer_lr": 0.7, "outer_momentum": 0.9, "fragments": 1, "delay": 0, "replica": "node"}

LOCAL |= {"quorum": None, "warmup_steps": 0, "average": ("parameters", "buffers"), "shard": None}


def test_options_of_local_training_are_shown() -> None:
    """Also those that all bindings share: by the signature, with their defaults, and by the docstring; no others."""
    hvd = pytest.importorskip("ringreduce.torch")
    named = {
        name: each.default
        for name, each in inspect.signature(hvd.DiLoCo).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    assert named == {**LOCAL, "compression": hvd.Compression.none}
    assert all(f"\n    {name}: " in hvd.DiLoCo.__doc__ for name in named)
    with pytest.raises(TypeError, match=r"DiLoCo.*'perod'"):
        hvd.DiLoCo(None, perod=3)


TAKERS = (
    ("torch", "DistributedOptimizer", "compression"),
    ("tensorflow", "DistributedOptimizer", "name"),
    ("tensorflow", "DistributedGradientTape", "device_dense"),
    ("keras", "DistributedOptimizer", "name"),
    ("jax", "DistributedGradientTransformation", "op"),
)


@pytest.mark.parametrize(("binding", "name", "first"), TAKERS)
def test_options_of_optimizers_are_shown(binding: str, name: str, first: str) -> None:
    """In Horovod's order, by the signature and once by the docstring; a wrong one is named."""
    hvd = pytest.importorskip(f"ringreduce.{binding}")
    taker = getattr(hvd, name)
    parameters = inspect.signature(taker).parameters
    assert not {"places", "options"} & parameters.keys()
    common = [*parameters][[*parameters].index(first) :]
    described = re.findall(r"^    ([\w, ]+): ", inspect.getdoc(taker), re.MULTILINE)
    names = [each for entry in described for each in entry.split(", ")]
    assert [each for each in names if each in common] == common
    assert {each.annotation for each in parameters.values()} >= {"ProcessSet"}
    with pytest.raises(TypeError, match=rf"{name}.*'opp'"):
        taker(None, opp=3)


_IMPORT = re.compile(r"^[ \t]*from (ringreduce(?:\.\w+)*) import (\([^)]*\)|[\w, ]+)$", re.MULTILINE)


def _defined(module: str) -> set[str]:
    """Return the names that the text of a module defines, or that are modules in it."""
    path = Path(ringreduce.__file__).parent.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    names = {each.stem for each in path.glob("*")} if path.is_dir() else set()
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue  # what it defines is its own
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(each.asname or each.name for each in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        nodes += ast.iter_child_nodes(node)
    return names


def test_programs_import_what_there_is() -> None:
    """Also those within texts, and those that no test of one rank starts: nothing else reads them before they run."""
    folder = Path(__file__).parents[2]
    parts = ("benchmarks", "examples", "scripts", "tests")
    paths = [path for part in parts for path in (folder / part).rglob("*") if path.suffix in (".py", "")]
    wrong = []
    for path in filter(Path.is_file, paths):
        for module, imported in _IMPORT.findall(path.read_text()):
            names = {each.split(" as ")[0].strip() for each in imported.strip("()").replace("\n", ",").split(",")}
            wrong += [f"{path.name}: {module}.{name}" for name in names - {""} - _defined(module)]
    assert wrong == []
