"""Where a kernel test runs: in Triton's interpreter on CPU tensors, or on a GPU.

Each test has one body for both. The interpreter stores float32 only (its bf16 casts and sums differ from a GPU's).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.place import Place

HAS_GPU = torch.cuda.is_available()


def _scalars_from_one_element_arrays(patch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter turns loop bounds, arrays of one element, into int(array); numpy 2.4 refuses that."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: interpreter._LangPatchScope) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="interpreter-float32"),
        pytest.param(("cuda", torch.float32), id="cuda-float32", marks=pytest.mark.gpu),
        pytest.param(("cuda", torch.bfloat16), id="cuda-bfloat16", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The device and the storage dtype of a test."""
    pytest.importorskip("triton", reason="kernels need Triton")
    device, dtype = request.param
    if device == "cuda" and not HAS_GPU:
        pytest.skip("needs a CUDA device")
    if device == "cpu":
        if HAS_GPU:
            pytest.skip("the interpreter's tests run where there is no GPU: a process has one or the other")
        from triton import JITFunction, knobs, language

        if not knobs.runtime.interpret or isinstance(language.sum, JITFunction):
            pytest.fail("Triton was imported before TRITON_INTERPRET was set; set it in the outermost conftest.py")
        _scalars_from_one_element_arrays(monkeypatch)
    yield Place(torch.device(device), dtype)


@pytest.fixture
def gpu() -> torch.device:
    """For tests marked `gpu` that have no interpreter side."""
    if not HAS_GPU:
        pytest.skip("needs a CUDA device")
    return torch.device("cuda")
