"""Find what makes a run faster on this machine.

Times whole steps of CONFIG with what could make them faster and is not written in it: a CUDA graph,
torch.compile, threads, read-ahead, the hardware JPEG decoder. Each is tried on top of those that won, in a
process of its own. It must first prove that it computes the same, and wins if it is 3 % faster, and faster
than the noise. On several GPUs it starts one process for each, as `train` does.

Writes a config with CONFIG as its base and the keys that won, each with its times. It replaces no file.
Kernels that are right and not slower need no tuning: every run uses them.

examples:
  fastsuncet tune digits_demo --output fast.yaml --minutes 3
  fastsuncet tune in1k_10pct data.root=/data/imagenet --output fast.yaml

`fastsuncet train fast.yaml` then trains with them, with the same changes behind it.
"""

from fastsuncet.cli._parser import Parser


def arguments(parser: Parser) -> None:
    parser.takes("--minutes", "M", "start no trial after this (default: 20)", type=float, default=20.0)
    parser.writes("the config to write, such as fast.yaml (required)")
    parser.takes_config(ranks=True)
