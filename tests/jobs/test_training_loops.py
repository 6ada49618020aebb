"""Lightning, Accelerate, the Trainer of transformers and torchmetrics on the backend of torch.distributed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import PROGRAMS, needs, run_program, run_together

needs("lightning", "transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder, and what programs that use Lightning say; they share a job, as it takes seconds to import."""
    folder = tmp_path_factory.mktemp("lightning")
    example = [str(EXAMPLES / "lightning_digits.py"), "--epochs", "1", "--folder", str(folder / "example")]
    scripts = {"test": [str(PROGRAMS / "lightning_trainer.py"), str(folder)], "example": example}
    return folder, run_together(2, folder, scripts)


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The same of programs that use Accelerate and transformers."""
    folder = tmp_path_factory.mktemp("hugging_face")
    scripts = {
        "test": [str(PROGRAMS / "hugging_face.py"), str(folder)],
        "accelerate": [str(EXAMPLES / "accelerate_digits.py"), "--epochs", "1", "--folder", str(folder)],
        "transformers": [str(EXAMPLES / "hf_trainer.py"), "--steps", "60", "--folder", str(folder)],
    }
    return folder, run_together(2, folder, scripts)


def test_lightning_on_ringreduce_as_on_gloo(lightning: tuple[Path, dict[str, str]]):
    """Losses, metrics and weights are equal to those on Gloo; what the program checks besides, it says itself."""
    assert lightning[1]["test"].splitlines().count("done") == 2


def test_hugging_face_on_ringreduce_as_on_gloo(hugging_face: tuple[Path, dict[str, str]]):
    """As for Lightning."""
    assert hugging_face[1]["test"].splitlines().count("done") == 2


def test_lightning_example(lightning: tuple[Path, dict[str, str]]):
    """It learns, keeps the best model, and all ranks end with the same weights."""
    folder, said = lightning
    assert "weights: bitwise identical" in said["example"]
    accuracy = re.search(r"2 ranks: loss [\d.]+, test accuracy ([\d.]+)%", said["example"])
    assert accuracy is not None, said
    assert float(accuracy[1]) > 90
    assert [each.suffix for each in (folder / "example").iterdir()] == [".ckpt"]


def test_accelerate_example(hugging_face: tuple[Path, dict[str, str]]):
    """It learns, keeps its state, and all ranks end with the same weights."""
    folder, said = hugging_face[0], hugging_face[1]["accelerate"]
    assert "weights: bitwise identical" in said
    accuracy = re.search(r"epoch 1: test accuracy ([\d.]+)%", said)
    assert accuracy is not None, said
    assert float(accuracy[1]) > 90
    assert "on 2 ranks" in said, "each rank has trained alone"
    assert (folder / "model.safetensors").exists()


def test_transformers_example(hugging_face: tuple[Path, dict[str, str]]):
    """It learns more than how often each byte occurs (3.26 nats), and all ranks end with the same weights."""
    folder, said = hugging_face[0], hugging_face[1]["transformers"]
    assert "weights: bitwise identical" in said
    loss = re.search(r"2 ranks: ([\d.]+) nats", said)
    assert loss is not None, said
    assert float(loss[1]) < 3.26
    assert (folder / "checkpoint-60" / "model.safetensors").exists()


def test_accelerate_that_was_made_first_is_warned_of() -> None:
    """Each of its processes has taken itself for the only one."""
    needs("accelerate")
    run_program(
        """
        import os, warnings
        os.environ["ACCELERATE_USE_CPU"] = "0"
        import torch.distributed as dist
        from accelerate import Accelerator
        made = Accelerator()
        assert made.num_processes == 1
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            dist.init_process_group("ringreduce")
        assert any("call init_process_group before Accelerator()" in str(each.message) for each in said), said
        dist.destroy_process_group()
        """
    ).well()
