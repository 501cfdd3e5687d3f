"""The page as a browser shows it: light, dark, and as narrow as a phone."""

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import missing
from vit_edge.report import charts, html
from vit_edge.report.schema import Report
from vit_edge.stages.gate import gate_bundle

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE_PIXELS = 360
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="module")
def page(ort_bundle: Path, openvino_bundle: Path) -> str:
    reports = [gate_bundle(bundle, seconds=0.1).report for bundle in (ort_bundle, openvino_bundle)]
    return html.page(reports=[with_long_names(one) for one in reports], title="two devices")


def with_long_names(report: Report) -> Report:
    """Names as real data sets and devices have them."""
    assert report.accuracy is not None
    flips = [one.model_copy(update={"name": f"val/{'n0123456' * 12}/x.jpg"}) for one in report.accuracy.flips]
    accuracy = report.accuracy.model_copy(update={"flips": flips})
    return report.model_copy(update={"accuracy": accuracy, "target": "a-camera-with-a-long-name-in-the-hall"})


def browser(*arguments: object) -> str:
    """Runs a headless browser and gives what it prints; a skip, or a failure where it is required, without one."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        missing("chromium", "no browser is installed: apt-get install chromium")
    command = [found, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def brightness(page: str, folder: Path, *arguments: str) -> float:
    (folder / "page.html").write_text(page)
    shot = folder / "shot.png"
    browser(*arguments, "--window-size=1000,1500", f"--screenshot={shot}", (folder / "page.html").as_uri())
    pixels = np.asarray(Image.open(shot).convert("L"))
    assert pixels.std() > 5, "something is drawn"
    return float(np.median(pixels))


def test_light_and_dark(page: str, tmp_path: Path) -> None:
    assert brightness(page, tmp_path) > 230
    assert brightness(page, tmp_path, DARK) < 60


def test_a_phone_scrolls_tables_and_not_the_page(page: str, tmp_path: Path) -> None:
    """In a frame as wide as a phone: everything, opened details too, stays within."""
    opened = page.replace("<details>", "<details open>")
    measure = "document.title = frame.contentDocument.documentElement.scrollWidth"
    frame = f'<iframe id="frame" style="width: {PHONE_PIXELS}px; border: 0" srcdoc="{escape(opened)}" onload="{measure}"></iframe>'
    (tmp_path / "phone.html").write_text(f"<!doctype html><title>0</title>{frame}")
    shown = browser("--dump-dom", (tmp_path / "phone.html").as_uri())
    title = re.search(r"<title>(\d+)</title>", shown)
    assert title
    assert 0 < int(title[1]) <= PHONE_PIXELS


def test_every_chart_is_drawn(page: str) -> None:
    assert page.count("<polygon") >= 5, "a histogram for each artefact"
    assert page.count("<polyline") == 1, "one front: both were measured on the same images"
    assert page.count('<div class="share"') == 2
    assert page.count("<b") - page.count("<body") >= 5


def test_the_front_is_what_nothing_beats_in_both(ort_bundle: Path, openvino_bundle: Path) -> None:
    points = charts.pareto([gate_bundle(bundle, seconds=0.1).report for bundle in (ort_bundle, openvino_bundle)])
    for one in points:
        beaten = [other for other in points if other.p50_ms < one.p50_ms and other.top1 >= one.top1]
        assert one.front == (not beaten)
        assert 0 < one.x < 100
        assert 0 < one.y < 100


def test_an_artefact_timed_once_has_an_outline(ort_bundle: Path) -> None:
    report = gate_bundle(ort_bundle, seconds=0.05).report
    assert report.latency is not None
    alone = report.latency.artefacts[0].model_copy(update={"histogram": [0, 1]})
    assert charts.outline(alone) == "0,100 0.00,100.00 50.00,100.00 50.00,0.00 100.00,0.00 100,100"
