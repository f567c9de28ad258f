"""Names of torch: one spelling for each thing, and small sets that say what kind of thing it is.

What a call *means* for a capture stands in the rulebook; here is only what it gives back.
"""

from __future__ import annotations

from graphlint.flow.values import Host, Symbol, Value, const

_ALIASES = {
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.autocast": "torch.amp.autocast",
    "torch.autocast": "torch.amp.autocast",
    "torch.random.manual_seed": "torch.manual_seed",
    "torch.cuda.random.manual_seed": "torch.cuda.manual_seed",
    "torch.random.fork_rng": "torch.random.fork_rng",
    "torch.nn.utils.clip_grad.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "torch.nn.utils.clip_grad.clip_grad_value_": "torch.nn.utils.clip_grad_value_",
    "torch.nn.parameter.Parameter": "torch.nn.Parameter",
    "torch.nn.parameter.Buffer": "torch.nn.Buffer",
    "torch.autograd.function.Function": "torch.autograd.Function",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "torch.cuda.streams.Stream": "torch.cuda.Stream",
    "torch.cuda.streams.Event": "torch.cuda.Event",
    "torch.Stream": "torch.cuda.Stream",
    "torch.Event": "torch.cuda.Event",
    "torch._C.Generator": "torch.Generator",
    "torch.linalg.linalg_inv": "torch.linalg.inv",
    "torch.inverse": "torch.linalg.inv",
    "torch.arccos": "torch.acos",
    "torch.checkpoint": "torch.utils.checkpoint.checkpoint",
    "transformer_engine.pytorch.graph.make_graphed_callables": "transformer_engine.pytorch.make_graphed_callables",
    "graphlint.runtime.guard.capture_safe": "graphlint.capture_safe",
    "graphlint.runtime.capture_safe": "graphlint.capture_safe",
}  # fmt: skip
_PREFIXES = (
    ("torch.cuda.graphs.", "torch.cuda."),
    ("torch.nn.modules.", "torch.nn."),
    ("torch.distributed.distributed_c10d.", "torch.distributed."),
    ("torch.distributed._functional_collectives.", "torch.distributed._functional_collectives."),
    ("flash_attn.flash_attn_interface.", "flash_attn."),
)
_OPTIM_FILES = frozenset(
    {
        "adam",
        "adamw",
        "sgd",
        "adagrad",
        "rmsprop",
        "adadelta",
        "adamax",
        "nadam",
        "radam",
        "asgd",
        "rprop",
        "lbfgs",
        "sparse_adam",
        "adafactor",
    }
)

DTYPES = {
    "bool": "bool", "uint8": "int", "int8": "int", "int16": "int", "int32": "int", "int64": "int", "short": "int", "int": "int", "long": "int",
    "uint16": "int", "uint32": "int", "uint64": "int",
    "float16": "float", "bfloat16": "float", "float32": "float", "float64": "float", "half": "float", "float": "float", "double": "float",
    "float8_e4m3fn": "float", "float8_e5m2": "float", "complex64": "float", "complex128": "float", "cfloat": "float",
}  # fmt: skip

_KERNEL_MAKERS = frozenset({"jit", "njit", "kernel", "prim_func"})


def is_kernel_decorator(text: str) -> bool:
    """Whether a decorator, as it is written, compiles the function for the device: `triton.jit`, `cute.kernel`,
    `wp.kernel`, `numba.njit`."""
    head, _, last = text.rpartition(".")
    return bool(head) and not head.startswith("torch") and (last in _KERNEL_MAKERS or text in ("wp.func", "warp.func"))


BACKENDS = ("cuda", "npu", "xpu", "musa", "hpu", "mlu", "gcu", "accelerator", "tpu")


def canonical(name: str) -> str:
    """One spelling for each name."""
    if not name.startswith(("torch", "flash_attn", "transformer_engine", "graphlint")):
        return name
    for prefix, short in _PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            if prefix == "torch.nn.modules.":
                rest = rest.rpartition(".")[2]
            name = short + rest
            break
    parts = name.split(".")
    if len(parts) == 4 and parts[:2] == ["torch", "optim"] and parts[2] in _OPTIM_FILES:
        name = f"torch.optim.{parts[3]}"
    if name.startswith("torch_npu.npu."):
        name = "torch.npu." + name[len("torch_npu.npu.") :]
    return _ALIASES.get(name, name)


def symbol(name: str) -> Value:
    """The value of a name outside the project: a symbol, or the constant it is known to be."""
    name = canonical(name)
    if name.startswith("torch."):
        last = name[6:]
        if last in DTYPES:
            return Host("dtype", DTYPES[last])
        if last in ("inf", "nan", "pi", "e"):
            return Host("float")
        if last in ("strided", "channels_last", "preserve_format", "contiguous_format", "sparse_coo"):
            return Host("str")
    if name in ("math.pi", "math.e", "math.inf", "math.nan", "math.tau", "numpy.pi", "numpy.inf"):
        return Host("float")
    if name in ("torch.backends.cudnn.enabled", "torch.backends.cudnn.is_available"):
        return Symbol(name)
    if name == "typing.TYPE_CHECKING":
        return const(False)
    if name == "os.environ":
        return Symbol(name)
    return Symbol(name)


# --- tensors ---------------------------------------------------------------------------------------------------------

