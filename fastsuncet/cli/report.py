"""Compare runs: accuracy against cost, compute saved.

Compares runs in pictures and tables: accuracy against epochs, updates, petaFLOPs, hours and joules,
and the share of the baseline's compute that each method needed to match the baseline. It reads
the results of `evaluate`, `finetune` and `transfer` in each run, and the nearest-neighbor
accuracies of its training. Runs that differ only in their seed or machine are averaged. With
--lengths, runs that differ only in their number of epochs become one curve, as the paper draws
ImageNet. With --paper the points of the paper are drawn too; without a RUN, only they.

--page shows how runs stand instead: for each RUN one HTML file, RUN/page.html, with curves,
results, weights, settings and versions. --watch writes it anew while the run goes on.

examples:
  fastsuncet report runs/cifar10_simclr runs/cifar10_suncet
  fastsuncet report runs/* --baseline runs/simclr --metric top1 --metric top5
  fastsuncet report runs/in1k_10pct --paper imagenet-10pct --output reports/in1k
  fastsuncet report runs/in1k_*ep --lengths --paper
  fastsuncet report --paper                  the paper's curves and savings
  fastsuncet report --watch runs/in1k_10pct  then open runs/in1k_10pct/page.html

figures: imagenet-10pct (the default), paws-10pct and paws-1pct are curves; imagenet-1pct,
transfer, related, npi and losses are single points

exit codes: 0 written; 2 no such metric or figure; 3 no such run, or it was not evaluated yet;
5 a result is damaged, or the report cannot be written
"""

from pathlib import Path

from fastsuncet.cli._parser import Options, Parser, path


def arguments(parser: Parser) -> None:
    parser.takes("runs", "RUN", "the folder of a run, of any seed and method", nargs="*", type=path)
    parser.takes("--baseline", "RUN", "compare with this run (default: the one without labels)", type=path)
    parser.takes(
        "--metric", "NAME", "top1, top5, knn, rankme, ... (default: top1)", action="append", default=[]
    )
    parser.takes("--paper", "FIGURE", "also draw the points of the paper", nargs="?", const="")
    parser.flag("--lengths", "merge runs that differ only in length into one curve of their ends")
    parser.writes("for all files (default: report)", metavar="DIR", required=False, default=Path("report"))
    parser.flag("--page", "write RUN/page.html instead: one run's curves, settings, weights")
    parser.flag("--watch", "the same, and anew while the run goes on")


def run(parser: Parser, options: Options) -> None:
    if options.page or options.watch:
        return _page(parser, options)
    if options.paper and Path(options.paper).is_dir():  # `--paper runs/a`: the name of a figure was left out
        options.runs, options.paper = [Path(options.paper), *options.runs], ""
    runs = options.runs
    if not runs and options.baseline is None and options.paper is None:
        parser.error(f"which runs? For example: {parser.prog} runs/cifar10_simclr runs/cifar10_suncet")
    from fastsuncet.commands.report import paper, report

    figures = [options.paper] if options.paper else [paper.TEN] if runs else [paper.TEN, paper.ONE]
    report(
        runs,
        options.output,
        baseline=options.baseline,
        metrics=options.metric,
        figures=[] if options.paper is None else figures,
        lengths=options.lengths,
    )


def _page(parser: Parser, options: Options) -> None:
    if not options.runs:
        parser.error(f"which run? For example: {parser.prog} --page runs/cifar10_suncet")
    of_comparisons = ("baseline", "metric", "paper", "lengths", "output")
    if taken := [name for name in of_comparisons if getattr(options, name) != parser.get_default(name)]:
        parser.error(
            f"--page writes page.html into each run's folder; --{taken[0]} belongs to a comparison of runs"
        )
    from fastsuncet.commands.report import page
    from pipelines.output import say_line

    if options.watch:
        page.watch(options.runs)
    else:
        for run in options.runs:
            say_line(f"wrote {page.write_page(run)}")
