"""`pointsman cascade sweep`: what each threshold of a two-step cascade costs, and how good its answers are.

In the order of a run: `reading` (prompts from a file), `asking` (both models, over HTTP), `kept` (answers that were
asked for once), `sweeping` (judged answers, the curve, the threshold for a target, a learned acceptor), `report` and
`plot`. `questions` makes a set of its own. The rules (scores, curve, bootstrap, judging) are values in `domain`.
"""

__all__: list[str] = []
