"""Model a training step on many GPUs: its messages to the byte, and its time from the step of one GPU.

    python tools/scaling/scaling_model.py CONFIG [section.key=value ...] --step-ms T --images U --labeled S [--json F]

T is the time of one step on ONE GPU with U unlabeled and S labeled images: measured (`tools/bench/run.py step`) or,
for a look at the formulas, made up; then all times are made up. U and S stay the same on each GPU (weak scaling).
docs/scaling.md gives the sources of the network's figures and the conclusions.

The bytes are exact (`step_messages.py`). The times are a model: latency + bytes / bandwidth, as NCCL itself predicts a
collective when it chooses an algorithm.
"""

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.config import Config, load_config
from tools.bench import harness
from tools.scaling.step_messages import gathered_rows, merged, messages

WORLDS = (1, 8, 64, 512, 4096)
BUCKET = 25 << 20  # bytes of DDP's gradient buckets, its default
BACKWARD = 2 / 3  # share of a step under which gradients can travel: 4 of 6 FLOP per multiply-add


@dataclass(frozen=True)
class Network:
    """Links, and NCCL's own latencies; by default nodes of 8 H100 or H200, each GPU with its own network card."""

    gpus_a_node: int = 8
    node_gbs: float = 450.0  # GB/s of a GPU in one direction, NVLink 4
    card_gbs: float = 50.0  # GB/s of a network card, 400 Gb/s
    # Microseconds, from NCCL's src/graph/tuning.cc (baseLat and hwLat, at commit 01afd20a): of a call, of a hop inside
    # a node, of a hop between nodes; for the protocols LL (low latency) and Simple (full bandwidth).
    ring: tuple = ((3.6, 0.47, 2.7), (8.4, 3.4, 9.6))
    tree: tuple = ((4.4, 0.52, 5.0), (0.0, 28.0, 50.0))

    def seconds(self, collective: str, size: int, ranks: int) -> float:
        """Return the time of one collective over `size` bytes by NCCL's fastest algorithm and protocol for it.

        Gathers and scatters are rings, so their latency grows with the ranks; an all-reduce can be a tree.
        """
        if ranks == 1 or size == 0:
            return 0.0
        nodes = math.ceil(ranks / self.gpus_a_node)
        bandwidth = self.node_gbs if nodes == 1 else min(self.node_gbs, self.gpus_a_node * self.card_gbs)
        times = [self._ring(collective, size, ranks, nodes, bandwidth, low) for low in (True, False)]
        if collective == "all_reduce":
            times += [self._tree(size, ranks, nodes, bandwidth, low) for low in (True, False)]
        return 1e-6 * min(times)

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


def predict(
    config: Config,
    ranks: int,
    images: int,
    labeled: int,
    step_ms: float,
    network: Network,
    teraflops: float,
    classes: int = 1000,
) -> dict[str, float]:
    """Return the milliseconds that many GPUs add to a step, by term.

    `teraflops`: of the similarity products, in float32. The queue is the most that BatchNorm's sums can wait behind
    gradients, with which they share a communicator: all of a bucket's time, for every bucket that travels under the
    backward pass. "gradients left" is the rest of the buckets' time.
    """
    found = messages(config, ranks, images, labeled, classes=classes)

    def milliseconds(*starts: str) -> float:
        chosen = [x for x in found if x.what.startswith(starts)]
        return 1e3 * sum(network.seconds(x.collective, x.bytes, ranks) * x.calls for x in chosen)

    weights = found[-1].bytes if found else 0
    buckets = [min(BUCKET, weights - start) for start in range(0, weights, BUCKET)]
    times = [1e3 * network.seconds("all_reduce", bucket, ranks) for bucket in buckets]
    # The last bucket is ready when the backward pass is over; the others travel under it, as far as they fit.
    exposed = max(times[-1], sum(times) - BACKWARD * step_ms) if times else 0.0
    # Forward, gradient of anchors, gradient of keys: 2 FLOP each for every pair of a row here with one elsewhere.
    rows = gathered_rows(config, images, labeled).values()
    flop = sum(3 * 2 * config.model.output * count * count * (ranks - 1) for count in rows)
    norm_backward = milliseconds("BatchNorm, gradients")
    return {
        "BatchNorm, forward": milliseconds("BatchNorm, statistics"),
        "backward": norm_backward,
        "its queue, at most": sum(times) - exposed if norm_backward else 0.0,
        "rows": milliseconds("rows", "labels", "gradient of"),
        "codes": milliseconds("codes"),
        "gradients left": exposed,
        "products": flop / (teraflops * 1e9),
    }


