"""What `make demo` runs: the operations of a Mixture-of-Experts layer beside torch on this machine, then a small model
trained with moegemm and without. Everything is timed in turns and compared by medians.

    python examples/demo.py                      # the GPU if torch sees one, else the CPU
    python examples/demo.py --device cpu --out /tmp/demo
"""

import argparse
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from moegemm.bench.timing import Clock, spread  # noqa: E402

# What a user asks of the products, in words.
PRODUCTS = {
    "fwd1": "first product: gather",
    "fwd2": "second product: multiply, scatter",
    "dx1": "its dX: scatter",
    "dx2": "its dX: gather",
    "dw1": "its dW: gather",
    "dw2": "its dW: gather",
}
LEAST_TURNS, MOST_TURNS = 5, 21
SECONDS = 2.0  # of one operation's turns, where they are that quick
SLOW, TURNS_OF_SLOW = 2.0, 3  # seconds of one turn, and turns of an operation that takes longer
MOST_SECONDS = 60.0  # after which no turn begins
UNSTEADY = 1.5  # quartiles this far apart make no ratio: the machine was busy
WAKING = 0.1  # milliseconds by which calls differ on an idle machine too: a thread that sleeps wakes a little later
AGREE = 0.02  # relative difference of two results that rounded to bf16 (8 bits) at every step


@dataclass
class Operation:
    """What several can do. The first of `calls` is ours; of the others the fastest counts."""

    name: str
    calls: dict[str, Callable[[], object]]
    check: str
    flops: float = 0.0


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
        mine, *others = times
        best = min(others, key=lambda other: statistics.median(times[other]))
        wide = max(quartile_ratio(times[who]) for who in (mine, best))
        return cls(name, spread(times[mine])["ms"], spread(times[best])["ms"], best, wide, check)

    @property
    def faster(self) -> str:
        return f"{self.theirs / self.ours:.2f}x" if self.unsteady <= UNSTEADY else "busy"


def turns_of(once: float) -> int:
    """How many turns an operation gets of which one takes so many seconds."""
    if once > SLOW:
        return TURNS_OF_SLOW
    return min(MOST_TURNS, max(LEAST_TURNS, int(SECONDS / max(once, 1e-6))))


def spread_out(turns: list[int]) -> list[int]:
    """In which order operations take their turns: each has its own over the whole time, so that a slow second takes a
    few from all and decides no median."""
    places = [((turn + 0.5) / count, which) for which, count in enumerate(turns) for turn in range(count)]
    return [which for _, which in sorted(places)]


def take_turns(operations: list[Operation], clock: Clock) -> list[Line]:
    until = time.monotonic() + MOST_SECONDS
    times = [clock.round_robin(o.calls, 1, o.flops) for o in operations]
    left = [turns_of(sum(ms[0] for ms in kept.values()) / 1e3) - 1 for kept in times]
    shuffle = random.Random(0).shuffle
    for which in tqdm(spread_out(left), desc="operations", leave=False, disable=None):
        if time.monotonic() > until:
            break
        operation = operations[which]
        order = list(operation.calls)
        shuffle(order)
        calls = {who: operation.calls[who] for who in order}
        for who, ms in clock.round_robin(calls, 1, operation.flops, warm_up=False).items():
            times[which][who] += ms
    return [Line.of(o.name, kept, o.check) for o, kept in zip(operations, times, strict=True)]


def quartile_ratio(times: list[float]) -> float:
    """How far apart they lie; of fewer than three nobody can tell."""
    if len(times) < TURNS_OF_SLOW:
        return float("inf")
    low, _, high = statistics.quantiles(times, n=4)
    return (high + WAKING) / (low + WAKING)


