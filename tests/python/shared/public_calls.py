"""Every public call that computes something, forward and backward, as a function of the device alone."""

from collections.abc import Callable

import moegemm
import torch
from conftest import FLAGS, make_case
from raw_calls import RAW, raw_call
from torch import Tensor

Step = Callable[[], list[Tensor]]


def _gradients(out: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad(out.float().square().sum(), wanted)]


def _product(flags: str, dtype: torch.dtype) -> Callable[[str], Step]:
    def build(device: str) -> Step:
        case = make_case(device, flags, dtype, tokens=48, n=64, k=128)
        leaves = [t.requires_grad_() for t in (case.X, case.W, case.topk_weights) if t is not None]
        return lambda: _gradients(moegemm.grouped_gemm(**case.arguments()), leaves)

    return build


def _plain(device: str) -> Step:
    case = make_case(device, topk=1, dtype=torch.bfloat16, n=64, k=128)
    leaves = [case.X.requires_grad_(), case.W.requires_grad_()]
    return lambda: _gradients(moegemm.grouped_gemm(case.X, case.W, case.m_sizes, 1), leaves)


def _function(device: str) -> Step:
    case = make_case(device, "permute_x", torch.bfloat16, n=64, k=128)
    leaves = [case.X.requires_grad_(), case.W.requires_grad_()]
    call = (2, " permute_x", moegemm.autograd.DEFAULTS)
    return lambda: _gradients(
        moegemm.GroupedGemm.apply(case.X, case.W, case.m_sizes, case.gather_indices, None, call), leaves
    )


def _raw(name: str, flags: str) -> Callable[[str], Step]:
    def build(device: str) -> Step:
        case = make_case(device, flags, torch.bfloat16, n=64, k=128)
        dY = torch.randn(case.rows, 64).to(device, torch.bfloat16)
        out = raw_call(name, case, dY=dY, out_dtype=torch.float32)
        return lambda: [
            raw_call(name, case, dY=dY).clone(),
            raw_call(name, case, dY=dY, out=out).clone(),
            raw_call(name, case, dY=dY, out_dtype=torch.float32).clone(),
        ]

    return build


def _main_grad(device: str) -> Step:
    case = make_case(device, "permute_x", torch.bfloat16, n=64, k=128)
    W = case.W.requires_grad_()
    W.main_grad = torch.zeros(W.shape, device=device)

    def step() -> list[Tensor]:
        W.main_grad.zero_()
        moegemm.grouped_gemm(**case.arguments(), accumulate=True).sum().backward()
        return [W.main_grad.clone()]

    return step


def _routing(device: str) -> Step:
    ids = torch.randint(-1, 9, (40, 3)).to(device)
    rows = torch.randn(120, 64).to(device).bfloat16().requires_grad_()
    weights = torch.rand(40, 3).to(device).requires_grad_()

    def step() -> list[Tensor]:
        routed = [*moegemm.route(ids, 8, return_inverse=True), *moegemm.route(ids, 8, dtype=torch.int64)]
        compact = moegemm.route(ids, 8, return_inverse=True, max_rows=100)
        by_position = moegemm.combine(rows, weights, positions=compact[2])
        return [
            *routed,
            *compact,
            *_gradients(moegemm.combine(rows, weights), [rows, weights]),
            *_gradients(by_position, [rows, weights]),
        ]

    return step


def _layer_tensors(device: str, transposed: bool, grad: bool) -> dict[str, Tensor]:
    E, H, inner, T = 6, 128, 64, 40
    shapes = {"w_gate_up": (E, 2 * inner, H), "w_down": (E, H, inner)}
    tensors = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    if transposed:
        tensors = {name: t.transpose(1, 2).contiguous() for name, t in tensors.items()}
    tensors |= {"x": torch.randn(T, H), "gate_up_bias": torch.randn(E, 2 * inner), "down_bias": torch.randn(E, H)}
    tensors = {name: t.to(device, torch.bfloat16) for name, t in tensors.items()}
    tensors["router_weights"] = torch.rand(T, 2).to(device)
    return {name: t.requires_grad_(grad) for name, t in tensors.items()}


def _layer(transposed: bool, grad: bool) -> Callable[[str], Step]:
    def build(device: str) -> Step:
        tensors = _layer_tensors(device, transposed, grad)
        ids = torch.randint(-1, 7, (40, 2)).to(device)

        def step() -> list[Tensor]:
            out = moegemm.moe_mlp(expert_ids=ids, transposed=transposed, **tensors)
            return _gradients(out, list(tensors.values())) if grad else [out]

        return step

    return build


def _layer_main_grads(device: str) -> Step:
    tensors = _layer_tensors(device, False, True)
    ids = torch.randint(6, (40, 2)).to(device)
    weights = [tensors["w_gate_up"], tensors["w_down"]]
    for w in weights:
        w.main_grad = torch.zeros(w.shape, device=device)

    def step() -> list[Tensor]:
        for w in weights:
            w.main_grad.zero_()
        moegemm.moe_mlp(expert_ids=ids, accumulate=True, **tensors).sum().backward()
        return [w.main_grad.clone() for w in weights]

    return step