def largest(terms: dict[str, float]) -> str:
    """Return the term that costs most, BatchNorm's two as one; "" if all are 0."""
    joined = {"BatchNorm": terms["BatchNorm, forward"] + terms["backward"]}
    joined |= {name: value for name, value in terms.items() if name not in ("BatchNorm, forward", "backward")}
    return max(joined, key=joined.__getitem__) if any(joined.values()) else ""


def main(arguments: list[str] | None = None) -> int:
    """Print the tables and write the JSON."""
    parser = harness.parser(__doc__, config=True)
    add = parser.add_argument
    add("--step-ms", type=float, required=True, help="of one GPU alone")
    add("--images", type=int, required=True, help="unlabeled images of that step")
    add("--labeled", type=int, default=0, help="labeled images of that step")
    add("--gpus-a-node", type=int, default=Network.gpus_a_node)
    add("--node-gbs", type=float, default=Network.node_gbs, help="GB/s of a GPU inside a node")
    add("--card-gbs", type=float, default=Network.card_gbs, help="GB/s of a GPU's network card")
    rate = "of the similarity products (default: %(default)s, an H200 with criterion.products=fp32)"
    add("--teraflops", type=float, default=67.0, help=rate)
    add("--classes", type=int, default=1000, help="of cross-entropy's classifier")
    o = parser.parse_intermixed_args(arguments)
    if min(o.step_ms, o.images, o.gpus_a_node, o.node_gbs, o.card_gbs, o.teraflops) <= 0 or o.labeled < 0:
        parser.error("numbers must be above 0, and --labeled must not be negative")
    network = Network(o.gpus_a_node, o.node_gbs, o.card_gbs)
    config = load_config(o.config, o.overrides)
    report = harness.Report("scaling_model", o.json, network=asdict(network), step_ms=o.step_ms)
    points = []
    for ranks in WORLDS:
        terms = predict(config, ranks, o.images, o.labeled, o.step_ms, network, o.teraflops, o.classes)
        # One after the other, except for gradients that travel under the backward pass.
        step = o.step_ms + sum(terms.values())
        facts = {"GPUs": ranks, "step": step, "efficiency": o.step_ms / step}
        points.append({**facts, **terms, "largest": largest(terms)})
    head = ["message", "collective", "calls", "bytes of the largest tensors", "sent, with rings"]
    sizes = [
        [x.what, x.collective, str(calls), f"{x.bytes:,}", f"{x.sent(8):,.0f}"]
        for x, calls in merged(messages(config, 8, o.images, o.labeled, classes=o.classes))
    ]
    formats = {"GPUs": "{:,}", "step": "{:.1f}", "efficiency": "{:.2f}", "largest": "{}"}
    # Terms that are 0 at every size are left out.
    shown = [name for name in points[0] if name in formats or any(point[name] for point in points)]
    columns = [(name, name, formats.get(name, "{:.2f}").format) for name in shown]
    tables = [
        {"title": "messages of a rank in a step on 8 GPUs (NCCL)", "head": head, "rows": sizes},
        harness.table("a model of a step, in milliseconds (docs/scaling.md)", points, columns),
    ]
    return report.finish(tables, points=points)


if __name__ == "__main__":
    harness.run(main)
