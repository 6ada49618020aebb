"""Train as `soak.py` does; some ranks die before `init` in the first attempt.

ringreduce run --elastic --max-restarts 9 -np 4 python random_deaths.py FOLDER 1:ImportError 2:SIGKILL
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    folder, *deaths = sys.argv[1:]
    if os.environ.get("RINGREDUCE_RESTART", "0") == "0":
        from ringreduce.common.launch import launch

        for death in deaths:
            rank, how = death.split(":")
            if int(rank) == launch().rank:
                if how == "ImportError":
                    raise ImportError("this rank fails before init, as drawn")
                if how == "exit":
                    sys.exit(3)
                os.kill(os.getpid(), signal.SIGKILL)

    from soak import Soaked

    import ringreduce as rr

    rr.init()
    Soaked(folder).run()
