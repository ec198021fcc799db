"""What a training step says to other ranks, to the byte, and what that makes of one card's step on many.

    python tools/scaling/scaling_model.py CONFIG [section.key=value ...] --step-ms T --images U --labeled S [--json FILE]

T is the time of one step on ONE card with U unlabeled and S labeled images on it: measured (`tools/bench/bench_step.py`) or,
for a look at the formulae, made up; then every number that depends on it is made up too. U and S stay the same on each
card (weak scaling). docs/scaling.md says where the network's figures come from and what follows.

The bytes are exact (`step_messages.py`). The times are a model: latency + bytes / bandwidth, as NCCL itself predicts a
collective when it chooses an algorithm.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, `tools` is not importable yet

from fastsuncet.config import Config, load_config
from fastsuncet.errors import FastSuncetError
from tools.bench.common import environment, print_table, write_json
from tools.scaling.step_messages import Message, contrasted, messages, summed

WORLDS = (1, 8, 64, 512, 4096)
BUCKET = 25 << 20  # bytes of DDP's gradient buckets, its default
BACKWARD = 2 / 3  # share of a step under which gradients can travel: 4 of 6 FLOP a multiply-add


@dataclass(frozen=True)
class Network:
    """Links, and NCCL's own latencies; by default nodes of 8 H100 or H200, each GPU with a network card of its own."""

    gpus_a_node: int = 8
    node_gbs: float = 450.0  # GB/s of a GPU in one direction, NVLink 4
    card_gbs: float = 50.0  # GB/s of a network card, 400 Gb/s
    # Microseconds, from NCCL's src/graph/tuning.cc (baseLat and hwLat, at commit 01afd20a): of a call, of a hop inside
    # a node, of a hop between nodes; for the protocols LL (low latency) and Simple (full bandwidth).
    ring: tuple = ((3.6, 0.47, 2.7), (8.4, 3.4, 9.6))
    tree: tuple = ((4.4, 0.52, 5.0), (0.0, 28.0, 50.0))

    def seconds(self, collective: str, size: int, ranks: int) -> float:
        """Of one collective over `size` bytes: the fastest of the algorithms and protocols that NCCL has for it.

        Gathers and scatters are rings, so their latency grows with the ranks; an all-reduce may be a tree.
        """
        if ranks == 1 or size == 0:
            return 0.0
        nodes = math.ceil(ranks / self.gpus_a_node)
        bandwidth = self.node_gbs if nodes == 1 else min(self.node_gbs, self.gpus_a_node * self.card_gbs)
        ways = [self._ring(collective, size, ranks, nodes, bandwidth, low) for low in (True, False)]
        if collective == "all_reduce":
            ways += [self._tree(size, ranks, nodes, bandwidth, low) for low in (True, False)]
        return 1e-6 * min(ways)

    def _ring(self, collective: str, size: int, ranks: int, nodes: int, bandwidth: float, low: bool) -> float:
        base, inside, between = self.ring[0 if low else 1]
        if low:
            inside, bandwidth = inside * (1.8 if nodes > 1 else 1), bandwidth / 4
        trips = 2 if collective == "all_reduce" else 1
        hops, far = trips * (ranks - 1), trips * (nodes - 1)
        return base + (hops - far) * inside + far * between + size / (1e3 * bandwidth * ranks / hops)

    def _tree(self, size: int, ranks: int, nodes: int, bandwidth: float, low: bool) -> float:
        base, inside, between = self.tree[0 if low else 1]
        bandwidth = 0.9 * bandwidth / 2
        if low:
            inside, bandwidth = inside * (1.8 if nodes > 1 else 1), bandwidth / 3.8
        latency = base + 2 * ((ranks / nodes - 1) * inside + math.log2(nodes) * between)
        return latency + size / (1e3 * bandwidth)


