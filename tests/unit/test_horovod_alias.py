"""Horovod's module names: each is a module of ours, in scripts that run as python itself would run them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ringreduce import runtime
from ringreduce.common.errors import PeerLostError

TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not TORCH, reason="torch is not installed")

#: What a script can see of how it was started.
REPORT = """
import json, sys
try:
    from beside import WORD  # a module next to the script
except ImportError:
    WORD = None
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__, "word": WORD,
    "spec": getattr(__spec__, "name", None), "main": sys.modules["__main__"].__dict__ is globals(),
    "package": __package__, "doc": __doc__,
}))
"""


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run python in ``cwd``."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=50)


#: For programs: what a call raises.
CAUGHT = """
def caught(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
"""


def aliased(source: str) -> None:
    """Run a program that begins with ``import ringreduce.horovod``."""
    done = python("-c", f"import ringreduce.horovod\n{CAUGHT}{textwrap.dedent(source)}")
    assert done.returncode == 0, done.stderr


# ---- modules ----


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Horovod's names in this process, whose conventions stay as they are, and no world before and after."""
    monkeypatch.setattr(runtime._process, "conventions", runtime._process.conventions)
    importlib.import_module("ringreduce.horovod")
    yield
    runtime.shutdown()


def horovods(module: str) -> Any:
    return importlib.import_module(f"horovod.{module}")


@needs_torch
def test_every_module_of_the_binding_has_horovods_name(alone: None) -> None:
    """`horovod.torch` and all below it are our modules themselves, with one identity and one spec."""
    torch = importlib.import_module("ringreduce.torch")
    modules = ["ringreduce.torch", *(each.name for each in pkgutil.walk_packages(torch.__path__, "ringreduce.torch."))]
    below = [name.removeprefix("ringreduce.") for name in modules if "lightning" not in name]  # whose import takes long
    assert {"torch.mpi_ops", "torch.optimizer", "torch.compression", "torch.functions"} <= set(below)
    below.remove("torch.mpi_ops")  # which is the binding itself
    assert horovods("torch.mpi_ops") is importlib.import_module("ringreduce.torch.mpi_ops") is torch
    for name in below:
        ours = importlib.import_module(f"ringreduce.{name}")
        assert horovods(name) is ours, name
        assert ours.__spec__.name == ours.__name__ == f"ringreduce.{name}"


@needs_torch
def test_a_plain_import_knows_its_binding() -> None:
    """Libraries ask a plain ``import horovod`` for it; torch is imported when they do, and not before.

    All forms of import find the same module, in whatever order; so does what goes by module names afterwards.
    """
    aliased("""
        import importlib, pickle, sys, horovod
        assert "torch" not in sys.modules
        assert not hasattr(horovod, "mxnet") and not hasattr(horovod, "no_such_thing")
        assert "torch" not in sys.modules
        assert hasattr(horovod, "torch") and horovod.torch is sys.modules["ringreduce.torch"]
        assert horovod.common.util.split_list
        from horovod.torch.optimizer import DistributedOptimizer
        import horovod.torch as hvd
        from horovod import torch
        import horovod.torch.mpi_ops
        import ringreduce.torch
        assert hvd is torch is horovod.torch is ringreduce.torch
        assert DistributedOptimizer is hvd.DistributedOptimizer is ringreduce.torch.DistributedOptimizer
        assert horovod.torch.mpi_ops is hvd.mpi_ops
        assert b"horovod.torch" not in pickle.dumps(hvd.Compression.fp16)
        assert pickle.loads(pickle.dumps(hvd.Compression.fp16)) is hvd.Compression.fp16
        assert importlib.reload(hvd.compression) is hvd.compression
    """)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_tensorflow_and_keras_have_horovods_names() -> None:
    """All that programs import from them is ours; numbers are Horovod's."""
    aliased("""
        import sys, horovod
        assert "tensorflow" not in sys.modules
        import horovod.tensorflow as hvd, ringreduce.tensorflow, ringreduce.runtime
        assert hvd is ringreduce.tensorflow is horovod.tensorflow
        from horovod.tensorflow.mpi_ops import _basics, _executing_eagerly, rank_op
        from horovod.tensorflow.functions import broadcast_variables
        from horovod.tensorflow.compression import Compression
        from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
        from horovod.tensorflow.util import _executing_eagerly
        from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
        from horovod.tensorflow.elastic import TensorFlowState, run
        from ringreduce.horovod import alias
        for name in ("horovod.keras.callbacks", "horovod.tensorflow.keras.callbacks"):
            assert alias._counterpart(name) == "ringreduce.keras.callbacks"
        hvd.init()
        assert hvd.check_extension and (_basics.size(), hvd.mpi_built(), hvd.gloo_built()) == (1, True, False)
        from horovod.common.util import gpu_available
        assert gpu_available("tensorflow") == hvd.cuda_built()
        assert ringreduce.runtime.config().conventions.value == "horovod"
    """)


def test_without_torch_there_is_no_binding() -> None:
    """Only ``horovod.torch`` costs the import of torch: who asks hears no; who imports hears what is missing."""
    aliased("""
        import importlib.util, sys
        import horovod, horovod.runner, horovod.common
        import horovod.common.basics, horovod.common.exceptions, horovod.common.process_sets, horovod.common.util
        assert importlib.util.find_spec("horovod.torch") is not None
        assert "torch" not in sys.modules and "mpi4py" not in sys.modules
        sys.modules["torch"] = None
        assert not hasattr(horovod, "torch")
        error = caught(lambda: exec("from horovod import torch"))
        assert isinstance(error, ImportError) and "torch" in str(error), error
        error = caught(importlib.import_module, "horovod.torch")
        assert isinstance(error, ModuleNotFoundError) and error.name == "torch", error
    """)


def test_version_and_launcher(alone: None) -> None:
    """The version is that of the release whose interface this is; ``run`` is where it was."""
    horovod = importlib.import_module("horovod")
    assert horovod.__version__ == "0.28.1"
    assert horovod.run is horovods("runner").run


def test_what_scripts_take_from_the_runner(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank and the size before `init`, as mpirun says them, and threads whose errors are shown or dropped."""
    env, threads = horovods("runner.common.util.env"), horovods("runner.util.threads")
    assert env.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert env.get_env_rank_and_size() == (2, 3)
    made: list[int] = []
    threads.in_thread(made.append, (4,)).join()
    threads.in_thread([].pop, silent=True).join()  # an error would fail this test, as one of a thread
    assert made == [4]


def test_exceptions_are_those_that_are_raised(alone: None) -> None:
    """Scripts that catch HorovodInternalError catch our errors."""
    errors = horovods("common.exceptions")
    assert issubclass(PeerLostError, errors.HorovodInternalError)
    assert issubclass(errors.HorovodInternalError, RuntimeError)
    assert not issubclass(errors.HostsUpdatedInterrupt, errors.HorovodInternalError)
    assert [errors.HostsUpdatedInterrupt(**each).skip_sync for each in ({"skip_sync": True}, {})] == [True, False]


@needs_torch
def test_common_modules(alone: None) -> None:
    """Process sets, HorovodBasics and the helpers are there, and say what the binding says."""
    hvd, process_sets, util = horovods("torch"), horovods("common.process_sets"), horovods("common.util")
    assert process_sets.ProcessSet is hvd.ProcessSet
    assert process_sets.global_process_set is hvd.global_process_set
    basics = horovods("common.basics").HorovodBasics(__file__, "mpi_lib_v2")
    basics.init()
    assert (basics.rank(), basics.size(), basics.is_initialized()) == (0, 1, True)
    assert (hvd.mpi_ops._basics.rank(), hvd.mpi_ops._basics.is_homogeneous()) == (0, True)
    for name in ("mpi", "gloo", "nccl", "ddl", "ccl", "cuda", "rocm"):
        assert getattr(util, f"{name}_built")() == bool(getattr(hvd, f"{name}_built")())
    assert util.extension_available("torch")
    assert not util.extension_available("mxnet", verbose=True)
    assert util.gpu_available("torch") == (hvd.cuda_built() or hvd.rocm_built())
    assert [n for n in range(-1, 9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.split_list(list("abcde"), 3) == [["a", "b"], ["c", "d"], ["e"]]
    assert [util.is_iterable(each) for each in ([], 1)] == [True, False]
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", "somewhere", "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod\.mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", "somewhere")
    assert util.check_installed_version("pytorch", "2.0.0") is None


def test_a_loader_reads_ahead(alone: None) -> None:
    """As many batches as it may, not one after the program stops; its errors come where they belong."""
    data, threads = horovods("data"), set(threading.enumerate())

    class Plain(data.BaseDataLoader):  # type: ignore[misc,name-defined]
        def __init__(self, count: int, fails: bool = False) -> None:
            self.count, self.fails, self.read, self.threads = count, fails, [], set()

        def __len__(self) -> int:
            return self.count

        def _iterate(self) -> Iterator[int]:
            for batch in range(self.count):
                self.threads.add(threading.current_thread())
                self.read.append(batch)
                yield batch
            if self.fails:
                raise KeyError("the reason")

        def _process_batch(self, batch: int) -> int:
            return batch * 10

    class Loader(data.AsyncDataLoaderMixin, Plain):  # type: ignore[misc,name-defined]
        pass

    assert list(Plain(3)) == [0, 10, 20]
    for ahead in (0, 1, 2, 50):
        loader = Loader(ahead, 20)
        for _ in range(2):
            assert list(loader) == [10 * batch for batch in range(20)], ahead
        assert (threading.main_thread() in loader.threads) == (ahead == 0)
        loader.read.clear()
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [0, 10, 20]
        loader.close_async_loader() if ahead else batches.close()
        assert list(batches) == []
        assert 3 <= len(loader.read) <= min(3 + ahead + 1, 20), (ahead, loader.read)
        batches = iter(Loader(ahead, 2, fails=True))
        assert [next(batches), next(batches)] == [0, 10]
        with pytest.raises(KeyError):
            next(batches)
    assert set(threading.enumerate()) <= threads  # some of other tests may have ended meanwhile


@needs_torch
def test_what_programs_find_of_elastic_training_and_of_versions(alone: None) -> None:
    """The manager of notifications reaches states; the error of versions is an ImportError with the numbers."""
    hvd, elastic, util = horovods("torch"), horovods("common.elastic"), horovods("common.util")
    errors, manager = horovods("common.exceptions"), elastic.notification_manager
    hvd.init()
    manager.init()
    state = elastic.ObjectState(lambda value: value, lambda: 0, step=0)
    manager.register_listener(state)
    manager.handle_hosts_updated(1.0, 2)
    with pytest.raises(errors.HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert not interrupt.value.skip_sync
    manager.remove_listener(state)
    manager.handle_hosts_updated(2.0, 2)
    state.commit()
    error = errors.HorovodVersionMismatchError("torch", "2.1", "2.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "2.1", "2.0")
    assert "torch 2.1" in str(error)
    choose = util.get_average_backwards_compatibility_fun(hvd)
    chosen = [choose(hvd.Max, None), choose(None, False), choose(None, True), choose(None, None)]
    assert chosen == [hvd.Max, hvd.Sum, hvd.Average, hvd.Average]
    assert util.get_extension_full_path("/a/b.py", "c", "lib") == "/a/c/lib" + util.get_ext_suffix()
    handle = hvd.allreduce_async(importlib.import_module("torch").ones(2))
    hvd.mpi_ops._handle_map[handle] = "mine"
    assert len(hvd.mpi_ops._handle_map) == 1
    hvd.synchronize(handle)
    del handle
    assert not hvd.mpi_ops._handle_map


def test_versions_are_compared_as_numbers(alone: None) -> None:
    """By their release numbers, one by one; what is no version is a ValueError that quotes it."""
    compare = horovods("common.util").is_version_greater_equal_than
    enough = [("2.1.0", "2.1.0"), ("2.1", "2.1.0"), ("2.10.1+cpu", "2.9.2"), ("10", "9.9.9")]
    too_old = [("1.13.1", "2.0.0"), ("2.0.9", "2.1.0")]
    assert [compare(*each) for each in enough + too_old] == [True] * 4 + [False] * 2
    with pytest.raises(ValueError, match="'two'"):
        compare("two", "2.0.0")


def test_variables_for_a_while(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are set within the block, whatever ends it, and are what they were afterwards; None changes nothing."""
    for name, value in (("KEPT", "kept"), ("CHANGED", "before")):
        monkeypatch.setenv(name, value)
    with suppress(KeyError), horovods("common.util").env(CHANGED="within", NEW="new", KEPT=None):
        assert [os.environ[name] for name in ("KEPT", "CHANGED", "NEW")] == ["kept", "within", "new"]
        raise KeyError
    assert [os.environ.get(name) for name in ("KEPT", "CHANGED", "NEW")] == ["kept", "before", None]


@pytest.mark.parametrize("name", ["mxnet", "mxnet.mpi_ops", "no.such.thing"])
def test_what_is_not_there_says_so(alone: None, name: str) -> None:
    """Bindings that there are not are a ModuleNotFoundError with a sentence; scripts that try them go on."""
    missing = f"horovod.{name.partition('.')[0]}"
    with pytest.raises(ModuleNotFoundError, match=rf"^no {missing} here.*horovod\.torch") as error:
        horovods(name)
    assert error.value.name == missing


def test_an_installed_horovod_is_hidden(tmp_path: Path) -> None:
    """Ours is imported in its place, and one log line says so."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise SystemExit('the real one')")
    done = python("-c", "import ringreduce.horovod, horovod; print(horovod.__version__)", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "0.28.1\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert "hidden" in line
    assert str(tmp_path / "horovod") in line


def test_a_horovod_that_runs_already_is_not_mixed_with_ours(tmp_path: Path) -> None:
    """Half of one and half of the other would be worse than an error."""
    (tmp_path / "horovod.py").write_text("")
    done = python("-c", "import horovod, ringreduce.horovod", cwd=tmp_path)
    assert done.returncode == 1
    assert "ImportError: horovod itself is imported already" in done.stderr


def test_without_horovod_nothing_is_said() -> None:
    """Nobody is told what he knows; importing it twice changes nothing."""
    done = python(
        "-c", "import ringreduce.horovod as h, sys; n = len(sys.meta_path); h.install(); print(n - len(sys.meta_path))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# ---- scripts ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script, a module beside it, a package, and a link to the script elsewhere."""
    for place in (tmp_path / "scripts", tmp_path / "scripts" / "package"):
        place.mkdir()
        (place / "beside.py").write_text(f"WORD = {place.name!r}")
        (place / "report.py").write_text(REPORT)
        (place / "__main__.py").write_text(REPORT)
    (tmp_path / "scripts" / "package" / "__init__.py").write_text("")
    (tmp_path / "link.py").symlink_to(tmp_path / "scripts" / "report.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", REPORT)
        archive.writestr("beside.py", "WORD = 'zipped'")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "cwd", "command"),
    [
        ([], ".", ["scripts/report.py", "a", "-b", "--help", "-m"]),
        ([], "scripts/package", ["../report.py"]),
        ([], ".", ["link.py", "x"]),
        ([], "scripts", ["-m", "report", "x", "-m", "y"]),
        ([], "scripts", ["-m", "package"]),
        ([], "scripts", ["-m", "package.report", "-h"]),
        (["-P"], "scripts", ["report.py", "-h"]),
        (["-P"], "scripts", ["-m", "package.report"]),
    ],
    ids=str,
)
def test_a_script_sees_what_it_sees_under_python(
    folder: Path, options: list[str], cwd: str, command: list[str]
) -> None:
    """Arguments, path, names and modules next to it are those of ``python script.py`` and ``python -m module``."""
    if options and sys.version_info < (3, 11):
        pytest.skip("this python has no safe path")
    plain = python(*options, *command, cwd=folder / cwd)
    ours = python(*options, "-m", "ringreduce.horovod", *command, cwd=folder / cwd)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout), ours.stderr
    if not options:
        assert json.loads(ours.stdout)["word"]


