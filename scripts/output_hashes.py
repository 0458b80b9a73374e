"""Hashes the outputs of a fixed list of calls: every operation, dtype, permutation, epilogue and backend.

A change of structure must not change a bit: run it before and after, with the same torch on the same machine, and
compare. PYTHONPATH must find the package, MOEGEMM_TORCH_LIBRARY may name the operators.

    python scripts/output_hashes.py > before.txt;  ...;  python scripts/output_hashes.py | diff before.txt -
"""

import argparse
import hashlib
import itertools
import os
import subprocess
import sys

import moegemm
import torch

BACKENDS = {"cpu": ("cpu", "reference"), "cuda": ("sm90", "sm80")}
# tokens, topk, experts, n, k: even widths, widths that break 16-byte alignment, wide enough for dW to sort first.
SHAPES = [(150, 3, 7, 72, 136), (61, 2, 5, 35, 51), (40, 2, 4, 4104, 72), (4, 1, 3, 64, 64)]
FLAGS = {
    "plain": {},
    "permute_x": {"permute_x": True},
    "permute_y": {"permute_y": True},
    "permute_y_mul": {"permute_y": True, "fuse_mul_post": True},
}
GATED = ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu")
ACTIVATIONS = (*GATED, "silu", "gelu", "gelu_tanh", "relu2")


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


class Draw:
    """Random tensors, the same ones each time."""

    def __init__(self, device, seed):
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, dtype):
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype)

    def ids(self, tokens, topk, experts):
        """Some on no expert."""
        return (torch.randint(experts + 1, (tokens, topk), generator=self.generator) - 1).to(self.device)


def train_product(X, W, weights, dY, *routing, **flags):
    leaves = [tensor.clone().requires_grad_() for tensor in (X, W, weights) if tensor is not None]
    flags |= {"topk_weights": leaves[2] if weights is not None else None, "is_first_gemm": "permute_y" not in flags}
    Y = moegemm.grouped_gemm(leaves[0], leaves[1], *routing, **flags)
    return [Y, *torch.autograd.grad(Y, leaves, dY)]


def products(device, backend):
    """The raw functions, and their gradients."""
    draw = Draw(device, 1)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for (tokens, topk, experts, n, k), dtype, (flag, flags) in itertools.product(SHAPES, dtypes, FLAGS.items()):
        rows = tokens * topk
        sizes, gather = moegemm.route(draw.ids(tokens, topk, experts), experts)
        X, W = draw(tokens if "permute_x" in flags else rows, k, dtype=dtype), draw(experts, n, k, dtype=dtype)
        dY = draw(rows, n, dtype=dtype)
        weights = draw(rows, dtype=torch.float32) if "fuse_mul_post" in flags else None
        indices = gather if flags else None
        name = f"{backend} {tokens}x{topk} E{experts} {n}x{k} {dtype} {flag}"
        for out_dtype, tf32 in ((None, False), (torch.float32, False), (None, True)):
            if (tf32 and dtype != torch.float32) or out_dtype == dtype:
                continue
            options = {"allow_tf32": tf32, "out_dtype": out_dtype, "topk_weights": weights, **flags}
            call = f"{name} {out_dtype} tf32={tf32}"
            emit(f"{call} forward", moegemm.grouped_gemm_forward, X, W, topk, sizes, indices, **options)
            emit(f"{call} dX", moegemm.grouped_gemm_dX, dY, W, indices, sizes, topk, **options)
            emit(f"{call} dW", moegemm.grouped_gemm_dW, X, dY, sizes, indices, topk, **options)
        emit(f"{name} autograd", train_product, X, W, weights, dY, sizes, topk, indices, **flags)


@torch.no_grad()
def infer_layer(*tensors, **options):
    return moegemm.moe_mlp(*tensors, **options)


def train_layer(d_out, x, w1, w2, ids, weights, gate_up_bias=None, down_bias=None, **options):
    leaves = [t.clone().requires_grad_() for t in (x, w1, w2, weights, gate_up_bias, down_bias) if t is not None]
    biases = dict(zip(("gate_up_bias", "down_bias"), leaves[4:], strict=False))
    out = moegemm.moe_mlp(*leaves[:3], ids, leaves[3], **biases, **options)
    return [out, *torch.autograd.grad(out, leaves, d_out)]


def layers(device, backend):
    """The layer, and what stands around the products."""
    draw = Draw(device, 2)
    tokens, topk, experts, hidden, inner = 45, 3, 6, 64, 48
    choices = itertools.product((torch.bfloat16, torch.float32), ACTIVATIONS, (False, True), (False, True))
    for dtype, activation, transposed, biased in choices:
        columns = 2 * inner if activation in GATED else inner
        up, down = (columns, hidden), (hidden, inner)
        w1, w2 = (draw(experts, *(shape[::-1] if transposed else shape), dtype=dtype) for shape in (up, down))
        options = {"activation": activation, "transposed": transposed}
        if activation == "clamped_swiglu":
            options["layout"] = "interleaved"
        if biased:
            options["gate_up_bias"] = draw(experts, columns, dtype=dtype)
            options["down_bias"] = draw(experts, hidden, dtype=dtype)
        x, d_out = draw(tokens, hidden, dtype=dtype), draw(tokens, hidden, dtype=dtype)
        ids, weights = draw.ids(tokens, topk, experts), draw(tokens, topk, dtype=torch.float32)
        name = f"{backend} layer {dtype} {activation} transposed={transposed} bias={biased}"
        emit(f"{name} inference", infer_layer, x, w1, w2, ids, weights, **options)
        emit(f"{name} training", train_layer, d_out, x, w1, w2, ids, weights, **options)
    rows = draw(tokens * topk, hidden, dtype=torch.bfloat16)
    emit(f"{backend} route", moegemm.route, ids, experts, return_inverse=True)
    emit(f"{backend} combine", moegemm.combine, rows, weights)
    emit(f"{backend} sum", moegemm.combine, rows, None, topk)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=[b for all_of in BACKENDS.values() for b in all_of], help="only this one")
    backend = parser.parse_args().backend
    if backend is None:  # the choice of a backend is a variable of the process
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        for one in (b for device in devices for b in BACKENDS[device]):
            environment = {**os.environ, "MOEGEMM_BACKEND": one}
            subprocess.run([sys.executable, __file__, "--backend", one], env=environment, check=True)
        return
    device = next(d for d, all_of in BACKENDS.items() if backend in all_of)
    products(device, backend)
    layers(device, backend)


if __name__ == "__main__":
    main()
