"""Operations: contract, reference in plain torch, and dispatch.

Each file holds the formula, the shapes and who adds into what; a reference `x_fwd_ref` / `x_bwd_ref`, which computes in
at least float32 (float64 stays float64) and returns new tensors; and the face `x_fwd` / `x_bwd`, which writes into the
caller's buffers. CPU tensors take the reference, CUDA tensors the kernel of the same name in `fullstride.kernels`.
"""
