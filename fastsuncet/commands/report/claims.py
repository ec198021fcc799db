"""What the paper says was saved, beside what the report's rule makes of the paper's own points, and why they differ."""

from fastsuncet.commands.report.compute_saved import Saving, savings
from fastsuncet.commands.report.compute_saved_figure import Printed
from fastsuncet.commands.report.curves import Evaluation
from fastsuncet.commands.report.groups import Panel, arrange
from fastsuncet.commands.report.paper import BATCH, IMAGES, ONE, RECIPES, SUNCET, TEN, curves, load
from fastsuncet.commands.report.tables import markdown
from fastsuncet.models.flops import equivalent_epochs


def printed() -> list[Printed]:
    """The paper's percentages of compute to match SimCLR (rows 10 and 11)."""
    return [
        Printed(f"{p.method} (paper)", str(Evaluation("finetune", f"{p.labels} % labels")), p.metric, p.value)
        for p in load()
        if p.row in (10, 11)
    ]


def compare() -> tuple[list[str], dict[tuple[str, str, str], Saving]]:
    """(Markdown lines, our savings by (figure, metric, cost)): the paper's percentages beside our rule's, and why."""
    found, rows, why = {}, [], []
    for figure, row in ((TEN, 10), (ONE, 11)):
        (panel,) = arrange(curves(figure))
        for metric in ("top1", "top5"):
            found |= {(figure, metric, s.cost): s for s in savings(panel, metric)}
            said = next(p.value for p in load() if p.row == row and p.metric == metric)
            flops, updates = (found[figure, metric, cost] for cost in ("petaflops", "updates"))
            bound = "at most " if flops.at_first else ""
            shares = [flops.share(), flops.share(linear=False), updates.share(), updates.share(linear=False)]
            rows.append(
                [f"{figure}, {metric}", f"{said:g}", *(f"{bound}{100 * share:.1f}" for share in shares)]
            )
            why += _why_ten(panel, metric, said, flops) if figure == TEN else []
    why += _why_one()
    head = [
        "% of SimCLR's compute to match its best",
        "the paper",
        "FLOPs, linear",
        "FLOPs, first checkpoint",
    ]
    table = markdown([*head, "updates, linear", "updates, first checkpoint"], rows)
    return [*table, "", "Why they differ:", "", *why], found


def _why_ten(panel: Panel, metric: str, said: float, saving: Saving) -> list[str]:
    """What would have to be true for the paper's percentage to follow from a straight line between its points."""
    ours = next(g for g in panel.groups if g.supervised).with_metric(metric)
    cost = said / 100 * saving.total
    below, above = (ours[i] for i in (-2, -1))
    c0, c1 = below.costs["petaflops"], above.costs["petaflops"]
    a0, a1 = 100 * below.metrics[metric], 100 * above.metrics[metric]
    there = a0 + (a1 - a0) * (cost - c0) / (c1 - c0)
    epochs = below.costs["epochs"] + (above.costs["epochs"] - below.costs["epochs"]) * (cost - c0) / (c1 - c0)
    between = RECIPES[SUNCET, "10"].costs(400)["petaflops"]
    needed = a0 + (100 * saving.target - a0) * (between - c0) / (cost - c0)
    return [
        f"- 10 % labels, {metric}: SuNCEt's published points next to SimCLR's best ({100 * saving.target:.1f}) are "
        f"{a0:.1f} at {below.costs['epochs']:g} epochs and {a1:.1f} at {above.costs['epochs']:g}. The straight line "
        f"between them crosses it at {100 * saving.share():.1f} % of SimCLR's FLOPs. The paper's {said:g} % is the "
        f"compute of about {epochs:.0f} epochs, where the line is at {there:.1f}; a 400-epoch run between the two "
        f"(appendix G has one) would have to reach {needed:.1f}, more than the 500-epoch run did. The paper does not "
        "say how it interpolates."
    ]


def _why_one() -> list[str]:
    recipe = RECIPES[SUNCET, "1"]
    equal = {epochs: equivalent_epochs(recipe.samples(epochs), IMAGES, BATCH) for epochs in (400, 500)}
    return [
        f"- 1 % labels: one SuNCEt point is published, at 500 epochs, the compute of {equal[500]:.1f} epochs of "
        f"SimCLR. It is better than SimCLR's 500, so our rule only says at most {equal[500] / 5:.1f} %. A run of 400 "
        f"epochs costs {equal[400]:.1f} epochs of SimCLR, {equal[400] / 5:.1f} % of 500: the paper's 83 % would be "
        "that run as the first checkpoint at or above, whose accuracy is not published. The 81 % for top-5 is less "
        "than that run cost, so something was interpolated or a shorter run was better."
    ]
