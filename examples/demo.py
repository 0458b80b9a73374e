"""What `make demo` runs: the operations of a Mixture-of-Experts layer beside torch on this machine, then a small model
trained with moegemm and without. Everything is timed in turns and compared by medians.

    python examples/demo.py                      # the GPU if torch sees one, else the CPU
    python examples/demo.py --device cpu --out /tmp/demo
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("python", "benchmarks", "examples")]

import moegemm  # noqa: E402 - found through the line above, as what follows
import train_moe  # noqa: E402
from moegemm.bench import contenders  # noqa: E402
from moegemm.bench.cases import OPS, Case, Model, read_catalogue  # noqa: E402
from moegemm.bench.operands import Routing, draw_experts, make_operands, make_weights  # noqa: E402
from moegemm.bench.timing import Calls, Clock, spread  # noqa: E402

# What a user asks of the products, in words.
PRODUCTS = {
    "fwd1": "first product: gather",
    "fwd2": "second product: multiply, scatter",
    "dx1": "its dX: scatter",
    "dx2": "its dX: gather",
    "dw1": "its dW: gather",
    "dw2": "its dW: gather",
}
LEAST_ROUNDS, MOST_ROUNDS = 5, 21
SECONDS = 2.0  # of one operation's turns, where they are that quick
UNSTEADY = 1.5  # quartiles this far apart are worth a word: the machine was busy


@dataclass
class Line:
    """Medians in milliseconds. `unsteady` is the wider ratio of quartiles of the two."""

    name: str
    ours: float
    theirs: float
    theirs_by: str
    unsteady: float
    check: str = ""

    @classmethod
    def of(cls, name: str, times: dict[str, list[float]], check: str = "") -> "Line":
        """The first is ours; of the others the fastest counts."""
        mine, *others = times
        best = min(others, key=lambda other: statistics.median(times[other]))
        wide = max(quartile_ratio(times[who]) for who in (mine, best))
        return cls(name, spread(times[mine])["ms"], spread(times[best])["ms"], best, wide, check)


def in_turns(clock: Clock, calls: Calls, flops: float = 0.0) -> dict[str, list[float]]:
    """As many turns as fit into the time. One slow second decides no median of five."""
    once = sum(times[0] for times in clock.round_robin(calls, 1, flops).values()) / 1e3
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(SECONDS / max(once, 1e-6))))
    return clock.round_robin(calls, rounds, flops)


def quartile_ratio(times: list[float]) -> float:
    low, _, high = statistics.quantiles(times, n=4)
    return high / low


def product_line(case: Case, W: Tensor | None, device: str, clock: Clock) -> Line:
    o = make_operands(case, W, device, torch.bfloat16, seed=0)
    who = {
        "moegemm": contenders.ours(o),
        "grouped_mm": contenders.torch_with_copies(o),
        "expert loop": contenders.expert_loop(o),
    }
    checked = contenders.check(who["moegemm"])
    times = in_turns(clock, {name: c.run for name, c in who.items()}, case.flops)
    return Line.of(PRODUCTS[case.op], times, "ok" if checked["correct"] else f"WRONG: error {checked['error']}")


def pass_lines(model: Model, tokens: int, device: str, clock: Clock) -> list[Line]:
    """What stands before and after the products: routing, and the sum over a token's experts."""
    ids = draw_experts(Case(model, tokens, "random", "fwd1"), device, seed=0)
    rows, dtype = tokens * model.topk, torch.bfloat16
    y = torch.randn(rows, model.hidden, device=device).to(dtype)
    weights = torch.rand(tokens, model.topk, device=device)

    def weighted_sum() -> Tensor:
        return (y.view(tokens, model.topk, -1) * weights[..., None]).sum(1).to(dtype)

    def sort() -> object:
        flat = ids.reshape(-1)
        return flat.sort(stable=True).indices, torch.bincount(flat, minlength=model.experts)

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "route": (lambda: moegemm.route(ids, model.experts), sort),
        "combine: weighted sum": (lambda: moegemm.combine(y, weights), weighted_sum),
    }
    return [
        Line.of(name, in_turns(clock, {"moegemm": ours, "torch": theirs})) for name, (ours, theirs) in pairs.items()
    ]


