"""One undisturbed run of ten steps, which several tests compare theirs with."""

import pytest

from tests.support.runs import final_state, tiny_config, train


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """(config, digests of the batches by step, final state)"""
    config = tiny_config(tmp_path_factory.mktemp("undisturbed"))
    return config, train(config), final_state(config)
