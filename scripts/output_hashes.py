"""Hashes the outputs of a fixed list of calls: every operation, dtype, permutation, layout of rows and of weights,
epilogue and backend.

A change of structure must not change a bit: run it before and after, with the same torch on the same machine, and
compare. PYTHONPATH must find the package, MOEGEMM_TORCH_LIBRARY may name the operators.

    python scripts/output_hashes.py > before.txt;  ...;  python scripts/output_hashes.py | diff before.txt -

--trim makes calls of every kind, but few and small ones: tests/python/operators/test_output_hashes.py holds their
hashes against those of tests/data.
"""

import argparse
import hashlib
import itertools
import os
import subprocess
import sys

import moegemm
import torch
from moegemm.activations import FUNCTIONS, GATED_LAYOUTS, Activation
from moegemm.formats import FORMATS as DTYPES
from moegemm.operators.packed import VALUES_PER_ELEMENT

BACKENDS = {"cpu": ("cpu", "reference"), "cuda": ("sm90", "sm80")}
# tokens, topk, experts, n, k: even widths, widths that break 16-byte alignment, wide enough for dW to sort first.
SHAPES = [(150, 3, 7, 72, 136), (61, 2, 5, 35, 51), (40, 2, 4, 4104, 72), (4, 1, 3, 64, 64)]
TRIMMED_SHAPES = [(11, 2, 3, 35, 51)]
FLAGS = {
    "plain": {},
    "permute_x": {"permute_x": True},
    "permute_y": {"permute_y": True},
    "permute_y_mul": {"permute_y": True, "fuse_mul_post": True},
}
WEIGHT_FORMATS = tuple(VALUES_PER_ELEMENT)
ACTIVATIONS = [Activation(function, layout) for function in FUNCTIONS for layout in (*GATED_LAYOUTS, "none")]
CLAMPED = Activation("silu", "interleaved", alpha=1.702, limit=7.0, up_offset=1.0)  # gpt-oss
# Their bits are those of IEEE arithmetic, on every machine.
GATED, UNGATED = Activation("relu", "concatenated"), Activation("relu2", "none")


class Draw:
    """Random tensors, the same ones each time and for every version of torch."""

    def __init__(self, device, seed):
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, dtype):
        """Numbers from -2 to 2 with 24 bits, so that sums round."""
        return (torch.randint(-(1 << 23), 1 << 23, shape, generator=self.generator) * 0.5**22).to(self.device, dtype)

    def ids(self, tokens, topk, experts):
        """Some on no expert."""
        return (torch.randint(experts + 1, (tokens, topk), generator=self.generator) - 1).to(self.device)


def emit(name, function, *args, **kwargs):
    """One line for the tensors that the call returns."""
    digest = hashlib.sha256()
    try:
        result = function(*args, **kwargs)
    except NotImplementedError:  # a backend may leave a problem to another one
        print("refused             ", name)
        return
    for tensor in [result] if isinstance(result, torch.Tensor) else result:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    print(digest.hexdigest()[:20], name)


def inferred(function, **arguments):
    with torch.no_grad():
        return function(**arguments)


def trained(function, d_out, **arguments):
    """The result, and the gradients of all floating tensors among the arguments."""
    leaves = []

    def leaf(value):
        if isinstance(value, moegemm.LowRank):
            return value._replace(A=leaf(value.A), B=leaf(value.B))
        if isinstance(value, tuple):
            return type(value)(map(leaf, value)) if type(value) is tuple else value
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        leaves.append(value.clone().requires_grad_())
        return leaves[-1]

    out = function(**{name: leaf(value) for name, value in arguments.items()})
    return [out, *torch.autograd.grad(out, leaves, d_out)]


def placed(sizes):
    """Where segments begin with gaps between them, and how many rows that takes."""
    room = sizes + torch.arange(len(sizes), device=sizes.device) % 3
    return (room.cumsum(0) - sizes).to(sizes.dtype), int(room.sum()) + 2


def name_of(dtype):
    return DTYPES[dtype].name


