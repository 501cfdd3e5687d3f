"""A gate's report as JUnit XML: one test case for each check."""

import xml.etree.ElementTree as ET

from vit_edge.report.schema import Check, Report

# What a CI system must not take for a success: only "fail" is a failure, but nothing unmeasured passes either.
ELEMENTS = {"fail": "failure", "undecided": "error", "unmeasured": "error", "skipped": "skipped"}


def of_report(report: Report) -> str:
    """The XML text, with its declaration."""
    counts = {kind: str(sum(ELEMENTS.get(c.verdict) == kind for c in report.checks)) for kind in set(ELEMENTS.values())}
    suite = ET.Element(
        "testsuite",
        name=f"vit-edge gate {report.model} {report.target}",
        tests=str(len(report.checks)),
        failures=counts["failure"],
        errors=counts["error"],
        skipped=counts["skipped"],
    )
    for check in report.checks:
        _add(suite, check, report.target)
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add(suite: ET.Element, check: Check, target: str) -> None:
    case = ET.SubElement(suite, "testcase", classname=f"vit-edge.gate.{target}", name=check.name)
    if check.verdict in ELEMENTS:
        ET.SubElement(case, ELEMENTS[check.verdict], message=f"{check.verdict}: {check.detail}")
    else:
        ET.SubElement(case, "system-out").text = check.detail
