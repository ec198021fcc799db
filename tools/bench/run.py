"""Time one part of this project against its peers, in turns within one run.

python tools/bench/run.py CASE [--rounds R] [--json FILE] [--quick] [the case's own arguments]
python tools/bench/run.py CASE --help
"""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from tools.bench import harness

# A case is the module of its name: `CASE`, a harness.Case, says how it is measured.
CASES = {
    "pixels": "SimCLR's views from JPEG files, against torchvision's DataLoader",
    "contrast": "SuNCEt, NT-Xent and PAWS, against their authors' dense forms",
    "lars": "a LARS step, against timm's",
    "step": "the training step, against a plain PyTorch one",
    "peers": "SimCLR end to end, against lightly",
}


def main(arguments: list[str] | None = None) -> int:
    """Measure a case; return 1 if something computes wrong results."""
    table = "\n".join(f"  {name:<9} {what}" for name, what in CASES.items())
    first = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog=f"cases:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    first.add_argument("case", choices=CASES)
    first.add_argument("words", nargs=argparse.REMAINDER, help="its arguments; --help lists them")
    asked = first.parse_args(arguments)
    module = importlib.import_module(f"tools.bench.{asked.case}")
    case: harness.Case = module.CASE
    parser = harness.parser(
        module.__doc__, rounds=case.rounds, quick=case.quick, device=case.device, config=case.config
    )
    parser.prog += f" {asked.case}"
    case.add_arguments(parser.add_argument)
    options = parser.parse_intermixed_args(asked.words)
    report = harness.Report(asked.case, options.json)
    return report.finish(**case.measure(options, report))


if __name__ == "__main__":
    harness.run(main)