def products(device, backend, trim):
    """The raw functions, and their gradients."""
    draw = Draw(device, 1)
    for shape, dtype, (flag, flags) in itertools.product(TRIMMED_SHAPES if trim else SHAPES, DTYPES, FLAGS.items()):
        tokens, topk, experts, n, k = shape
        rows = tokens * topk
        sizes, gather = moegemm.route(draw.ids(tokens, topk, experts), experts)
        X, W = draw(tokens if "permute_x" in flags else rows, k, dtype=dtype), draw(experts, n, k, dtype=dtype)
        dY = draw(rows, n, dtype=dtype)
        weights = draw(rows, dtype=torch.float32) if "fuse_mul_post" in flags else None
        indices = gather if flags else None
        name = f"{backend} {tokens}x{topk} E{experts} {n}x{k} {name_of(dtype)} {flag}"
        for out_dtype, tf32 in ((None, False), (torch.float32, False), (None, True)):
            if (tf32 and dtype != torch.float32) or out_dtype == dtype:
                continue
            options = {"allow_tf32": tf32, "out_dtype": out_dtype, "topk_weights": weights, **flags}
            call = f"{name}{' to fp32' if out_dtype else ''}{' tf32' if tf32 else ''}"
            emit(f"{call} forward", moegemm.grouped_gemm_forward, X, W, topk, sizes, indices, **options)
            emit(f"{call} dX", moegemm.grouped_gemm_dX, dY, W, indices, sizes, topk, **options)
            emit(f"{call} dW", moegemm.grouped_gemm_dW, X, dY, sizes, indices, topk, **options)
        arguments = {"m_sizes": sizes, "topk": topk, "gather_indices": indices, **flags}
        arguments |= {"topk_weights": weights, "is_first_gemm": "permute_y" not in flags}
        emit(f"{name} autograd", trained, moegemm.grouped_gemm, dY, X=X, W=W, **arguments)


def products_of_packed_weights(device, backend, trim):
    """Forward and dX of every format, rows in order and permuted."""
    draw = Draw(device, 2)
    tokens, topk, experts, n, k = (7, 2, 3, 40, 128) if trim else (150, 3, 7, 136, 256)
    dtypes = [torch.bfloat16] if trim else DTYPES
    for word, dtype, (flag, flags) in itertools.product(WEIGHT_FORMATS, dtypes, FLAGS.items()):
        rows = tokens * topk
        sizes, gather = moegemm.route(draw.ids(tokens, topk, experts), experts)
        W = moegemm.quantize(draw(experts, n, k, dtype=dtype), word)
        X, dY = draw(tokens if "permute_x" in flags else rows, k, dtype=dtype), draw(rows, n, dtype=dtype)
        weights = draw(rows, dtype=torch.float32) if "fuse_mul_post" in flags else None
        indices, options = gather if flags else None, {"topk_weights": weights, **flags}
        name = f"{backend} {tokens}x{topk} E{experts} {n}x{k} {name_of(dtype)} {word} {flag}"
        emit(f"{name} forward", moegemm.grouped_gemm_forward, X, W, topk, sizes, indices, **options)
        emit(f"{name} dX", moegemm.grouped_gemm_dX, dY, W, indices, sizes, topk, **options)
        emit(f"{name} dequantise", W.dequantize, dtype)


def products_of_placed_rows(device, backend, trim):
    """Segments with gaps between them."""
    draw = Draw(device, 3)
    for (tokens, topk, experts, n, k), dtype in itertools.product(TRIMMED_SHAPES if trim else SHAPES, DTYPES):
        sizes, _ = moegemm.route(draw.ids(tokens, topk, experts), experts)
        starts, rows = placed(sizes)
        X, W, dY = draw(rows, k, dtype=dtype), draw(experts, n, k, dtype=dtype), draw(rows, n, dtype=dtype)
        arguments = {"m_sizes": sizes, "topk": 1, "starts": starts}
        name = f"{backend} {rows} rows E{experts} {n}x{k} {name_of(dtype)} placed"
        emit(f"{name} forward", inferred, moegemm.grouped_gemm_forward, X=X, W=W, **arguments)
        emit(f"{name} autograd", trained, moegemm.grouped_gemm, dY, X=X, W=W, **arguments)


def layouts_of_rows(sizes, draw, columns, dtype):
    """What experts_mlp takes: by name the rows and where those of each expert are."""
    starts, room = placed(sizes)
    total, capacity = int(sizes.sum()), int(sizes.max()) + 1
    return {
        "packed": (draw(total, columns, dtype=dtype), {"sizes": sizes}),
        "placed": (draw(room, columns, dtype=dtype), {"sizes": sizes, "starts": starts}),
        "ends": (draw(total, columns, dtype=dtype), {"sizes": sizes.cumsum(0).to(sizes.dtype)[None]}),
        "masked": (draw(len(sizes), capacity, columns, dtype=dtype), {"sizes": sizes}),
    }


def layer_cases(trim):
    """Activations, how the weights are held, and whether there are biases."""
    every = [GATED, UNGATED] if trim else [*ACTIVATIONS, CLAMPED]
    yield from itertools.product(every, ("plain", "transposed"), (False, True))
    yield from itertools.product([GATED], ("pair", *WEIGHT_FORMATS), [True] if trim else (False, True))


