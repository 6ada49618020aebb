"""Look whether the search of the site leads to the page that is meant, in the browser of tests/browser.py.

.venv-browser/bin/python tests/site_search.py out/site   # says what does not; then the exit status is 1
"""

from __future__ import annotations

import os
import sys
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser import NO_BROWSER, prepare

#: What a reader types -> the page that has to be the first that is found.
MEANT = {
    "ring allreduce": "algorithms.html",
    "oversubscribe": "start.html",
    "hang": "errors.html",
    "slow rank": "slow.html",
    "checkpoint": "recipes/checkpoints.html",
    "horovod": "migrate/horovod.html",
    "resume training": "recipes/checkpoints.html",
    "run as root": "start.html",
    "validation": "recipes/data.html",
    "resume training in the middle of an epoch": "recipes/checkpoints.html",
    "macOS or Windows": "start.html",
    "conda": "start.html",
    "upgrading": "start.html",
    "how large is the download": "start.html",
    "mistakes": "recipes/gradients.html",
    "LoRA on two CPUs": "recipes/trainings.html",
    "mean per token": "recipes/trainings.html",
    "ONNX export": "recipes/checkpoints.html",
    "debug one rank": "recipes/debug.html",
}
_TRIES, _PAUSE_MS = 100, 200
_FIRST = "(document.querySelector('.md-search-result__link') || {href: ''}).href"


def main(site: Path) -> int:
    """Search; returns the exit status."""
    prepare()
    try:
        found = _search(site)
    except ImportError as error:
        print(f"the browser lacks what it needs: {error}", file=sys.stderr)
        return NO_BROWSER
    wrong = {text: page for text, page in found.items() if page != MEANT[text]}
    for text, page in wrong.items():
        print(f"the search for {text!r} leads to {page or 'nothing'}, not to {MEANT[text]}")
    return int(bool(wrong))


def _search(site: Path) -> dict[str, str]:
    """Return the first page that the search of the site finds for each text of `MEANT`; empty: none."""
    from PySide6.QtCore import QEventLoop, QTimer, QUrl
    from PySide6.QtWebEngineCore import QWebEngineSettings
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    application, ended, found = QApplication(["search"]), QEventLoop(), dict.fromkeys(MEANT, "")
    view = QWebEngineView()
    view.page().settings().setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)
    view.show()

    def wait(start: Callable[[], Any]) -> None:
        start()
        ended.exec()

    view.loadFinished.connect(lambda _: ended.quit())
    for text in MEANT:
        address = QUrl((site / "index.html").absolute().as_uri() + f"?q={urllib.parse.quote(text)}")

        def note(link: str, text: str = text) -> None:
            path = urllib.parse.urlsplit(link).path
            found[text] = path and os.path.relpath(path, site.absolute())
            ended.quit()

        wait(lambda address=address: view.load(address))  # type: ignore[misc]
        for _ in range(_TRIES):
            wait(lambda note=note: view.page().runJavaScript(_FIRST, note))  # type: ignore[misc]
            if found[text]:
                break
            wait(lambda: QTimer.singleShot(_PAUSE_MS, ended.quit))
    view.close()
    view.deleteLater()
    application.quit()
    return found


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(status)  # Qt complains of a page that is deleted with its interpreter
