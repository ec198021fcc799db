"""Time the training step: end to end, on one fixed batch, and against a plain PyTorch SimCLR step.

The peer trains the same network on as many views of the same size, in the same precision and memory layout, with
torch's SGD and the usual cross-entropy over a dense matrix of similarities. It has no SuNCEt. `fastsuncet tune`
compares our step with itself in many settings, --against in one more, and the case `peers` with lightly.

Operators and host waits of a step are counted too. On a GPU, CUDA itself checks that no step waits for the device: if
one does, the exit code is 1.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch

from fastsuncet.config import load_config
from fastsuncet.distributed.place import join
from fastsuncet.training.cuda_graph import WARMUP, first_message
from tools.bench import harness
from tools.bench.harness import Call, ratios, spread
from tools.bench.step_bench import StepBench

ROUNDS = 7
END_TO_END, FIXED, PLAIN = "end to end", "one fixed batch", "plain PyTorch, dense loss"


def wait_in(step: Call, device: str) -> list[str]:
    """Return CUDA's message about the first place where the host waits in a step; [] for none, and on a CPU."""
    if device != "cuda":
        return []
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return [f"a step waits for the device: {first_message(error)}"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return []


def measure(options: Namespace) -> int:
    """Time the contenders; return 1 if a step waits for the device."""
    rounds, steps = (2, 1) if options.quick else (options.rounds, options.steps)
    settings = {"": []} | ({f", {' '.join(options.against)}": options.against} if options.against else {})
    with join(options.device) as place:
        device, calls, fixed, ahead, opened = place.device.type, {}, {}, {}, []
        for suffix, more in settings.items():
            words = [*options.overrides, *more, f"meta.device={options.device}"]
            # A stream for each: a setting can be one of the loader's.
            bench, stream = StepBench.open(load_config(options.config, words), place)
            opened.append((bench, stream))
            calls[END_TO_END + suffix] = bench.ours(stream)
            calls[FIXED + suffix] = fixed[FIXED + suffix] = bench.ours(lambda _, bench=bench: bench.batch)
            # Batches that were prepared while others had their turns are not part of this turn.
            ahead[END_TO_END + suffix] = bench.config.data.prefetch + 1
        bench, stream = opened[0]
        calls[PLAIN] = bench.plain()
        clock = partial(harness.seconds_of, device=device, repeats=steps)
        # Momentum exists after the warm-up, kernels are chosen, and a CUDA graph, where one is asked for, is captured.
        seconds = harness.time_in_turns(calls, clock, rounds, WARMUP + 1, ahead)
        counted = {
            name: harness.counted(call, device) for name, call in (*fixed.items(), (PLAIN, calls[PLAIN]))
        }
        waits = [wait for step in fixed.values() for wait in wait_in(step, device)]
        for _, each in opened:
            each.close()
    views = sum(map(len, bench.batch.views)) + len(bench.batch.labeled)
    rows = []
    for name, times in seconds.items():
        speeds = {"ms a step": spread(times, 1e3), "views/s": spread([views / each for each in times])}
        speeds["x one fixed batch"] = spread(ratios(seconds[FIXED], times))
        rows.append({"": name, **speeds, **counted.get(name, {})})
    pixels = stream.options.backend + ", view operator" * bool(stream.options.view_operator)
    title = f"a step of {views} views, pixels by {pixels}, {harness.CLOCK[device]}"
    harness.show(title, rows)
    # A CPU makes the pixels itself, so there they always cost time.
    for suffix in settings if device == "cuda" else ():
        reached = ratios(seconds[FIXED + suffix], seconds[END_TO_END + suffix])
        what = f"end to end, of the speed on a fixed batch{suffix}"
        harness.show_target(what, reached, 0.97, at_least=True)
    for note in (*(note for each, _ in opened for note in each.notes), *(f"WRONG: {wait}" for wait in waits)):
        print(note, end="\n\n")
    return 1 if waits else 0


def add_arguments(add: Callable) -> None:
    add("config", help="a YAML file, or the name of a shipped one")
    add("overrides", nargs="*", metavar="section.key=value", help="settings to change")
    add("--steps", type=int, default=10, help="in a turn (default: %(default)s)")
    text = "time our step with these settings too, in the same turns"
    add("--against", nargs="+", default=[], metavar="section.key=value", help=text)
    add("--device", choices=harness.DEVICES, default="auto")
