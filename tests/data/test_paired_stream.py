"""The streams of one rank: their views, and the threads that they decode with."""

from contextlib import closing
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.data import paired_stream
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import LABELED, UNLABELED, PairedStream, loader_options
from fastsuncet.distributed.place import Place
from pipelines import backend
from tests.support.colors import ALONE, color_config, write_colors
from tests.support.streams import needs_dali


def test_two_streams_on_a_gpu_share_the_cores_of_their_process(monkeypatch):
    monkeypatch.setattr(backend, "cores_of_process", lambda: 16)
    config, gpu = load_config("digits_demo"), Place(0, 1, torch.device("cuda", 0))
    assert loader_options(config, gpu, streams=2).threads == 8
    assert loader_options(config, gpu).threads == 16  # an evaluation
    assert loader_options(config, ALONE, streams=2).threads == 16


def test_unlabeled_stream_gets_the_threads_of_the_labeled_one_once_supervision_ends(monkeypatch):
    """On the CPU, as if it shared its threads as a GPU does."""
    real = loader_options

    def shared(config, place, streams=1):
        return replace(real(config, place), threads=4 // streams)

    monkeypatch.setattr(paired_stream, "loader_options", shared)
    config = load_config("digits_demo", ["criterion.supervised_epochs=1"])
    images = open_images(config, ALONE, validation=False)
    arithmetic = config.resolve(1, *images.counts())
    with closing(PairedStream(config, images.train, images.split.indices, arithmetic, ALONE)) as stream:

        def threads() -> dict[str, int]:
            return {role: loader.options.threads for role, loader in stream._loaders.items()}

        stream(arithmetic.supervised_steps - 1)
        assert threads() == {UNLABELED: 2, LABELED: 2}
        stream._loaders[LABELED].replaced[3] = 5
        assert len(stream(arithmetic.supervised_steps).labeled) == 0
        assert threads() == {UNLABELED: 4} and stream.replaced == {3}


@needs_dali
def test_config_sets_trainings_decoder_and_never_an_evaluations(tmp_path, monkeypatch):
    labeled = ("criterion.classes_per_batch=2", "criterion.supervised_imgs_per_class=2")
    decoder = "data.hw_decoder_share=0.5"
    config = color_config(write_colors(tmp_path), *labeled, decoder, "criterion.supervised_epochs=all")
    images = open_images(config, ALONE, validation=False)
    arithmetic = config.resolve(1, *images.counts())
    graph = mock.Mock(side_effect=KeyboardInterrupt)  # ends the start where the graph would be built
    monkeypatch.setattr("pipelines.dali.graphs.views", graph)
    with closing(PairedStream(config, images.train, images.split.indices, arithmetic, ALONE)) as stream:
        for loader in stream._loaders.values():
            with pytest.raises(KeyboardInterrupt):
                loader(0)
            assert graph.call_args.kwargs["hw_decoder_share"] == 0.5
    assert loader_options(config, ALONE).hw_decoder_share == 0
