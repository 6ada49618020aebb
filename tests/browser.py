"""A browser without a screen that looks at pages and pictures: Qt's, which is Chromium.

    .venv-browser/bin/python tests/browser.py out/site/index.html ...  # says what is wrong; then the exit status is 1
    .venv-browser/bin/python tests/browser.py --width 400 --pictures out page.html  # and writes out/page.png

In an environment of its own, which `scripts/install browser` makes. Pages may ask for nothing but files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

_WIDTH, _HEIGHT = 1200, 900
#: For scripts that draw after a page has been loaded, and for a page that never is (milliseconds).
_DRAWING_MS, _LOADING_MS = 200, 20_000
#: Fewer colours than this are no page and no picture: text alone has as many, by its smooth edges.
_LEAST_COLOURS = 16
NO_BROWSER = 3
_ENDLESS, _NOT_THERE = 1, 2  # ways in which the loading of a page ends


@dataclass
class Seen:
    """What was seen of a file.

    Attributes:
        path: of the file.
        colours: how many different ones the picture of its top has; None: it was not shown.
        errors: what scripts complained of, what was asked for and is no file, and what is wrong with the layout.
    """

    path: str
    colours: int | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """What is wrong with it, in words."""
        is_blank = self.colours is not None and self.colours < _LEAST_COLOURS
        return [*self.errors, *(["is blank"] if is_blank else [])]


def look(*paths: Path | str, limit_s: float = 50.0, width: int = _WIDTH) -> dict[str, list[str]]:
    """Return what is wrong with each file, by path, as the browser shows it; files without faults are left out.

    Args:
        paths: of the files.
        limit_s: how long it may take (seconds).
        width: of the window, in pixels.

    Raises:
        pytest.skip.Exception: there is no browser in this environment.
    """
    import pytest

    python = Path(__file__).parents[1] / ".venv-browser" / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no browser: scripts/install browser")
    command = [python, __file__, "--json", "--width", str(width), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    if done.returncode == NO_BROWSER:
        pytest.skip(done.stderr.strip().rpartition("\n")[2])
    assert done.returncode == 0, done.stderr
    seen = [Seen(**each) for each in json.loads(done.stdout)]
    assert [each.path for each in seen] == list(map(str, paths))
    return {each.path: each.wrong for each in seen if each.wrong}


def prepare() -> None:
    """Set the variables that let the browser run without a screen, before it is imported."""
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    os.environ.setdefault("QT_LOGGING_RULES", "*=false")  # of graphics that there are none of here
    flags = ["--disable-gpu", "--log-level=3"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # for root, Chromium has none
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = " ".join(flags)


def main(arguments: Sequence[str]) -> int:
    """Look at files; returns the exit status."""
    prepare()
    parser = argparse.ArgumentParser(description="Look at pages and pictures.")
    parser.add_argument("--json", action="store_true", help="say it as JSON")
    parser.add_argument("--width", type=int, default=_WIDTH, help="of the window, in pixels")
    parser.add_argument("--height", type=int, default=_HEIGHT)
    parser.add_argument("--pictures", metavar="FOLDER", help="write what was seen there, as PNG")
    parser.add_argument("paths", nargs="*")
    asked = parser.parse_args(arguments)
    as_json = asked.json
    try:
        seen = _look(asked.paths, (asked.width, asked.height), asked.pictures)
    except ImportError as error:
        print(f"the browser lacks what it needs: {error}", file=sys.stderr)
        return NO_BROWSER
    if as_json:
        print(json.dumps([asdict(each) for each in seen]))
        return 0
    for each in seen:
        for wrong in each.wrong:
            print(f"{each.path}: {wrong}")
    return int(any(each.wrong for each in seen))


def _errors_of_picture(path: str) -> list[str]:
    """Return what is wrong with the text of an SVG, of which a browser shows as much as it can."""
    if path.endswith(".svg"):
        try:
            ElementTree.parse(path)
        except (OSError, ElementTree.ParseError) as error:
            return [f"is no SVG: {error}"]
    return []


def _look(paths: Sequence[str], size: tuple[int, int], pictures: str | None) -> list[Seen]:
    import shiboken6
    from PySide6.QtCore import QEventLoop, QTimer, QUrl
    from PySide6.QtWebEngineCore import (
        QWebEnginePage,
        QWebEngineProfile,
        QWebEngineSettings,
        QWebEngineUrlRequestInterceptor,
    )
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    seen: list[Seen] = []

    class Offline(QWebEngineUrlRequestInterceptor):
        """Lets through what is on this machine, and notes what is not there."""

        def interceptRequest(self, info: Any) -> None:  # Qt's name
            if info.requestUrl().scheme() not in ("file", "data", "blob"):
                seen[-1].errors.append(f"asks for {info.requestUrl().toString()}")
                info.block(True)
            elif info.requestUrl().isLocalFile() and not os.path.exists(info.requestUrl().toLocalFile()):
                seen[-1].errors.append(f"asks for {info.requestUrl().fileName()}, which is not there")

    class Page(QWebEnginePage):
        """Notes what scripts complain of."""

        def javaScriptConsoleMessage(self, level: Any, message: str, line: int, source: str) -> None:  # Qt's name
            if level == QWebEnginePage.JavaScriptConsoleMessageLevel.ErrorMessageLevel:
                seen[-1].errors.append(f"line {line} of {source.rpartition('/')[2]}: {message}")

    application = QApplication(["browser"])
    with tempfile.TemporaryDirectory(prefix="ringreduce-browser-") as folder:
        profile, offline, view = QWebEngineProfile(), Offline(), QWebEngineView()
        profile.setPersistentStoragePath(folder)
        profile.setUrlRequestInterceptor(offline)
        page = Page(profile, view)
        # Else Chromium drops what pages of files ask of others without a word.
        page.settings().setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)
        view.setPage(page)
        view.resize(*size)
        view.show()
        limit, ended = QTimer(singleShot=True), QEventLoop()
        limit.timeout.connect(lambda: ended.exit(_ENDLESS))
        page.loadFinished.connect(
            lambda well: QTimer.singleShot(_DRAWING_MS, lambda: ended.exit(0 if well else _NOT_THERE))
        )

        def note_width(wider: Any) -> None:
            if isinstance(wider, (int, float)) and wider > 0 and seen[-1].path.endswith(".html"):
                seen[-1].errors.append(f"{wider:g} pixels wider than the window of {size[0]}")
            ended.exit(0)

        for path in paths:
            seen.append(Seen(path, errors=_errors_of_picture(path)))
            limit.start(_LOADING_MS)
            page.load(QUrl.fromLocalFile(os.path.abspath(path)))
            status = ended.exec()
            if status == 0:
                page.runJavaScript("document.documentElement.scrollWidth - window.innerWidth", note_width)
                status = ended.exec()
            limit.stop()
            if status:
                seen[-1].errors.append("cannot be loaded" if status == _NOT_THERE else "its scripts do not end")
            if status == _ENDLESS:
                break  # nothing more is shown while these run
            image = view.grab().toImage()  # which has to outlive what is read from it
            if pictures is not None:
                image.save(os.path.join(pictures, f"{os.path.splitext(os.path.basename(path))[0]}.png"))
            seen[-1].colours = len(np.unique(np.frombuffer(image.constBits(), np.uint32)))
        view.close()
        for each in (page, view, profile):  # in this order, or Qt complains
            shiboken6.delete(each)
    application.quit()
    return [*seen, *(Seen(path, errors=["was not looked at"]) for path in paths[len(seen) :])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
