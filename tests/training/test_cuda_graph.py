"""The step as a CUDA graph, with a fake graph: a replay reads the present batch and rate; failures are reported."""

import contextlib
import gc
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fastsuncet.commands.ranks import as_rank
from fastsuncet.commands.train import start
from fastsuncet.commands.train import train as train_command
from fastsuncet.distributed.place import Place, join, work_stream
from fastsuncet.optim import LARS
from fastsuncet.training import cuda_graph
from fastsuncet.training.cuda_graph import WARMUP, GraphedStep, capture_on_device
from tests.support import runs
from tests.support.methods import small
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal_to_the_bit, final_state, small_config, tiny_config, train

pytestmark = pytest.mark.slow


class FakeGraph:
    """What a CUDA graph does: capturing runs nothing, replaying runs the same on the same tensors."""

    def __init__(self, step):
        self.step, self.losses = step, torch.zeros(4)

    def replay(self) -> None:
        self.losses.copy_(self.step())

    def reset(self) -> None:
        self.step = None


@pytest.fixture
def graphs(monkeypatch):
    """Capture fake graphs; return weak references to them, oldest first."""
    made = []

    def capture(step, device):
        # A graph has the memory of a whole step.
        assert all(old() is None or old().step is None for old in made)
        graph = FakeGraph(step)
        made.append(weakref.ref(graph))
        return graph, graph.losses

    monkeypatch.setattr(cuda_graph, "capture_on_device", capture)
    return made


@pytest.mark.parametrize(
    ("method", "optimizer", "captured"),
    [
        ("SimCLR + SuNCEt", "lars", 2),
        ("SimCLR + cross-entropy", "adamw", 2),
        ("SwAV + SuNCEt", "sgd", 3),
        ("PAWS", "lars", 1),
    ],
)
def test_replayed_run_is_the_plain_run_to_the_bit(tmp_path, monkeypatch, graphs, method, optimizer, captured):
    """Through the switch-off of supervision and SwAV's frozen prototypes."""
    monkeypatch.setattr(cuda_graph, "WARMUP", 1)
    # Four steps of six, with SwAV two of them with frozen prototypes; PAWS needs the labels.
    epochs = f"criterion.supervised_epochs={'all' if method == 'PAWS' else 1}"
    lr = f"optimization.lr={0.5 if optimizer == 'lars' else 0.01}"
    options = [epochs, "optimization.steps=6", lr, f"optimization.optimizer={optimizer}"]
    options += ["swav.freeze_steps=2"] * ("SwAV" in method)
    plain, graph = (small(tmp_path / name, method, *options) for name in ("plain", "graph"))
    train(plain)
    assert graphs == []
    train(small(tmp_path / "graph", method, *options, "meta.cuda_graph=true"))
    assert len(graphs) == captured
    assert_equal_to_the_bit(final_state(graph), final_state(plain))


@pytest.mark.parametrize("stop_at", [None, 6])
def test_no_graph_is_alive_when_the_process_group_ends(tmp_path, monkeypatch, graphs, stop_at):
    """NCCL would wait for it for ever. The traceback of Preempted still holds the frames of the run."""
    alive = []

    @contextlib.contextmanager
    def watched(config):
        with as_rank(config) as place:
            try:
                yield place
            finally:  # where the process group is destroyed
                alive.append([graph() for graph in graphs])

    monkeypatch.setattr(runs, "as_rank", watched)
    train(tiny_config(tmp_path, "meta.cuda_graph=true"), stop_at=stop_at)
    assert alive == [[None]]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    config = tiny_config(folder)
    with as_rank(config) as place:
        return start(config, place, folder)[0].task


def one_step(task) -> tuple[GraphedStep, list[str]]:
    said = []
    return GraphedStep(task.network, task.optimizer, task.method, say=said.append), said


NOT_PERMITTED = RuntimeError("operation not permitted when stream is capturing\nmore of it")


