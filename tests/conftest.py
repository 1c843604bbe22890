"""Fixtures and helpers shared by all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # before anything imports Triton: where there is no GPU, kernels run in its interpreter
    os.environ["TRITON_INTERPRET"] = "1"

# tokenised rows of tests are not kept in the home of who runs them; processes that tests start inherit it
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fullstride-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# what is kept between runs of users is not the tests' to read or to fill
CACHE = tempfile.TemporaryDirectory(prefix="fullstride-tests-")
os.environ["XDG_CACHE_HOME"] = CACHE.name

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(*parts: str) -> Path:
    """A path in the shared data beside the checkout; skips the test where it is not there."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs shared data beside the checkout: {'/'.join(parts)}")
    return path


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory (bf16), imported from the GGUF of its package."""
    from fullstride.errors import ConfigError
    from fullstride.run.gguf import import_gguf, packaged_smollm2

    try:
        gguf = packaged_smollm2()
    except ConfigError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    import_gguf(gguf, directory)
    return directory
