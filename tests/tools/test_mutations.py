"""The places that tools/mutations.yaml breaks are still there. `make mutants` breaks them."""

import pytest

from tools.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[each.harm for each in MUTATIONS])
def test_mutation_has_its_place_and_its_test(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.before) == 1
    for test in mutation.test.split():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists()