@pytest.mark.parametrize("name", ["scripts", "archive.zip"])
def test_a_folder_or_a_zip_file_is_a_script_too(folder: Path, name: str) -> None:
    """What has a ``__main__.py`` runs as under python, though its name is made absolute."""
    plain, ours = python(name, "-h", cwd=folder), python("-m", "ringreduce.horovod", name, "-h", cwd=folder)
    assert ours.returncode == 0, ours.stderr
    expected = json.loads(plain.stdout)
    assert expected["word"] in ("scripts", "zipped")
    file = str(folder / expected["file"])  # python leaves it relative in a zip file
    assert json.loads(ours.stdout) == expected | {"argv": [str(folder / name), "-h"], "file": file}


def test_a_script_ends_as_it_does_under_python(tmp_path: Path) -> None:
    """Its exit status is passed on; exit handlers still have their module; a traceback ends with its own line."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys\n"
        "def last(): print(sys.modules['__main__'].last is last)\n"
        "atexit.register(last)\n"
        "sys.exit(3)\n"
    )
    done = python("-m", "ringreduce.horovod", str(script))
    assert (done.returncode, done.stdout, done.stderr) == (3, "True\n", "")
    script.write_text("def f():\n    raise KeyError('the reason')\nf()\n")
    done = python("-m", "ringreduce.horovod", str(script))
    assert done.returncode == 1
    assert f'File "{script}", line 2, in f' in done.stderr
    assert done.stderr.endswith("KeyError: 'the reason'\n")


def test_a_missing_script_is_said_as_python_says_it(tmp_path: Path) -> None:
    """One line and status 2, no traceback."""
    plain, ours = python("none.py", cwd=tmp_path), python("-m", "ringreduce.horovod", "none.py", cwd=tmp_path)
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)


@pytest.mark.parametrize(
    ("arguments", "status"), [([], 2), (["-m"], 2), (["-c", "pass"], 2), (["--verbose", "x.py"], 2), (["--help"], 0)]
)
def test_wrong_use_shows_the_usage(arguments: list[str], status: int) -> None:
    """The usage goes to standard error with status 2; who asks for it gets it on standard output."""
    done = python("-m", "ringreduce.horovod", *arguments)
    assert done.returncode == status
    assert (done.stderr if status else done.stdout).startswith("usage: python -m ringreduce.horovod script.py")


@needs_torch
@pytest.mark.slow
def test_workers_of_a_data_loader_have_the_names_too(tmp_path: Path) -> None:
    """However they are started: Horovod's own examples do it by forkserver, and they import the script."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import horovod.torch as hvd
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                import horovod.torch
                return index * index, horovod.torch.__name__
        if __name__ == "__main__":
            hvd.init()
            for method in ("forkserver", "fork"):
                for value, name in DataLoader(Squares(), num_workers=1, multiprocessing_context=method):
                    print(value.item(), *name)
        """)
    )
    done = python("-m", "ringreduce.horovod", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{n * n} ringreduce.torch" for n in range(4)] * 2


# ---- conventions ----


def conventions(source: str) -> str:
    """Return whose numbers come out in a program with a world, which it starts with ``init()``."""
    asked = "\nfrom ringreduce import config, init\ninit()\nprint(config().conventions.value)"
    done = python("-c", source + asked)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.strip()


def test_numbers_are_horovods_by_its_name_alone() -> None:
    """A program that imports only ringreduce gets those of the chain rule."""
    assert conventions("import ringreduce, ringreduce.common.config") == "chain_rule"
    assert conventions("import ringreduce.horovod") == "horovod"
    assert conventions("import ringreduce.horovod, horovod.common.exceptions") == "horovod"


def test_a_world_keeps_the_conventions_it_began_with() -> None:
    """Horovod's names that come later change neither it nor those after it, and a log line says so."""
    source = """
import ringreduce as rr
rr.init()
import ringreduce.horovod
print(rr.config().conventions.value)
rr.shutdown()
rr.init()
print(rr.config().conventions.value)
"""
    done = python("-c", source)
    assert (done.returncode, done.stdout) == (0, "chain_rule\nchain_rule\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert "before init()" in line