def fails_at_its_end_too(step, device):
    try:
        raise RuntimeError("a copy from the host is not permitted")
    finally:
        raise RuntimeError("the capture was invalidated")  # as torch's own end of a capture does


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (capture_on_device, "the step is on cpu, not on a CUDA device"),  # also where there is one
        (mock.Mock(side_effect=NOT_PERMITTED), "not permitted when stream is capturing"),
        (fails_at_its_end_too, "a copy from the host is not permitted"),
        (lambda step, device: (FakeGraph(step), torch.zeros(4)), "another rank could not capture its step"),
    ],
)
def test_step_that_cannot_be_captured_trains_without_a_graph(task, monkeypatch, capture, reason):
    """It says so once, with the first error and not the failure of the capture that follows it."""
    monkeypatch.setattr(cuda_graph, "capture_on_device", capture)
    monkeypatch.setattr(cuda_graph, "any_rank", lambda mine: True)
    step, said = one_step(task)
    before = [p.detach().clone() for p in task.model.parameters()]
    for number in range(WARMUP + 2):
        losses = step(task.stream(number), 0.1)
    assert losses.shape == (4,) and torch.isfinite(losses).all() and step.captured is None
    assert len(said) == 1 and said[0].startswith("meta.cuda_graph: training without a graph")
    assert said[0].endswith(reason)
    # On a GPU this torch may go on as if the capture did.
    step.method = SimpleNamespace(**vars(step.method) | {"device": torch.device("cuda")})
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setattr(step, "_recover", lambda: None)
    step._capture(task.stream(0))
    assert said[1].endswith("memory will run out, so continue with torch 2.14")
    assert any((p != old).any() for p, old in zip(task.model.parameters(), before))


def test_close_waits_for_no_replay(task, monkeypatch):
    """A replay never ends where another rank died, and this one must still leave with its message."""
    step, _ = one_step(task)
    monkeypatch.setattr(step, "method", SimpleNamespace(device=torch.device("cuda")))
    for waits in ("torch.cuda.synchronize", "torch.cuda.Stream.synchronize"):
        monkeypatch.setattr(waits, lambda *_: pytest.fail("waits for the device"))
    step.captured = (FakeGraph(None), task.stream(0), torch.zeros(4))
    step.close()
    assert step.captured is None


def test_step_after_a_refused_capture_can_use_the_scaler(task, monkeypatch):
    """Nor does LARS read the scale from the memory of the refused graph."""
    scaler, weight = torch.amp.GradScaler("cpu"), torch.ones(2, requires_grad=True)
    sgd, lars = torch.optim.SGD([weight], 0.1), LARS([weight], 0.1, implementation="kernel")

    def refused_after_an_update(step, device):
        scaler.scale(weight.sum()).backward()
        scaler.step(sgd)
        scaler.step(lars)  # there is no kernel on a CPU

    monkeypatch.setattr(cuda_graph, "capture_on_device", refused_after_an_update)
    monkeypatch.setattr(task.method, "scaler", scaler)
    monkeypatch.setattr(task, "optimizer", lars)
    step, said = one_step(task)
    step._capture(task.stream(0))
    assert "the kernels run on CUDA devices" in said[0]
    assert not {"grad_scale", "found_inf"} & vars(lars).keys()
    scaler.scale(weight.sum()).backward()
    scaler.step(sgd)  # torch refuses a second step before scaler.update()
    scaler.update()


def weights_around_a_refusal(rank, world_size, folder):
    """Return the weights after some steps, whose capture is refused in the middle of backward or not tried."""
    found = []
    for graphs in (False, True):
        config = tiny_config(Path(folder) / str(graphs))
        config.run_folder.mkdir(parents=True, exist_ok=True)
        place = Place(rank, world_size, torch.device("cpu"))
        task = start(config, place, config.run_folder)[0].task
        middle = task.model.encoder.layer2[0].conv1.weight

        def refused(step, device, middle=middle):
            def fail(gradient):
                raise RuntimeError("refused in backward")

            with contextlib.closing(SimpleNamespace(close=middle.register_hook(fail).remove)):
                return step()

        step, said = one_step(task)
        assert step.warmup == 11  # PyTorch's notes on CUDA graphs ask for so many passes of DDP
        step.warmup = 3
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_graph, "capture_on_device", refused)
            step.refused = not graphs  # not tried
            batch = task.stream(0)
            for _ in range(step.warmup + 2):
                step(batch, 0.1)
        assert len(said) == graphs
        found.append([p.detach() for p in task.model.parameters()])
    return found


