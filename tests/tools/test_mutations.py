"""The places that tools/mutations.py breaks are still there. Running it takes minutes."""

import pytest

from tools.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_has_its_place_and_its_test(name):
    mutation = MUTATIONS[name]
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert (ROOT / mutation.test.partition("::")[0]).exists()
