"""docs/metrics.md has every metric that the gateway exposes, and no other."""

import re
from pathlib import Path

from pointsman.observe.metrics import Metrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_lists_the_metrics_that_there_are() -> None:
    exposition = Metrics(lambda: (), ["/v1/models"]).render().decode()
    exposed = set(re.findall(r"^# TYPE (\S+)", exposition, re.MULTILINE))
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert listed == {name for name in exposed if not name.startswith("process_")}