def agreement(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> str:
    """What the column `check` says of two results."""
    pairs = [(a.detach().float(), b.detach().float()) for a, b in zip(mine, theirs, strict=True)]
    error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return "ok" if error < AGREE else f"WRONG: differs by {error:.3f}"


def product(case: Case, W: Tensor | None, device: str) -> Operation:
    o = make_operands(case, W, device, torch.bfloat16, seed=0)
    who = {
        "moegemm": contenders.ours(o),
        "grouped_mm": contenders.torch_with_copies(o),
        "expert loop": contenders.expert_loop(o),
    }
    checked = contenders.check(who["moegemm"])
    check = "ok" if checked["correct"] else f"WRONG: error {checked['error']}"
    return Operation(PRODUCTS[case.op], {name: c.run for name, c in who.items()}, check, case.flops)


def products(model: Model, tokens: int, device: str) -> list[Operation]:
    weights: dict[str, Tensor] = {}
    found = []
    for op in OPS:
        case = Case(model, tokens, "random", op)
        if op[-1] not in weights:
            weights[op[-1]] = make_weights(case, device, torch.bfloat16)
        found.append(product(case, None if op.startswith("dw") else weights[op[-1]], device))
    return found


def passes(model: Model, tokens: int, device: str) -> tuple[Operation, Operation]:
    """What stands before and after the products: routing, and the sum over a token's experts."""
    ids = draw_experts(Case(model, tokens, "random", "fwd1"), device, seed=0)
    rows, dtype = tokens * model.topk, torch.bfloat16
    flat = ids.reshape(-1)
    y = torch.randn(rows, model.hidden, device=device).to(dtype)
    weights = torch.rand(tokens, model.topk, device=device)

    def weighted_sum() -> Tensor:
        return (y.view(tokens, model.topk, -1) * weights[..., None]).sum(1).to(dtype)

    def route() -> tuple[Tensor, Tensor]:
        return moegemm.route(ids, model.experts)

    def sort() -> tuple[Tensor, Tensor]:
        return torch.bincount(flat, minlength=model.experts), flat.sort(stable=True).indices

    def combine() -> Tensor:
        return moegemm.combine(y, weights)

    (sizes, gather), (counts, order) = route(), sort()
    sorted_alike = torch.equal(sizes.long(), counts.long()) and torch.equal(flat[gather.long()], flat[order])
    check = "ok" if sorted_alike else "WRONG: other rows"
    return (
        Operation("route", {"moegemm": route, "torch": sort}, check),
        Operation(
            "combine: weighted sum",
            {"moegemm": combine, "torch": weighted_sum},
            agreement([combine()], [weighted_sum()]),
        ),
    )


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

    def backward(self, forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        leaves = (self.x, self.gate_up, self.down, self.weights)
        return torch.autograd.grad(forward(), leaves, self.d_out)


def without_gradients(forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return torch.no_grad()(forward)


def whole_layer(model: Model, tokens: int, device: str) -> list[Operation]:
    layer = Layer(model, tokens, device)
    calls = {"moegemm": layer.by_moegemm, "expert loop": layer.by_loop}
    forward = {name: without_gradients(call) for name, call in calls.items()}
    both = {name: lambda call=call: layer.backward(call) for name, call in calls.items()}
    return [
        Operation("whole layer, forward", forward, agreement(*([call()] for call in forward.values()))),
        Operation("whole layer, with gradients", both, agreement(*(call() for call in both.values()))),
    ]


def beside_transformers(model: Model, tokens: int, device: str) -> list[Operation]:
    """The layer against the experts that transformers runs by default."""
    from layer.contenders import Layer as Compared  # needs transformers

    compared = Compared.of(model, tokens, torch.bfloat16, device)
    names = {"moegemm": "moegemm", "transformers grouped_mm": "grouped_mm"}
    forward = {who: compared.forward(name) for who, name in names.items()}
    both = {who: compared.forward_backward(name) for who, name in names.items()}
    gradients = []
    for call in both.values():
        call()
        gradients.append([leaf.grad for leaf in compared.leaves().values() if leaf.grad is not None])
    compared.clear_gradients()
    with torch.no_grad():
        check = agreement(*([compared.calls[name]()] for name in names.values()))
    return [
        Operation("whole layer, forward", forward, check),
        Operation("whole layer, with gradients", both, agreement(*gradients)),
    ]


def show(lines: list[Line]) -> None:
    print(f"{'operation':<34} {'moegemm':>10} {'torch':>10} {'faster':>8}  {'torch by':<24} check")
    print(f"{'':-<34} {'':->10} {'':->10} {'':->8}  {'':-<24} -----")
    for line in lines:
        times = f"{line.ours:7.3f} ms {line.theirs:7.3f} ms"
        print(f"{line.name:<34} {times} {line.faster:>8}  {line.theirs_by:<24} {line.check}".rstrip())


def capabilities_here() -> list[str]:
    """Compute capabilities of the GPUs, as nvidia-smi says."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return re.findall(r"^\d+\.\d+$", said, re.MULTILINE)


def why_it_was_built_without_cuda() -> str:
    """Where `make demo` saw /dev/nvidiactl and compiled no kernels all the same, and what to do."""
    if not shutil.which("nvidia-smi"):
        return "nvidia-smi is not on the path to say which GPU it is: `make demo CUDA=ON` compiles kernels all the same"
    found = capabilities_here()
    if not found:
        return "nvidia-smi lists no GPU: run it to see why"
    if max(map(float, found)) < 8.0:
        return f"compute capability 8.0 or newer is needed, it has {max(found, key=float)}"
    return "put nvcc 13.0 or newer on the path and run `make demo` again"


def why_not_the_gpu(info: dict[str, Any]) -> str:
    """What keeps it from being used, and what to do."""
    why = info["why_no_gpu"] or "this torch was built without CUDA"
    if "library was built without CUDA" in why:
        return f"{why}: {why_it_was_built_without_cuda()}"
    if "torch was built without CUDA" in why:
        return f"{why}: install one with it into .venv and run the demo again"
    return f"{why}; docs/errors.md says what to do"


def operations(device: str, tokens: int | None, name: str | None) -> bool:
    """Prints the tables; whether every result was right."""
    cuda = device == "cuda"
    model = read_catalogue()[name or ("qwen3-30b-a3b" if cuda else "demo")]
    tokens = tokens or (8192 if cuda else 256)
    info = moegemm.info()
    where = torch.cuda.get_device_name() if cuda else f"{info['cpu']['model']}, {torch.get_num_threads()} threads"
    print(f"moegemm {info['version']} beside torch {torch.__version__} on {where}")
    if not cuda and Path("/dev/nvidiactl").exists():
        print(f"The GPU of this machine is not used: {why_not_the_gpu(info)}.")
    print(
        f"one layer: {model.experts} experts, top {model.topk}, hidden {model.hidden}, intermediate "
        f"{model.intermediate}; {tokens} tokens, bf16, random routing; medians of up to {MOST_TURNS} turns\n"
    )
    route, combine = passes(model, tokens, device)
    measured = [route, *products(model, tokens, device), combine, *whole_layer(model, tokens, device)]
    own, missing = len(measured), ""
    if cuda:
        try:
            measured += beside_transformers(model, tokens, device)
        except ModuleNotFoundError as error:
            missing = f"\nnot compared with transformers: {error.name} is not installed in this environment"
    lines = take_turns(measured, Clock(device))
    show(lines[:own])
    if lines[own:]:
        print('\nthe same layer beside Hugging Face transformers\' experts_implementation="grouped_mm":')
        show(lines[own:])
    elif missing:
        print(missing)
    if any(line.faster == "busy" for line in lines):
        print(
            f"\nbusy: the machine had other work, and half of these times lie more than {UNSTEADY} times apart. "
            "Run it again when the machine is idle."
        )
    return all(not line.check.startswith("WRONG") for line in lines)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_device = "cuda" if torch.cuda.is_available() and moegemm.info()["gpus"] else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default_device, help="default: %(default)s")
    parser.add_argument("--model", choices=sorted(read_catalogue()), help="default: qwen3-30b-a3b on a GPU, else demo")
    parser.add_argument("--tokens", type=int, help="default: 8192 on a GPU, else 256")
    parser.add_argument("--steps", type=int, default=train_moe.QUICK_STEPS, help="of training (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where the picture goes")
    options = parser.parse_args()
    for name in ("tokens", "steps"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no CUDA device")
    return options


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