def test_ranks_train_on_after_a_capture_refused_in_backward(tmp_path):
    """As if it had not been tried. Without a reset DDP waits for the gradients of the step that failed."""
    for plain, refused in run_ranks(weights_around_a_refusal, 2, str(tmp_path)):
        assert all(map(torch.equal, plain, refused))


@pytest.mark.parametrize("now", ["own", "default"])
def test_capture_uses_the_stream_of_the_steps_before_it(monkeypatch, now):
    """And leaves other threads alone, and the garbage collector as it was."""
    asked, left_on, made = {}, [], mock.Mock()

    @contextlib.contextmanager
    def graph(made, **options):
        asked.update(options, collecting=gc.isenabled())
        yield

    monkeypatch.setattr(gc, "collect", lambda: None)  # of a whole test session: seconds
    replaced = {"graph": graph, "CUDAGraph": lambda: made, "set_stream": left_on.append}
    replaced |= {"current_stream": lambda: now, "default_stream": lambda: "default"}
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert capture_on_device(lambda: "losses", torch.device("cuda"))[1] == "losses"
    stream = "own" if now == "own" else None  # the default one cannot be captured: torch takes one of its own
    assert asked == {"stream": stream, "capture_error_mode": "thread_local", "collecting": False}
    with pytest.raises(ZeroDivisionError):
        capture_on_device(lambda: 1 / 0, torch.device("cuda"))
    assert gc.isenabled() and left_on == [now, now] and made.reset.call_count == 1


def test_rank_works_on_one_stream_that_is_not_cudas_default(monkeypatch):
    device, cuda = torch.device("cuda", 0), mock.MagicMock()
    monkeypatch.setattr("fastsuncet.distributed.place.pick_device", lambda wanted, local_rank: device)
    for name in ("Stream", "set_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    work_stream.cache_clear()
    for _ in range(2):
        with join("cuda"):
            pass
    work_stream.cache_clear()
    within = ["stream", "stream().__enter__", "stream().__exit__"]
    assert [name for name, *_ in cuda.mock_calls] == ["set_device", "Stream", *within, "set_device", *within]
    assert cuda.stream.call_args_list == [mock.call(cuda.Stream.return_value)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_replayed_run_on_a_gpu_is_the_plain_run_to_the_bit(tmp_path, capfd, precision):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn, which is not here")
    common = ("criterion.supervised_epochs=2", "optimization.steps=16", "meta.device=cuda")
    options = (*common, f"meta.precision={precision}")
    states = []
    for graph in ("false", "true"):
        config = small_config(tmp_path / graph, *options, f"meta.cuda_graph={graph}")
        with as_rank(config) as place:
            train_command(config, place)
        states.append(final_state(config))
    assert "training without a graph" not in capfd.readouterr().out
    assert_equal_to_the_bit(*states)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_ranks_with_graphs_end_on_a_signal(tmp_path):
    """NCCL would wait for the graphs, and the run would be killed without its exit code."""
    words = ["meta.device=cuda", "meta.cuda_graph=true", "meta.precision=bf16", "optimization.steps=100000"]
    command = [sys.executable, "-m", "fastsuncet", "train", str(runs.CONFIGS / "digits_demo.yaml")]
    with subprocess.Popen([*command, *words, f"logging.folder={tmp_path}"]) as process:
        metrics = tmp_path / "digits_demo" / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 10:
            time.sleep(1)
            assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 75
