"""Time by kind: names, intervals, and what the account adds up to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fullstride
from fullstride.run.kinds import KINDS, PARTS, UPDATE_BEGINS, Kernel, covered, kind_of, time_by_kind

NAMES = {
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0",
        "void fmha::compute_dot_do_o_specialized<1, __nv_bfloat16>(fmha::Params)",
        "void convert_dq_to_16bits<2, 6>(fmha::Params)",
        "void reduce_head_kernel<float>(float*)",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>, false, true>(Flash_fwd_params)",
        "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64>>(pytorch_flash::Flash_bwd_params)",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
    ),
    "products": (
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nn_align8>(Params)",
        "ampere_sgemm_128x64_nt",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasSplitKParams<float>)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, float>(cublasGemvParamsEx)",
    ),
    "element_wise": (
        "rms_norm_bwd_kernel",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(at::native::ReduceOp<float>)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int, long>()",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
    ),
    "other": ("", "kernel", "kernel_0", "mystery_matmul_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "select"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_kinds_of_known_names(kind: str, name: str) -> None:
    assert kind_of(name) == kind


def test_every_kernel_of_ours_is_element_wise() -> None:
    """A new kernel has to be entered in run/kinds, and one that is gone has to go there too."""
    files = (Path(fullstride.__file__).parent / "kernels").glob("*.py")
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    ours = set(re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE))
    assert {"adamw_kernel", "rope_bwd_kernel", UPDATE_BEGINS} <= ours
    assert {name: kind_of(name) for name in ours} == dict.fromkeys(ours, "element_wise")
    assert set(PARTS[-1][1]) == ours


def test_union_of_intervals() -> None:
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3)]) == 5  # unsorted, overlapping, a gap
    assert covered([(0, 10), (2, 3), (4, 5)]) == 10  # the later ones lie inside
    assert covered([(0, 1), (1, 2)]) == 2  # they touch
    assert covered([(3, 3)]) == 0


def seconds_of(kernels: list[Kernel], wall: float):
    told = time_by_kind(kernels, wall)
    assert set(told.seconds) == set(KINDS)
    assert sum(told.seconds.values()) == pytest.approx(told.wall + told.overlap)  # the account closes
    return told


def test_an_update_one_kernel_after_another() -> None:
    kernels = [
        Kernel("Memcpy HtoD (Pinned -> Device)", 0.0, 0.5),
        Kernel("nvjet_tst_128x256", 1.0, 4.0),
        Kernel("cudnn_sdpa", 4.0, 6.0),
        Kernel("nvjet_tst_128x256", 6.0, 7.0),
        Kernel("swiglu_bwd_kernel", 7.0, 8.0),
        Kernel("sum_of_squares_kernel", 8.5, 9.0),
        Kernel("void at::native::vectorized_elementwise_kernel<4>()", 9.0, 9.25),
        Kernel("adamw_kernel", 9.5, 10.0),
    ]
    told = seconds_of(kernels[::-1], 11.0)  # in any order
    assert told.seconds == pytest.approx(
        # idle: 0.5 before the first product, 0.5 before the update, 0.25 within it, 1 after it
        {"products": 4, "attention": 2, "element_wise": 1.5, "optimizer": 1.25, "other": 0, "idle": 2.25}
    )
    assert told.overlap == pytest.approx(0) and told.unrecognised == ()


def test_kernels_side_by_side() -> None:
    """Two of one kind count once; two of two kinds each by its own duration, which `overlap` tells."""
    kernels = [
        Kernel("nvjet_a", 0.0, 4.0),
        Kernel("nvjet_b", 2.0, 6.0),
        Kernel("rope_fwd_kernel", 5.0, 8.0),
        Kernel("adamw_kernel", 8.0, 8.5),  # not what begins an update
        Kernel("sum_of_squares_kernel", 9.0, 10.0),
    ]
    told = seconds_of(kernels, 10.0)
    assert told.seconds == pytest.approx(
        {"products": 6, "attention": 0, "element_wise": 3.5, "optimizer": 1, "other": 0, "idle": 0.5}
    )
    assert told.overlap == pytest.approx(1)


def test_a_name_that_nobody_knows_is_told() -> None:
    kernels = [Kernel("zeta_kernel", 0.0, 1.0), Kernel("alpha", 1.0, 3.0), Kernel("sum_of_squares_kernel", 3.0, 4.0)]
    told = seconds_of(kernels, 4.0)
    assert told.seconds["other"] == 3 and told.seconds["products"] == 0
    assert told.unrecognised == ("alpha", "zeta_kernel")


def test_an_update_without_its_beginning_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="where does the update begin"):
        time_by_kind([Kernel("nvjet", 0.0, 1.0)], 1.0)


def test_clocks_that_differ_give_no_negative_idle_time() -> None:
    assert time_by_kind([Kernel("sum_of_squares_kernel", 0.0, 1.0)], 0.999999).seconds["idle"] == 0
