"""Renders the chart with Helm's own library: sets of values in (JSON, standard input), what became of each out.

A process of its own, since the library brings a whole Go runtime, with threads and signal handlers, into the one it is
loaded by. Each answer has either `rendered`, texts by template, or `error`.
"""

import json
import sys
from typing import Any

import helm_python


def answer(chart: helm_python.Chart, wanted: dict[str, Any]) -> dict[str, Any]:
    """Render a release: its `name` and `namespace`, and the `values` beside the defaults."""
    try:
        chart.validate_schema(wanted["values"])
        rendered = chart.render(
            wanted["values"], name=wanted["name"], namespace=wanted["namespace"]
        )
    except helm_python.HelmError as error:
        return {"error": str(error)}
    return {"rendered": rendered}


def main() -> None:
    """Answer for the chart whose folder is the only argument."""
    [folder] = sys.argv[1:]
    with helm_python.Chart.load(folder) as chart:
        answers = [answer(chart, wanted) for wanted in json.load(sys.stdin)]
    lint = helm_python.lint(folder, strict=True)
    json.dump({"answers": answers, "lint": lint["messages"]}, sys.stdout)


if __name__ == "__main__":
    main()
