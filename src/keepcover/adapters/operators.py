"""The operators that a ``torch.export`` program may call: those of usual classifiers that check their arguments.

Others are refused by name. Some ATen operators read or write out of bounds, or divide by zero, when their arguments do not fit:
in a file of unknown origin that ends the process, or worse. Those listed here were called with arguments of every wrong kind.
"""

from __future__ import annotations

import re

# Without a dot it is the overload ``default``. Operators in place (``relu_``) are those without the last underscore.
_NAMES = """
    conv1d conv2d conv3d conv_transpose1d convolution linear addmm mm bmm baddbmm matmul einsum mv
    batch_norm _native_batch_norm_legit_no_training layer_norm native_layer_norm group_norm native_group_norm
    instance_norm rms_norm linalg_vector_norm
    relu relu6 prelu _prelu_kernel leaky_relu elu celu selu gelu silu mish softplus sigmoid log_sigmoid hardsigmoid
    hardswish hardtanh hardshrink softshrink tanh threshold glu _softmax _log_softmax scaled_dot_product_attention
    dropout feature_dropout alpha_dropout rand_like randn_like
    max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d
    mean sum amax amin max min argmax var std logsumexp cumsum any all topk sort
    view _unsafe_view reshape permute t squeeze unsqueeze expand expand_as view_as contiguous clone alias detach cat
    stack split_with_sizes chunk narrow index_select gather embedding flip roll repeat tile pad constant_pad_nd
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d pixel_shuffle pixel_unshuffle
    channel_shuffle unfold im2col diagonal tril triu
    floor_divide neg abs exp expm1 log log1p log2 sqrt rsqrt square reciprocal clamp clamp_min clamp_max maximum
    minimum sin cos atan erf floor ceil round sign addcmul addcdiv nan_to_num isnan isfinite
    logical_and logical_or logical_not logical_xor bitwise_not
    zeros ones full zeros_like ones_like full_like arange linspace scalar_tensor new_zeros new_ones new_full eye copy
    _to_copy type_as lift_fresh_copy sym_numel _assert_tensor_metadata _assert_scalar sym_constrain_range_for_size
    conv1d.padding conv2d.padding conv_transpose2d.input softmax.int log_softmax.int upsample_nearest1d.vec
    upsample_nearest2d.vec upsample_linear1d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec
    _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec mean.dim sum.dim_IntList max.dim min.dim var.dim
    var.correction std.dim std.correction var_mean.dim var_mean.correction any.dim all.dim flatten.using_ints
    unflatten.int transpose.int movedim.int movedim.intlist squeeze.dim squeeze.dims split.Tensor unbind.int
    slice.Tensor select.int index.Tensor masked_fill.Scalar masked_fill.Tensor where.self where.ScalarOther
    where.ScalarSelf meshgrid.indexing add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor mul.Tensor
    mul.Scalar div.Tensor div.Scalar div.Tensor_mode pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar clamp.Tensor
    remainder.Scalar remainder.Tensor fmod.Scalar lerp.Scalar lerp.Tensor eq.Scalar eq.Tensor ne.Scalar ne.Tensor
    lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor bitwise_and.Tensor
    bitwise_or.Tensor arange.start arange.start_step fill.Scalar to.dtype to.dtype_layout to.device to.other
    sym_size.int
"""
_ATEN = frozenset(name if "." in name else f"{name}.default" for name in _NAMES.split())
# Arithmetic of sizes. Powers and shifts are left out: two of them make a number that fills the memory.
_PLAIN = re.compile(
    r"torch\.sym_(int|float|max|min|not|ite|sqrt)|math\.(ceil|floor|trunc|sqrt)|"
    r"_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_)"
)


def is_allowed(target: str) -> bool:
    """Whether a program may call what it names.

    Example:
        >>> is_allowed("torch.ops.aten.conv2d.default"), is_allowed("torch.ops.aten.relu_.default"), is_allowed("_operator.mul")
        (True, True, True)
        >>> is_allowed("torch.ops.aten.as_strided.default"), is_allowed("torch.os.system"), is_allowed("_operator.pow")
        (False, False, False)
    """
    if not target.startswith("torch.ops.aten."):
        return _PLAIN.fullmatch(target) is not None
    name, _, overload = target.removeprefix("torch.ops.aten.").partition(".")
    return f"{name}.{overload}" in _ATEN or (name.endswith("_") and f"{name[:-1]}.{overload}" in _ATEN)
