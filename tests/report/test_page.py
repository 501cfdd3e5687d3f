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
from vit_edge.report.quantization import Cost, Layer, Search, Timed, Trial
from vit_edge.report.schema import Report
from vit_edge.stages.gate import gate_bundle

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE_PIXELS = 360
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="module")
def page(ort_bundle: Path, openvino_bundle: Path) -> str:
    reports = [gate_bundle(bundle, seconds=0.1).report for bundle in (ort_bundle, openvino_bundle)]
    layers, found = searched()
    reports = [with_long_names(one) for one in reports]
    return html.page(reports=reports, layers=layers, search=found, title="two devices")


def searched() -> tuple[list[Layer], Search]:
    """A search of four models on two targets, the third taken."""
    names = [f"stages.{i}.blocks.{i}.a_long_name.fc2" for i in range(4)]
    rows = [(120, 2, 0.5, False), (30, 2, 0.6, False), (4, 3, 0.7, True), (9, 3, 0.8, True)]
    trials = [
        Trial(
            given_back=names[:i], kl=0.1 / 4**i, lost=lost, won=won, drop_points=(lost - won) / 10,
            drop_lower95_one_sided=(lost - won) / 10 - 1, drop_upper95_one_sided=(lost - won) / 10 + 1, holds=holds,
            timed=[Timed(target=t, p50_ms=ratio, float_p50_ms=1.0, float_precision="f32") for t in ("here", "there")],
            seconds=1.0,
        )
        for i, (lost, won, ratio, holds) in enumerate(rows)
    ]  # fmt: skip
    found = Search(
        outcome="finished; int8 with 2 products in float keeps the limit", n=1000, float_top1=0.9, margin_points=2.0,
        held_by="upper95", budget_seconds=60.0, budget_trials=9, seconds=4.0, trials=trials, chosen=2, device={},
        costs=[Cost(name=name, kl_alone=0.02, multiply_adds=10) for name in names],
    )  # fmt: skip
    reasons = ["given back to float: KL 0.02 of 0.08 that all products cost alone"] * 2 + [None] * 2
    layers = [Layer(name=name, kind="linear", reason=reason) for name, reason in zip(names, reasons, strict=True)]
    return layers, found


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
    assert page.count("<polyline") == 3, (
        "one front: both were measured on the same images; and the search's two targets"
    )
    assert page.count('<div class="share"') == 2
    assert page.count("<b") - page.count("<body") >= 5


def test_the_front_is_what_nothing_beats_in_both(ort_bundle: Path, openvino_bundle: Path) -> None:
    points = charts.pareto([gate_bundle(bundle, seconds=0.1).report for bundle in (ort_bundle, openvino_bundle)])
    for one in points:
        beaten = [other for other in points if other.p50_ms < one.p50_ms and other.top1 >= one.top1]
        assert one.front == (not beaten)
        assert 0 < one.x < 100
        assert 0 < one.y < 100


def test_the_search_is_drawn_against_float_and_the_limit() -> None:
    _, found = searched()
    points = charts.searched(found, "there")
    assert [one.number for one in points] == [0, 1, 2, 3, None]
    assert [one.front for one in points] == [True, True, True, False, True]
    assert [one.number for one in points if one.chosen] == [2]
    heights = {one.number: one.y for one in points}
    assert heights[None] < heights[2] < charts.margin_height(found, points) < heights[1] < heights[0]


def test_an_artefact_timed_once_has_an_outline(ort_bundle: Path) -> None:
    report = gate_bundle(ort_bundle, seconds=0.05).report
    assert report.latency is not None
    alone = report.latency.artefacts[0].model_copy(update={"histogram": [0, 1]})
    assert charts.outline(alone) == "0,100 0.00,100.00 50.00,100.00 50.00,0.00 100.00,0.00 100,100"
