"""What each kernel computes, written plainly: the results that tests compare kernels with."""

from __future__ import annotations

from oracles import (
    attention_reference,
    kv_write_reference,
    norm_reference,
    rope_reference,
    sampling_reference,
    sgmv_reference,
    silu_and_mul_reference,
)
from weft.kernels.dispatch import Kernels


def reference_kernels() -> Kernels:
    """The oracles, for tensors on any device."""
    return Kernels(
        rms_norm=norm_reference.rms_norm,
        fused_add_rms_norm=norm_reference.fused_add_rms_norm,
        rope=rope_reference.rope,
        silu_and_mul=silu_and_mul_reference.silu_and_mul,
        kv_write=kv_write_reference.kv_write,
        paged_attention=attention_reference.paged_attention,
        sgmv=sgmv_reference.sgmv,
        sample=sampling_reference.sample,
        logprobs=sampling_reference.logprobs,
    )