def held(weights, how):
    """[E, N, K] as a layer may hold it."""
    if how == "transposed":
        return weights.transpose(1, 2).contiguous()
    if how == "pair":
        return tuple(half.contiguous() for half in weights.chunk(2, 1))
    return moegemm.quantize(weights, how) if how in WEIGHT_FORMATS else weights


def layers(device, backend, trim):
    """Whole layers: tokens, tokens with a capacity, rows in expert order, and adapters."""
    draw = Draw(device, 4)
    tokens, topk, experts, hidden, inner, rank = (9, 2, 3, 64, 64, 5) if trim else (45, 3, 6, 64, 64, 12)
    dtypes = [torch.bfloat16] if trim else (torch.bfloat16, torch.float32)
    for dtype, (activation, how, biased) in itertools.product(dtypes, layer_cases(trim)):
        columns = 2 * inner if activation.gated() else inner
        x, d_out = draw(tokens, hidden, dtype=dtype), draw(tokens, hidden, dtype=dtype)
        ids, weights = draw.ids(tokens, topk, experts), draw(tokens, topk, dtype=torch.float32)
        first, second = draw(experts, columns, hidden, dtype=dtype), draw(experts, hidden, inner, dtype=dtype)
        layer = {"w_gate_up": held(first, how), "w_down": held(second, "plain" if how == "pair" else how)}
        layer |= {"activation": activation, "transposed": how == "transposed"}
        if biased:
            bias = draw(experts, columns, dtype=dtype)
            layer["gate_up_bias"] = bias.chunk(2, 1) if how == "pair" else bias
            layer["down_bias"] = draw(experts, hidden, dtype=dtype)
        name = f"{backend} layer {name_of(dtype)} {activation.text()} {how}{' biased' if biased else ''}"
        routed = {"x": x, "expert_ids": ids, "router_weights": weights, **layer}
        emit(f"{name} inference", inferred, moegemm.moe_mlp, **routed)
        emit(f"{name} training", trained, moegemm.moe_mlp, d_out, **routed)
        emit(f"{name} capacity", trained, moegemm.moe_mlp, d_out, max_rows=tokens * topk, **routed)
        sizes, _ = moegemm.route(ids, experts)
        for layout, (rows, where) in layouts_of_rows(sizes, draw, hidden, dtype).items():
            factors = draw(*rows.shape[:-1], dtype=torch.float32)
            arguments = {"rows": rows, "row_weights": factors, **where, **layer}
            emit(f"{name} {layout} rows", trained, moegemm.experts_mlp, rows.flip(0), **arguments)
        if how != "pair":
            pairs = [
                moegemm.LowRank(*(draw(experts, *ab, dtype=torch.float32) for ab in ((rank, k), (n, rank))), 0.5)
                for n, k in ((columns, hidden), (hidden, inner))
            ]
            adapters = {"gate_up": pairs[0], "down": pairs[1]}
            emit(f"{name} adapters", trained, moegemm.lora_moe_mlp, d_out, **adapters, **routed)


def passes(device, backend, trim):
    draw = Draw(device, 5)
    tokens, topk, experts, hidden = (9, 2, 3, 24) if trim else (45, 3, 6, 64)
    ids, weights = draw.ids(tokens, topk, experts), draw(tokens, topk, dtype=torch.float32)
    rows = draw(tokens * topk, hidden, dtype=torch.bfloat16)
    emit(f"{backend} route", moegemm.route, ids, experts, return_inverse=True)
    emit(f"{backend} combine", moegemm.combine, rows, weights)
    emit(f"{backend} sum", moegemm.combine, rows, None, topk)


GROUPS = (products, products_of_packed_weights, products_of_placed_rows, layers, passes)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=[b for all_of in BACKENDS.values() for b in all_of], help="only this one")
    parser.add_argument("--trim", action="store_true", help="few and small calls")
    options = parser.parse_args()
    if os.environ.get("MOEGEMM_BACKEND") != options.backend or options.backend is None:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        every = [backend for device in devices for backend in BACKENDS[device]]
        for one in [options.backend] if options.backend else every:
            # The choice of a backend is a variable of the process.
            command = [sys.executable, __file__, "--backend", one, *(["--trim"] if options.trim else [])]
            subprocess.run(command, env=os.environ | {"MOEGEMM_BACKEND": one}, check=True)
        return
    device = next(d for d, all_of in BACKENDS.items() if options.backend in all_of)
    for group in GROUPS:
        group(device, options.backend, options.trim)


if __name__ == "__main__":
    main()
