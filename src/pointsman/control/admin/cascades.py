"""What cascades did so far, and the curve that their shadows draw."""

from typing import Annotated

from msgspec import Meta, Struct

from pointsman.control.admin.endpoint import Call, endpoint
from pointsman.domain.calibration import StepCounts
from pointsman.domain.curve import Keep, Sample, curve, knee
from pointsman.domain.routes import Step

__all__ = ["list_cascades"]

POINTS = 50
"""Thresholds of a live curve: as many as a graph can show."""


class LivePoint(Struct, frozen=True):
    """What a threshold would have given on the sample."""

    tau: Annotated[float, Meta(description="Answers of at least this score are kept.")]
    escalated: Annotated[float, Meta(description="Fraction of requests that go on, 0 to 1.")]
    agreement: Annotated[
        float,
        Meta(description="Mean agreement of what clients get with the last model, 0 to 1."),
    ]


class LiveStep(Struct, frozen=True, kw_only=True):
    """One step of a cascade that may be the last."""

    model: Annotated[str, Meta(description="Model id as the workers report it.")]
    accept_if: Annotated[str, Meta(description="When its answer is kept.")]
    kept: Annotated[int, Meta(description="Answers that clients got.")]
    rejected: Annotated[int, Meta(description="Answers whose score was not good enough.")]
    unscored: Annotated[int, Meta(description="Answers without a score, which are never kept.")]
    failed: Annotated[int, Meta(description="Requests for which no worker of it answered.")]
    acceptance: Annotated[
        float | None, Meta(description="Fraction of its answers that were kept, null for none.")
    ]
    rejected_prompt_tokens: int
    rejected_completion_tokens: int
    rejected_seconds: Annotated[
        float, Meta(description="Time that clients waited for answers that were not kept.")
    ]
    samples: Annotated[int, Meta(description="Answers compared with the last model's.")]
    agreement: Annotated[
        float | None, Meta(description="Mean agreement of those with the last model, 0 to 1.")
    ]
    curve: Annotated[tuple[LivePoint, ...], Meta(description="By threshold, the cheapest first.")]
    knee: Annotated[
        float | None, Meta(description="The threshold at the knee of the curve, null for none.")
    ]


class LiveCascade(Struct, frozen=True):
    """A route with a cascade."""

    model: Annotated[str, Meta(description="Public model id.")]
    shadow: Annotated[float, Meta(description="Fraction of its requests that are compared.")]
    steps: tuple[LiveStep, ...]


class Cascades(Struct, frozen=True):
    """All of them, in the order of the route table."""

    data: tuple[LiveCascade, ...]


@endpoint("GET", "/admin/v1/cascades")
async def list_cascades(call: Call) -> Cascades:
    """Show what each step of every cascade did since the start, and the live curve of its shadow.

    The counts are those of this gateway. `agreement` compares words with the last model's answer: it says how much
    would change for clients, not which answer is right.
    """
    calibrations = call.parts.calibrations
    return Cascades(
        tuple(
            LiveCascade(
                route.model,
                route.shadow,
                tuple(
                    _live(step, calibrations.of(route.model, number))
                    for number, step in enumerate(route.cascade[:-1])
                ),
            )
            for route in call.parts.router.table.routes
            if route.cascade
        )
    )


def _live(step: Step, counts: StepCounts) -> LiveStep:
    judged = counts.kept + counts.rejected + counts.unscored
    # What it costs is not known here but by the fraction of requests that go on: one call of the large model.
    samples = [
        Sample(each.value, each.agreement, 1.0, small_cost=0.0, large_cost=1.0)
        for each in counts.samples
    ]
    keep: Keep = ">=" if ">" in step.accept_if else "<="
    agreements = [each.agreement for each in counts.samples]
    points = curve(samples, keep=keep) if samples else []
    best = knee(points)
    every = max(1, -(-len(points) // POINTS))
    return LiveStep(
        model=step.model,
        accept_if=step.accept_if,
        kept=counts.kept,
        rejected=counts.rejected,
        unscored=counts.unscored,
        failed=counts.failed,
        acceptance=counts.kept / judged if judged else None,
        rejected_prompt_tokens=counts.prompt_tokens,
        rejected_completion_tokens=counts.completion_tokens,
        rejected_seconds=counts.seconds,
        samples=len(agreements),
        agreement=sum(agreements) / len(agreements) if agreements else None,
        curve=tuple(LivePoint(each.tau, each.escalated, each.quality) for each in points[::every]),
        knee=None if best is None else best.tau,
    )