class Layer:
    """The whole expert layer on the same weights: moe_mlp, and one expert after the other."""

    def __init__(self, model: Model, tokens: int, device: str) -> None:
        torch.manual_seed(0)
        experts, hidden, inner = model.experts, model.hidden, model.intermediate
        self.x = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        first, second = (experts, 2 * inner, hidden), (experts, hidden, inner)
        self.gate_up, self.down = (
            (torch.randn(shape, device=device) * shape[-1] ** -0.5).bfloat16().requires_grad_()
            for shape in (first, second)
        )
        self.ids = draw_experts(Case(model, tokens, "random", "fwd1"), device, seed=0)
        self.weights = torch.rand(tokens, model.topk, device=device).bfloat16().requires_grad_()
        self.d_out = torch.randn_like(self.x)

    def by_moegemm(self) -> Tensor:
        return moegemm.moe_mlp(self.x, self.gate_up, self.down, self.ids, self.weights)

    def by_loop(self) -> Tensor:
        out = torch.zeros_like(self.x)
        routing = Routing.of(self.ids, self.gate_up.size(0))
        flat_weights = self.weights.reshape(-1)
        for expert, begin, end in routing.segments():
            if begin == end:
                continue
            flat = routing.gather[begin:end]
            token = routing.token_of_row[begin:end]
            gate, up = torch.nn.functional.linear(self.x[token], self.gate_up[expert]).chunk(2, dim=-1)
            y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, self.down[expert])
            out = out.index_add(0, token, y * flat_weights[flat, None])
        return out

    def backward(self, forward: Callable[[], Tensor]) -> None:
        leaves = (self.x, self.gate_up, self.down, self.weights)
        torch.autograd.grad(forward(), leaves, self.d_out)


