"""A run's or a gate's results as one self-contained HTML page: no script, no network, light and dark."""

from collections.abc import Sequence

import jinja2

from vit_edge.ledger import Ledger
from vit_edge.report import charts, words
from vit_edge.report.quantization import Layer, Search
from vit_edge.report.schema import Report


def page(
    *, reports: Sequence[Report], ledger: Ledger | None = None, layers: Sequence[Layer] = (),
    search: Search | None = None, title: str = "vit-edge",
) -> str:  # fmt: skip
    """The page's text. ledger, layers, search: of the run that the reports belong to."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("vit_edge.report", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.j2").render(
        title=title, reports=reports, ledger=ledger, layers=layers, search=search, words=words, charts=charts
    )
