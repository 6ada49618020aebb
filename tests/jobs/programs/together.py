"""Runs scripts one after the other on the same ranks, so that what takes seconds to import is imported once.

Usage: together.py FOLDER SCRIPTS

``SCRIPTS`` is JSON: words of a command line by a name. What a script prints on a rank goes to ``FOLDER/NAME-RANK``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path


def forget() -> None:
    """Forget what libraries keep of a script: torch its process group, Accelerate the ranks of that."""
    if (torch := sys.modules.get("torch")) and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


folder, scripts = Path(sys.argv[1]), json.loads(sys.argv[2])
for name, words in scripts.items():
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent)
    with (folder / f"{name}-{os.environ['OMPI_COMM_WORLD_RANK']}").open("w") as said, redirect_stdout(said):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    forget()