def without_gradients(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return torch.no_grad()(forward)


def layer_lines(model: Model, tokens: int, device: str, clock: Clock) -> list[Line]:
    layer = Layer(model, tokens, device)
    with torch.no_grad():
        mine, theirs = layer.by_moegemm().float(), layer.by_loop().float()
    # Both round to bf16 (8 bits) at each of three steps, and the loop at every sum.
    error = float((mine - theirs).norm() / theirs.norm())
    check = "ok" if error < 0.02 else f"WRONG: differs by {error:.3f}"
    calls = {"moegemm": layer.by_moegemm, "expert loop": layer.by_loop}
    forward = {name: without_gradients(call) for name, call in calls.items()}
    both = {name: lambda call=call: layer.backward(call) for name, call in calls.items()}
    return [
        Line.of("whole layer, forward", in_turns(clock, forward), check),
        Line.of("whole layer, with gradients", in_turns(clock, both)),
    ]


def transformers_lines(model: Model, tokens: int, clock: Clock) -> list[Line]:
    """On a GPU: the layer against the experts that transformers runs by default."""
    from layer.contenders import Layer as Compared  # needs transformers

    compared = Compared.of(model, tokens, torch.bfloat16, "cuda")
    names = ("moegemm", "grouped_mm")
    forward = in_turns(clock, {name: compared.forward(name) for name in names})
    both = in_turns(clock, {name: compared.forward_backward(name) for name in names})
    theirs = "transformers grouped_mm"
    return [
        Line.of(name, {"moegemm": times["moegemm"], theirs: times["grouped_mm"]})
        for name, times in (("whole layer, forward", forward), ("whole layer, with gradients", both))
    ]


def measure(model: Model, tokens: int, device: str) -> list[Line]:
    clock = Clock(device)
    by_op: dict[str, Line] = {}
    weights: dict[str, Tensor] = {}
    progress = tqdm(OPS, desc="operations", leave=False, disable=None)
    for op in progress:
        case = Case(model, tokens, "random", op)
        which = op[-1]
        if which not in weights:
            weights[which] = make_weights(case, device, torch.bfloat16)
        by_op[op] = product_line(case, None if op.startswith("dw") else weights[which], device, clock)
    weights.clear()
    route, combine = pass_lines(model, tokens, device, clock)
    return [route, *(by_op[op] for op in OPS), combine, *layer_lines(model, tokens, device, clock)]


def show(lines: list[Line]) -> None:
    print(f"{'operation':<34} {'moegemm':>10} {'torch':>10} {'faster':>8}  {'torch by':<24} check")
    print(f"{'':-<34} {'':->10} {'':->10} {'':->8}  {'':-<24} -----")
    for line in lines:
        ratio = f"{line.theirs / line.ours:.2f}x"
        times = f"{line.ours:7.3f} ms {line.theirs:7.3f} ms"
        print(f"{line.name:<34} {times} {ratio:>8}  {line.theirs_by:<24} {line.check}".rstrip())


def operations(device: str, tokens: int | None, name: str | None) -> bool:
    """Prints the tables; whether every result was right."""
    cuda = device == "cuda"
    model = read_catalogue()[name or ("qwen3-30b-a3b" if cuda else "demo")]
    tokens = tokens or (8192 if cuda else 256)
    info = moegemm.info()
    where = torch.cuda.get_device_name() if cuda else f"{info['cpu']['model']}, {torch.get_num_threads()} threads"
    print(f"moegemm {info['version']} beside torch {torch.__version__} on {where}")
    if not cuda and Path("/dev/nvidiactl").exists():
        print(f"The GPU of this machine is not used: {info['why_no_gpu'] or 'this torch was built without CUDA'}.")
    print(
        f"one layer: {model.experts} experts, top {model.topk}, hidden {model.hidden}, intermediate "
        f"{model.intermediate}; {tokens} tokens, bf16, random routing; medians of up to {MOST_ROUNDS} turns\n"
    )
    lines = measure(model, tokens, device)
    show(lines)
    if cuda:
        try:
            against = transformers_lines(model, tokens, Clock(device))
        except ModuleNotFoundError as missing:
            print(f"\nnot compared with transformers: {missing.name} is not installed in this environment")
        else:
            print('\nthe same layer beside Hugging Face transformers\' experts_implementation="grouped_mm":')
            show(against)
            lines += against
    widest = max(line.unsteady for line in lines)
    if widest > UNSTEADY:
        print(f"\nThe machine was busy: half of some times lie {widest:.1f} times apart, so read the ratios with care.")
    return all(not line.check.startswith("WRONG") for line in lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_device = "cuda" if torch.cuda.is_available() and moegemm.info()["gpus"] else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default_device, help="default: %(default)s")
    parser.add_argument("--model", choices=sorted(read_catalogue()), help="default: qwen3-30b-a3b on a GPU, else demo")
    parser.add_argument("--tokens", type=int, help="default: 8192 on a GPU, else 256")
    parser.add_argument("--steps", type=int, default=train_moe.QUICK_STEPS, help="of training (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where the picture goes")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    right = operations(options.device, options.tokens, options.model)
    print(f"\nA small MoE transformer, {options.steps} steps, once with moegemm and once with a loop over the experts:")
    picture = options.out / "training.png"
    same = train_moe.compare(options.steps, options.device, 0, train_moe.TOLERANCE, picture)
    if not right or not same:
        print("\nSOMETHING IS WRONG above: please report it with the output of `moegemm info`.")
        return 1
    print(
        "\nTry next: `. .venv/bin/activate`, then `moegemm plan qwen3-30b-a3b --tokens 64`: what each product of a "
        "model runs here, and why. README.md has the lines for your own model."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
