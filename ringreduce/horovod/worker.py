"""One rank of `horovod.run`, with Horovod's names and numbers: ``python -m ringreduce.horovod.worker FOLDER``."""

import sys
from pathlib import Path

from ringreduce.launcher.worker import main

__all__ = ["main"]

if __name__ == "__main__":
    main(Path(sys.argv[1]))
