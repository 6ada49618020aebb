"""The recipes that need more libraries, as printed: on two ranks, and compared with one process."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from documents import ROOT, blocks, titled
from launching import PROGRAMS, RINGREDUCE, needs, run, run_together

RECIPES = ROOT / "docs" / "recipes"


def programs(folder: Path, *pages: str) -> None:
    for page in pages:
        for name, source in titled(RECIPES / f"{page}.md").items():
            (folder / name).write_text(source)


def test_recipes_make_the_weights_of_one_process(tmp_path: Path) -> None:
    """LoRA by hand and by the Trainer, with checkpointing of either kind, and webdataset; models that are exported.

    Checkpoints and sums have the adapters alone. One job, as these libraries take seconds to import.
    """
    needs("onnxscript", "peft", "transformers", "webdataset")
    programs(tmp_path, "trainings", "checkpoints")
    (tmp_path / "lora_trainer.py").write_text((ROOT / "examples" / "lora_trainer.py").read_text())
    (tmp_path / "together" / "shards").mkdir(parents=True)
    given = (tmp_path / "lora.py").read_text().replace("lora.pt", "reentrant.pt")
    given = given.replace("checkpointing_enable()", "checkpointing_enable({'use_reentrant': True})")
    tally = "ringreduce.metrics().collectives['allreduce'].nbytes"
    given = f"import ringreduce\nbefore = {tally}\n{given}\nprint({tally} - before)\n"
    (tmp_path / "reentrant.py").write_text(given)
    scripts = {"shards": [str(PROGRAMS / "shards.py"), str(tmp_path)]}
    names = "webdata", "lora", "reentrant", "lora_trainer", "export"
    scripts |= {name: [str(tmp_path / f"{name}.py")] for name in names}
    scripts["compared"] = [str(PROGRAMS / "recipes.py"), str(tmp_path)]
    said = run_together(2, tmp_path, scripts)
    assert said["compared"].splitlines().count("equal") == 2
    trained = 4 * (16 * 4 + 4 * 16) + 64 * 16  # numbers in the adapters of four layers, and in that which is saved
    for nbytes in said["reentrant"].split():
        assert 0 <= int(nbytes) - 3 * 8 * trained < 1000  # besides what the ranks compare; frozen layers have 58 kB
    for written in ("model.onnx", "model.pt", "lora/adapter_model.safetensors"):
        assert (tmp_path / "together" / written).exists()


def shown(words: str) -> str:
    """Return the command of the page that begins with some words, for this installation."""
    (line,) = [line for _, text in blocks(RECIPES / "debug.md", "sh") for line in text.splitlines() if words in line]
    return line.replace("ringreduce", shlex.quote(str(RINGREDUCE)), 1).replace("python ", f"{sys.executable} ")


def test_pdb_on_one_rank(tmp_path: Path) -> None:
    """The rank that the page's command names reads the commands of the debugger, and the others wait for it."""
    programs(tmp_path, "debug")
    typed = r"printf 'share = 5.0\nc\n' | "
    job = run("bash", "-c", typed + shown("train.py"), cwd=tmp_path).well()
    assert job.stdout.count("sum 5.0") == 2


def test_the_time_limit_ends_a_rank_that_waits_in_a_debugger(tmp_path: Path, environment: dict[str, str]) -> None:
    """The others give it up, and the job ends, though nobody has typed a command."""
    programs(tmp_path, "debug")
    command = shlex.split(shown("train.py").replace("TIMEOUT=3600", "TIMEOUT=2"))
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stderr is not None
        said = job.stderr.read()  # to the end of the job; its input is open until then
    assert job.returncode == 1
    assert "rank 1" in said


class Editor:
    """As much of an editor as attaches to a program, by the protocol of debuggers.

    Args:
        port: where the program listens.
    """

    def __init__(self, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            self._file = connection.makefile("rwb")
        self._sent = 0

    def send(self, command: str, **arguments: Any) -> None:
        self._sent += 1
        given = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(given).encode()
        self._file.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def wait(self, name: str) -> dict[str, Any]:
        """Read up to an event, or up to the answer to a command, and return it."""
        while True:
            nbytes = int(self._file.readline().split()[1])
            self._file.readline()
            message = json.loads(self._file.read(nbytes))
            if name in (message.get("event"), message.get("command")):
                return message


def test_an_editor_attaches_to_one_rank(tmp_path: Path, environment: dict[str, str]) -> None:
    """The rank waits for it, stops where the program says, and goes on."""
    needs("debugpy")
    programs(tmp_path, "debug")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = tmp_path / "attended.py"
    program.write_text(program.read_text().replace("5678", str(port)))
    command = shlex.split(shown("attended.py").replace("TIMEOUT=3600", "TIMEOUT=60"))  # if the test fails
    ((_, settings),) = blocks(RECIPES / "debug.md", "json")
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "attach now\n"
        editor = Editor(port)
        editor.send("initialize", adapterID="debugpy")
        editor.send("attach", **json.loads(settings)["configurations"][0])
        editor.wait("initialized")
        editor.send("configurationDone")
        stopped = editor.wait("stopped")["body"]
        editor.send("continue", threadId=stopped["threadId"])
        editor.wait("terminated")
        editor.close()  # the adapter of debugpy holds the output of the rank until then
        assert job.stdout.read().count("sum 1.0") == 2
    assert job.returncode == 0
