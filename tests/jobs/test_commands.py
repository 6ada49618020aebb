"""Every command line that the documents tell a reader to type is run, here or by what is named here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from documents import BLOCK, PAGES, ROOT, blocks, name_of
from launching import run

from ringreduce.cli import main

#: A line, indented or in a block of shell, that is a command.
COMMAND = re.compile(
    r"(?:\./|scripts/|mpirun|python|pip|ringreduce|sudo|horovodrun|srun|sbatch|docker|module|export|cd|\. )[^\n]*"
)
#: Pages and commands that nothing here runs as they stand -> what runs them, or why nothing does.
ELSEWHERE = {
    "docs/clusters.md: ringreduce submit slurm --nodes 4 --yes": "takes Slurm; tests/clusters/test_job_files.py"
    "::test_a_job_that_submit_has_handed_to_slurm, and tests/unit/test_job_files.py"
    "::test_submit_gives_the_file_to_the_scheduler",
    "docs/clusters.md: ringreduce run -H h1:2,h2:2 python -m ringreduce doctor": "takes two hosts; "
    "tests/clusters/test_page.py::test_doctor_looks_at_both",
    "docs/clusters.md: ringreduce run -H h1:2,h2:2 python train.py": "takes two hosts; "
    "tests/clusters/test_page.py::test_two_machines",
    "docs/clusters.md: ringreduce run -H h1:2,h2:2 --ship --ship-path data python": "takes two hosts; "
    "tests/clusters/test_ship.py::test_hosts_get_what_they_do_not_have",
    "docs/clusters.md: ringreduce run -H h1:2,h2:2 --ship --ship-path data --keep": "takes two hosts; "
    "tests/clusters/test_ship.py::test_a_kept_copy_serves_jobs_of_another_host",
    "docs/clusters.md: ringreduce run -np 2 python -m ringreduce doctor": "tests/jobs/test_doctor_job.py, by mpirun",
    "docs/clusters.md: sbatch": "takes Slurm; tests/clusters/test_job_files.py::test_jobs_of_slurm",
    "docs/clusters.md: export PMIX_MCA_psec=native": "tests/clusters/test_slurm.py::test_srun_starts_ranks",
    "docs/clusters.md: srun": "takes Slurm; tests/clusters/test_job_files.py::test_jobs_of_slurm, as slurm.sh",
    "docs/clusters.md: docker build": "takes podman and minutes; "
    "tests/clusters/test_image.py::test_ranks_run_in_the_workers",
    "docs/clusters.md: module load openmpi": "takes a site with modules",
    "docs/clusters.md: pip install": "scripts/install, with more extras",
    "docs/clusters.md: export OMPI_MCA_btl_tcp_if_include": "takes two hosts; "
    "tests/clusters/test_page.py::test_mpirun_with_the_network_that_is_named",
    "docs/clusters.md: export PRTE_MCA_prte_if_include": "as above",
    "docs/clusters.md: mpirun -x PATH --hostfile hosts": "as above",
    "README.md: ./scripts/demo": "scripts/demo, whose example tests/jobs/test_examples.py runs",
    "README.md: ./scripts/test": "scripts/test, which this is a part of",
    "README.md: python3 -m venv venv": "scripts/first_hour",
    "README.md: pip install": "scripts/first_hour",
    "docs/start.md: python3 -m venv venv": "scripts/first_hour",
    "docs/start.md: . venv/bin/activate": "scripts/first_hour",
    "docs/start.md: pip install": "scripts/first_hour",
    "docs/start.md: python examples/digits_alone.py": "scripts/first_hour",
    "docs/start.md: ringreduce run -np 2 python examples/digits_parallel.py": "as above",
    "CONTRIBUTING.md: ./scripts/install": "scripts/test",
    "CONTRIBUTING.md: ./scripts/lint": "scripts/test",
    "CONTRIBUTING.md: ./scripts/test": "scripts/test",
    "CONTRIBUTING.md: ./scripts/docs": "scripts/test",
    "CONTRIBUTING.md: ./scripts/first_hour": "scripts/test",
    "CONTRIBUTING.md: ./scripts/release --rehearse": "scripts/test",
    "CONTRIBUTING.md: ./scripts/demo": "tests/jobs/test_examples.py",
    "CONTRIBUTING.md: ./scripts/claims": "takes a quiet machine for some minutes; tests/unit/test_claims.py",
    "CONTRIBUTING.md: ./scripts/faults": "takes an hour; tests/jobs/test_faults.py runs a part",
    "CONTRIBUTING.md: ./scripts/fuzz": "takes hours; tests/jobs/test_random_trainings.py makes some steps",
    "CONTRIBUTING.md: ./scripts/gpu_check": "takes a GPU; tests/unit/test_gpu_check.py",
    "CONTRIBUTING.md: . .venv/bin/activate && . scripts/_env": "scripts/test",
    "CONTRIBUTING.md: python -m pytest tests/unit -k ring": "scripts/test",
    "CONTRIBUTING.md: . .venv-frameworks/bin/activate": "scripts/test",
    "docs/observe.md: ringreduce top": "ends when it is told to; tests/unit/test_top_command.py",
    "docs/observe.md: ringreduce top --prometheus 9400": "ends when it is told to; tests/unit/test_top_command.py",
    "docs/observe.md: ringreduce run --status 9400 -H": "takes two hosts; tests/clusters/test_ssh.py",
    "docs/observe.md: pip install": "scripts/install, with more extras",
    "docs/engines.md: pip install": "scripts/install, as engines",
    "docs/slow.md: ringreduce compare": "takes two reports; tests/jobs/test_slow_jobs.py",
    "docs/slow.md: ringreduce run -np 2 --report after.json": "the line before it, with another name",
    "docs/observe.md: mpirun -np 2 python -m ringreduce doctor": "tests/jobs/test_doctor_job.py",
    "docs/failures.md: srun": "takes Slurm; tests/clusters/test_slurm.py",
    "docs/tuning.md: mpirun -np 2 python -m ringreduce bench all --report": "tests/jobs/test_bench_job.py",
    "docs/tuning.md: mpirun -np 2 python -m ringreduce bench allreduce": "tests/jobs/test_bench_job.py, with less",
    "docs/simulate.md: mpirun -np 4 python -m ringreduce bench allreduce": "tests/jobs/test_bench_job.py, on 2 ranks",
    "docs/observe.md: python -m ringreduce doctor --dump FOLDER": "tests/jobs/test_flight.py",
    "docs/recipes/checkpoints.md: ringreduce export commits model.pt --commit 300": "tests/unit/test_export_command.py",
    "docs/recipes/debug.md: ringreduce run -np 2 -x RINGREDUCE_TIMEOUT=3600 python attended.py": "waits for an editor; "
    "tests/jobs/test_recipes.py",
    "docs/recipes/jax.md: pip install": "by hand: JAX is in an environment of its own",
    "docs/recipes/keras.md: pip install": "by hand, as above",
    "docs/recipes/tensorflow.md: pip install": "by hand, as above",
    "docs/recipes/numpy.md: pip install": "scripts/first_hour, with more extras",
    "docs/security.md: pip install": "scripts/install, with more extras",
    "docs/tuning.md: mpirun -np 8 python -m ringreduce tune": "takes a minute; tests/jobs/test_tuning_job.py",
    "docs/tuning.md: sudo scripts/cluster": "takes root; tests/jobs/test_links.py",
    "docs/tuning.md: sudo -E env": "takes root; tests/jobs/test_links.py",
    "examples/README.md: pip install": "scripts/test, and scripts/first_hour",
    "examples/README.md: horovodrun": "tests/jobs/test_horovod.py",
    "examples/README.md: python examples/": "tests/jobs/test_examples.py",
    "examples/README.md: ringreduce run": "tests/jobs/ test_examples.py, test_training_loops.py",
    "examples/README.md: python3 -m venv venv-yolo": "by hand: ultralytics is under another licence, and only there",
    "examples/README.md: . venv-yolo/bin/activate": "by hand, as above",
}


def commands() -> Iterator[str]:
    """Yield ``PAGE: COMMAND`` for each command, without what follows a comment sign."""
    for page in PAGES:
        lines = [line for _, text in blocks(page, "sh") for line in text.splitlines()]
        prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
        lines += [line.strip() for line in prose.splitlines() if line.startswith("    ")]
        for line in lines:
            text = line.partition("#")[0].strip()
            if COMMAND.fullmatch(text):
                yield f"{name_of(page)}: {text}"


ALL = list(dict.fromkeys(commands()))
#: What several pages say is run once, as of the first that says it.
HERE = list({each.partition(": ")[2]: each for each in reversed(ALL) if not each.startswith(tuple(ELSEWHERE))}.values())
#: Stands for any script, quickly; those of the pages run in tests/parallel/test_docs.py.
SCRIPT = "import ringreduce as rr; rr.init(); assert rr.allreduce(1.0, op=rr.SUM) == rr.size()\n"


def test_what_runs_the_others_is_there() -> None:
    """No reason is left over, and the files and tests that reasons name exist."""
    assert [start for start in ELSEWHERE if not any(each.startswith(start) for each in ALL)] == []
    named = {
        each for why in ELSEWHERE.values() for each in re.findall(r"((?:tests|scripts)/[\w/.]+\w)(?:::(\w+))?", why)
    }
    assert [path for path, _ in named if not (ROOT / path).exists()] == []
    assert [test for path, test in named if test and f"def {test}(" not in (ROOT / path).read_text()] == []


#: Commands that start no process and no rank run in this one, where all is imported.
IN_PROCESS = re.compile("(?:python -m )?ringreduce ((?:simulate|timeline|audit|submit) .*)")


@pytest.mark.parametrize("command", HERE)
def test_a_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but that benchmarks take few iterations, and explain and bench end at 1 MiB."""
    line = command.partition(": ")[2]
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:8\n")
    (tmp_path / "hosts.sh").chmod(0o755)
    if "trace.json" in line:
        assert run("python", "train.py", cwd=tmp_path, RINGREDUCE_TIMELINE="trace.json").returncode == 0
    if "runs.jsonl" in line:
        assert run("python", "train.py", cwd=tmp_path, RINGREDUCE_AUDIT="runs.jsonl").returncode == 0
    if " bench " in line:
        line = re.sub(r"-e (?:16|64)M", "-e 1M", line) + " -n 2 -w 0"
    if (alone := IN_PROCESS.fullmatch(line)) is not None:
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(main, shlex.split(alone[1]))
        assert result.exit_code == 0, result.output
        return
    run("bash", "-c", line, cwd=tmp_path, XDG_CONFIG_HOME=str(tmp_path)).well()  # where a new key goes