def _compact_layer(grad: bool) -> Callable[[str], Step]:
    def build(device: str) -> Step:
        tensors = _layer_tensors(device, False, grad)
        ids = torch.randint(-1, 30, (40, 2)).to(device)
        num_tokens, overflow = torch.tensor(33).to(device), torch.tensor(0).to(device)

        def step() -> list[Tensor]:
            limits = {"max_rows": 24, "num_tokens": num_tokens, "overflow": overflow}
            out = moegemm.moe_mlp(expert_ids=ids, **tensors, **limits)
            found = _gradients(out, list(tensors.values())) if grad else [out]
            return [*found, overflow.clone()]

        return step

    return build


def _rows_layer(grad: bool, pair: bool = False) -> Callable[[str], Step]:
    def build(device: str) -> Step:
        tensors = _layer_tensors(device, False, grad)
        rows, weights = tensors.pop("x"), tensors.pop("router_weights").detach()[:, 0].clone().requires_grad_(grad)
        sizes = torch.tensor([7, 0, 12, 3, 9, 5]).to(device)
        if pair:
            halves = tensors["w_gate_up"].detach().chunk(2, 1)
            tensors["w_gate_up"] = tuple(half.requires_grad_(grad) for half in halves)
        pair_of_gates = tensors["w_gate_up"] if pair else (tensors["w_gate_up"],)
        others = [tensor for name, tensor in tensors.items() if name != "w_gate_up"]
        leaves = [rows, weights, *pair_of_gates, *others]
        out, grad_rows = torch.empty_like(rows, requires_grad=False), torch.empty_like(rows, requires_grad=False)

        def step() -> list[Tensor]:
            made = moegemm.experts_mlp(
                rows, sizes=sizes, row_weights=weights, out=out, grad_rows_out=grad_rows, **tensors
            )
            return [t.clone() for t in (_gradients(made, leaves) if grad else [made])]

        return step

    return build


def _weight_gradients(device: str) -> Step:
    tensors = _layer_tensors(device, False, True)
    ids = torch.randint(6, (40, 2)).to(device)
    weights = [tensors["w_gate_up"], tensors["w_down"]]

    def step() -> list[Tensor]:
        later = moegemm.WeightGradients()
        for w in weights:
            w.grad = None
        moegemm.moe_mlp(expert_ids=ids, weight_gradients=later, **tensors).sum().backward()
        later.run()
        return [w.grad.clone() for w in weights]

    return step


def _lora(device: str) -> Step:
    tensors = _layer_tensors(device, False, True)
    ids = torch.randint(6, (40, 2)).to(device)
    adapters = {
        name: moegemm.LoraAdapter(6, k, n, 8, dtype=torch.bfloat16, device=device)
        for name, k, n in (("gate_up", 128, 128), ("down", 64, 128))
    }
    leaves = [*tensors.values(), *(p for adapter in adapters.values() for p in adapter.parameters())]
    return lambda: _gradients(moegemm.lora_moe_mlp(expert_ids=ids, **tensors, **adapters), leaves)


def _tangents(device: str) -> Step:
    case = make_case(device, "permute_y_mul", torch.bfloat16, n=64, k=128)
    primals = (case.X, case.W, case.topk_weights)

    def product(X: Tensor, W: Tensor, weights: Tensor) -> Tensor:
        Y = moegemm.grouped_gemm(**{**case.arguments(), "X": X, "W": W, "topk_weights": weights})
        return moegemm.combine(Y, weights)

    return lambda: list(torch.func.jvp(product, primals, primals))


PUBLIC_CALLS: dict[str, Callable[[str], Step]] = {
    **{f"grouped_gemm {flags} bf16": _product(flags, torch.bfloat16) for flags in FLAGS},
    **{f"grouped_gemm {flags} fp32": _product(flags, torch.float32) for flags in FLAGS},
    "grouped_gemm of a plain call": _plain,
    "GroupedGemm": _function,
    **{f"{name} {flags}": _raw(name, flags) for name in RAW for flags in FLAGS},
    "grouped_gemm into main_grad": _main_grad,
    "route and combine": _routing,
    "moe_mlp": _layer(False, True),
    "moe_mlp transposed": _layer(True, True),
    "moe_mlp inference": _layer(False, False),
    "moe_mlp inference transposed": _layer(True, False),
    "moe_mlp into main_grad": _layer_main_grads,
    "moe_mlp compact": _compact_layer(True),
    "moe_mlp compact inference": _compact_layer(False),
    "experts_mlp": _rows_layer(True),
    "experts_mlp of a pair": _rows_layer(True, pair=True),
    "experts_mlp inference": _rows_layer(False),
    "weight gradients for later": _weight_gradients,
    "lora_moe_mlp": _lora,
    "forward-mode derivatives": _tangents,
}