HOST_METHODS = frozenset({
    "size", "dim", "numel", "nelement", "ndimension", "stride", "is_contiguous", "element_size", "data_ptr",
    "storage_offset", "get_device", "is_floating_point",
    "is_complex", "is_signed", "is_pinned", "is_shared", "is_set_to", "untyped_storage", "storage", "type",
    "has_names", "is_inference", "nbytes", "itemsize",
})  # fmt: skip
HOST_ATTRIBUTES = frozenset({
    "ndim", "is_cuda", "requires_grad", "is_leaf", "layout", "is_sparse", "is_quantized", "names", "nbytes",
    "itemsize", "grad_fn", "output_nr", "is_nested", "is_meta", "is_cpu",
})  # fmt: skip
VIEWS = frozenset({
    "view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "expand_as", "flatten", "narrow",
    "select", "detach", "unfold",
    "as_strided", "view_as", "swapaxes", "swapdims", "movedim", "diagonal", "real", "imag", "unflatten",
    "requires_grad_", "alias", "contiguous", "ravel", "adjoint", "data", "reshape_as",
})  # fmt: skip
VIEW_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
MANY_VIEWS = frozenset({"chunk", "split", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit", "split_with_sizes"})
BOOLEAN = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_and", "logical_or", "logical_not",
    "logical_xor", "any", "all", "isclose", "isin", "signbit", "bool",
    "less", "greater", "less_equal", "greater_equal", "not_equal", "isposinf", "isneginf",
})  # fmt: skip
INTEGER = frozenset({
    "argmax", "argmin", "argsort", "searchsorted", "bucketize", "multinomial", "long", "int", "short", "count_nonzero",
    "randint", "randint_like", "randperm", "argwhere", "nonzero",
})  # fmt: skip
FLOATING = frozenset({
    "float", "half", "bfloat16", "double", "sigmoid", "softmax", "log_softmax", "exp", "log", "sqrt", "rsqrt", "mean",
    "std", "var", "norm", "sin", "cos", "tanh",
})  # fmt: skip
REDUCTIONS = frozenset({
    "sum", "mean", "max", "min", "prod", "any", "all", "norm", "std", "var", "argmax", "argmin", "median", "amax",
    "amin", "logsumexp", "count_nonzero", "nansum", "nanmean", "mode", "cummax", "aminmax",
})  # fmt: skip
PAIRS = frozenset({"max", "min", "sort", "topk", "median", "mode", "kthvalue", "cummax", "cummin", "nanmedian"})
# methods that only tensors have: their result is a tensor whatever is known of the receiver
TENSOR_ONLY = frozenset({
    "view", "unsqueeze", "permute", "masked_fill", "masked_fill_", "softmax", "log_softmax", "contiguous", "detach",
    "expand", "expand_as", "matmul", "bmm", "scatter_", "scatter_add_",
    "index_select", "index_add_", "index_copy_", "gather", "masked_select", "new_zeros", "new_empty", "new_ones",
    "new_full", "view_as", "type_as", "requires_grad_", "zero_", "fill_", "copy_",
    "add_", "mul_", "sub_", "div_", "unbind", "chunk", "backward", "bfloat16", "half", "sigmoid", "rsqrt", "clamp",
    "clamp_", "clamp_min", "unfold", "narrow", "scatter", "mT", "logical_not",
    "sigmoid_", "uniform_", "normal_", "bernoulli_", "exponential_", "retain_grad", "register_hook", "is_contiguous",
    "data_ptr", "numel", "new_tensor", "swapaxes_", "addmm", "baddbmm", "tril", "triu",
})  # fmt: skip
TENSOR_ONLY_ATTRIBUTES = frozenset({"is_cuda", "requires_grad", "grad_fn", "is_leaf", "mT", "grad"})

FACTORIES = frozenset({
    "zeros", "ones", "empty", "full", "arange", "linspace", "logspace", "eye", "rand", "randn", "randint", "randperm",
    "tensor", "as_tensor", "scalar_tensor", "empty_strided",
    "tril_indices", "triu_indices", "from_numpy", "asarray", "hann_window", "hamming_window", "kaiser_window",
    "bartlett_window", "blackman_window", "frombuffer", "normal", "range", "sparse_coo_tensor", "complex_zeros",
    "FloatTensor", "HalfTensor", "BFloat16Tensor", "DoubleTensor", "LongTensor", "IntTensor", "ShortTensor",
    "ByteTensor", "BoolTensor", "Tensor",
})  # fmt: skip
LIKE = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"})
NO_TENSOR = frozenset({
    "is_tensor", "is_grad_enabled", "set_grad_enabled", "is_floating_point", "is_complex", "numel",
    "get_default_dtype", "set_default_dtype", "set_default_device", "set_default_tensor_type",
    "manual_seed", "seed", "initial_seed", "set_printoptions", "use_deterministic_algorithms",
    "are_deterministic_algorithms_enabled", "set_float32_matmul_precision", "get_float32_matmul_precision",
    "is_inference_mode_enabled",
    "save", "is_nonzero", "equal", "allclose", "is_storage", "get_num_threads", "set_num_threads", "compile",
    "is_distributed", "is_autocast_enabled", "get_autocast_dtype", "finfo", "iinfo", "device", "Generator", "no_grad",
    "inference_mode",
    "enable_grad", "load", "result_type", "promote_types", "can_cast", "typename", "Size", "get_device_module",
    "_assert_async", "_assert",
})  # fmt: skip

COLLECTIVES = frozenset({
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast",
    "reduce", "all_to_all", "all_to_all_single", "gather", "scatter",
    "barrier", "send", "isend", "irecv",
})  # fmt: skip