@dataclass(frozen=True)
class Prediction:
    """A step on W ranks, in milliseconds by term. `gradients` and `queue` are two shares of DDP's buckets.

    `gradients` is what is left of them after the backward pass. `queue` is the most that BatchNorm's sums can wait
    behind the others where both have one communicator: all of a bucket's time, for every bucket.
    """

    ranks: int
    views: int  # of all ranks, the labeled ones and SwAV's small crops with them
    one_card: float
    norm_forward: float
    norm_backward: float
    queue: float
    rows: float  # gathered forward, their gradient reduced backward
    codes: float  # SwAV's
    gradients: float
    products: float  # with the other ranks' rows
    gathered_mb: float  # joined rows that each rank holds

    @property
    def terms(self) -> dict[str, float]:
        """What many cards add to a step, by name."""
        return {name: getattr(self, name) for name in TERMS}

    @property
    def step(self) -> float:
        """Everything one after the other, but for gradients that travel under the backward pass."""
        return self.one_card + sum(self.terms.values())

    @property
    def efficiency(self) -> float:
        """Views a second and card, over those of one card alone."""
        return self.one_card / self.step

    @property
    def largest(self) -> str:
        """The term beside the card's own work that costs most, BatchNorm's two as one; "" on one card."""
        if self.ranks == 1:
            return ""
        joined = {"BatchNorm": self.norm_forward + self.norm_backward}
        joined |= {TERMS[name]: value for name, value in self.terms.items() if not name.startswith("norm")}
        return max(joined, key=joined.__getitem__)


TERMS = {
    "norm_forward": "BatchNorm, forward",
    "norm_backward": "backward",
    "queue": "its queue, at most",
    "rows": "rows",
    "codes": "codes",
    "gradients": "gradients left",
    "products": "products",
}


