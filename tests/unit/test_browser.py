"""What tests look at pages and pictures with finds what is wrong with them."""

from __future__ import annotations

from pathlib import Path

from browser import look

TEXT = "<h1>Text</h1><p>in black on white, with smooth edges, which have many greys</p>"


def test_faults_are_found(tmp_path: Path) -> None:
    """Errors of scripts, requests to others, sideways scrolling, blank pages, and files that are not there."""
    pages = {
        "right": TEXT,
        "blank": "<title>nothing</title>",
        "script": f"{TEXT}<script>missing()</script>",
        "remote": f'{TEXT}<img src="https://example.org/x.png">',
        "lacking": f'{TEXT}<script src="nowhere.js"></script>',
        "wide": f'{TEXT}<div style="width: 1300px">wide</div>',
    }
    for name, body in pages.items():
        (tmp_path / f"{name}.html").write_text(f"<!DOCTYPE html><html><body>{body}</body></html>")
    (tmp_path / "cut.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><text y="20">abc')
    paths = [*(tmp_path / f"{name}.html" for name in [*pages, "missing"]), tmp_path / "cut.svg"]
    found = {Path(path).stem: wrong for path, wrong in look(*paths).items()}
    assert found.keys() == {"blank", "script", "remote", "lacking", "wide", "missing", "cut"}
    assert found["lacking"] == ["asks for nowhere.js, which is not there"]
    assert "is no SVG" in found["cut"][0]
    assert found["blank"] == ["is blank"]
    assert found["script"] == ["line 1 of script.html: Uncaught ReferenceError: missing is not defined"]
    assert found["remote"] == ["asks for https://example.org/x.png"]
    assert "pixels wider than the window" in found["wide"][0]
    assert "cannot be loaded" in found["missing"]
