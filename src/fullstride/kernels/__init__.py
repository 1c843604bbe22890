"""Triton kernels, one file per operation; `fullstride.ops` holds their contracts and references.

Every kernel converts to float32 right after the load and rounds once, at the store, to the dtype of the tensor it
writes. Row offsets are int64. Sizes need not be multiples of anything: masks cover the rest. Nothing here waits for
the GPU, and no shape depends on data, so everything can be captured in a CUDA graph. A sum over rows is written as one
partial row per program and summed in a second pass, in the same order every time; there are no atomics.

Type checkers see a kernel's parameters, but neither `num_warps` and the like beside them nor what Triton's own
functions return: the comments on pyright at the head of the files.
"""