def predict(
    config: Config,
    ranks: int,
    images: int,
    labeled: int,
    step_ms: float,
    network: Network,
    teraflops: float,
    *,
    gathered_norm: bool = False,
    classes: int = 1000,
) -> Prediction:
    """A step on `ranks` cards from one on one card. `teraflops`: of the similarity products, in float32.

    `gathered_norm`: as if BatchNorm's statistics were gathered, 4 (1 + 2 C) bytes of each rank, and not summed.
    """
    said = messages(config, ranks, images, labeled, classes=classes)

    def milliseconds(*starts: str) -> float:
        chosen = [x for x in said if x.what.startswith(starts)]
        return 1e3 * sum(network.seconds(x.collective, x.bytes, ranks) * x.calls for x in chosen)

    norm_forward, norm_backward = milliseconds("BatchNorm, statistics"), milliseconds("BatchNorm, gradients")
    if gathered_norm:
        sizes = [ranks * x.bytes // 2 for x in said if x.what == "BatchNorm, statistics"]
        norm_forward = 1e3 * sum(network.seconds("all_gather", size, ranks) for size in sizes)
    size = next((x.bytes for x in said if x.what == "gradients of the weights"), 0)
    buckets = [min(BUCKET, size - start) for start in range(0, size, BUCKET)]
    times = [1e3 * network.seconds("all_reduce", bucket, ranks) for bucket in buckets]
    # The last bucket is ready when the backward pass is over; the others travel under it, as far as they fit.
    exposed = max(times[-1], sum(times) - BACKWARD * step_ms) if times else 0.0
    # Forward, gradient by anchors, gradient by keys: 2 FLOP each for every pair of a row here with one elsewhere.
    compared = [rows for _, rows in contrasted(config, images, labeled)]
    flop = sum(3 * 2 * config.model.output * rows * rows * (ranks - 1) for rows in compared)
    unlabeled = {"nt_xent": 2, "swav": 2 + config.swav.small_crops, "none": 0}[config.criterion.instance]
    return Prediction(
        ranks=ranks,
        views=ranks * (unlabeled * images + labeled),
        one_card=step_ms,
        norm_forward=norm_forward,
        norm_backward=norm_backward,
        queue=sum(times) - exposed if norm_backward > 0 else 0.0,
        rows=milliseconds("rows", "labels", "gradient of"),
        codes=milliseconds("codes"),
        gradients=exposed,
        products=flop / (teraflops * 1e9),
        gathered_mb=sum(x.bytes for x in said if x.what.startswith("rows")) / 1e6,
    )


def show(config: Config, predictions: Sequence[Prediction], images: int, labeled: int, classes: int) -> None:
    """Both tables: bytes at 8 ranks, times at each number of them, as docs/scaling.md has them."""
    eight = messages(config, 8, images, labeled, classes=classes)
    print("What a rank says in a step on 8 cards (NCCL), by the largest tensor of each collective:")
    rows = [
        [x.what, x.collective, str(calls_of(x.what, eight)), f"{x.bytes:,}", f"{x.sent(8):,.0f}"]
        for x in summed(eight)
    ]
    print_table(["", "", "calls", "bytes", "sent, with rings"], rows)
    print("A model of a step, in milliseconds (docs/scaling.md):")
    print("\n".join(markdown(predictions)) + "\n")


def calls_of(what: str, said: Sequence[Message]) -> int:
    """How many collectives `what` is, DDP's buckets as one."""
    return sum(x.calls for x in said if x.what == what)


def markdown(predictions: Sequence[Prediction]) -> list[str]:
    """The lines of a table of a step's terms; those that are nothing at every size are left out."""
    shown = [name for name in TERMS if any(p.terms[name] for p in predictions)]
    head = ["cards", "step", "efficiency", *(TERMS[name] for name in shown), "largest"]
    rows = [
        [
            f"{p.ranks:,}",
            f"{p.step:.1f}",
            f"{p.efficiency:.2f}",
            *(f"{p.terms[name]:.2f}" for name in shown),
            p.largest,
        ]
        for p in predictions
    ]
    rule = ["---:"] * (len(head) - 1) + ["---"]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def main(arguments: list[str] | None = None) -> int:
    """Prints the tables and writes the JSON. 2 for a config that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--step-ms", type=float, required=True, help="of one card alone")
    parser.add_argument("--images", type=int, required=True, help="unlabeled images of that step")
    parser.add_argument("--labeled", type=int, default=0, help="labeled images of that step")
    parser.add_argument("--gpus-a-node", type=int, default=Network.gpus_a_node)
    parser.add_argument(
        "--node-gbs", type=float, default=Network.node_gbs, help="GB/s of a GPU inside a node"
    )
    parser.add_argument(
        "--card-gbs", type=float, default=Network.card_gbs, help="GB/s of a GPU's network card"
    )
    parser.add_argument(
        "--teraflops",
        type=float,
        default=67.0,
        help="of the similarity products; 67: H200, float32 (criterion.products=fp32)",
    )
    parser.add_argument("--classes", type=int, default=1000, help="of cross-entropy's classifier")
    parser.add_argument(
        "--gathered-norm",
        action="store_true",
        help="as if BatchNorm's statistics were gathered, and not summed",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args(arguments)
    if min(options.step_ms, options.images, options.gpus_a_node) <= 0 or options.labeled < 0:
        parser.error("--step-ms, --images and --gpus-a-node are above 0, and --labeled is not below it")
    network = Network(options.gpus_a_node, options.node_gbs, options.card_gbs)
    try:
        config = load_config(options.config, options.overrides)
        predictions = [
            predict(
                config,
                ranks,
                options.images,
                options.labeled,
                options.step_ms,
                network,
                options.teraflops,
                gathered_norm=options.gathered_norm,
                classes=options.classes,
            )
            for ranks in WORLDS
        ]
    except FastSuncetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    show(config, predictions, options.images, options.labeled, options.classes)
    points = [
        asdict(p) | {"step": p.step, "efficiency": p.efficiency, "largest": p.largest} for p in predictions
    ]
    report = {"tool": "scaling_model", "environment": environment(), "network": asdict(network)}
    write_json(options.json, {**report, "step_ms": options.step_ms, "points": points})
    return 0


if __name__ == "__main__":
    sys.exit(main())
