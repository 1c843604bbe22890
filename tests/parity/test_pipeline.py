from pathlib import Path

import pytest

from tests.parity.harness import *
from tests.parity.test_ranks import METHODS, reference

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    "split",
    [
        dict(ranks=2, pp=2, microbatches=2),
        dict(ranks=2, pp=2, microbatches=1, accumulation=3),
        dict(ranks=2, pp=2, microbatches=5, schedule="gpipe"),
        dict(ranks=2, pp=2, microbatches=3, schedule="zb-h1", accumulation=2),
        dict(ranks=4, pp=2, microbatches=2, accumulation=2, zero=1),
        dict(ranks=4, pp=2, microbatches=2, accumulation=2, zero=3),
    ],
    ids=str,
)
def test_pp(split, method, model):
    found = run(Split(**split), "adamw", METHODS[method], Path(), model)
    check_equal(found, reference("adamw", method, model))
