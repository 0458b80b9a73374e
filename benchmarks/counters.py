"""Hardware counters of the grouped products on a Hopper GPU: what each one is limited by.

Runs every product of a model's layer once under Nsight Compute (`ncu`, which must be on the PATH and allowed to read
counters) and writes a table beside the benchmark record. Times under a profiler are not benchmark figures.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import moegemm
import torch

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "llama4-scout", "gpt-oss-120b", "qwen3-next-80b-a3b", "deepseek-v3")
OPS = ("fwd1", "fwd2", "dx1", "dx2", "dw1", "dw2")
KERNELS = "regex:row_gemm|weight_gemm"
# Column title -> counter, in percent of its peak over the whole launch, or a plain sum.
COUNTERS = {
    # Its peak counts sparse products, of which dense ones can reach half.
    "sparse tensor %": "sm__ops_path_tensor_op_hgmma_src_bf16_dst_fp32.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 to SM, bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "DRAM read, bytes": "dram__bytes_read.sum",
    "DRAM written, bytes": "dram__bytes_write.sum",
    "clocks": "sm__cycles_elapsed.max",
    "time, ns": "gpu__time_duration.sum",
}


def layer(name: str) -> dict:
    models = json.loads((ROOT / "data" / "models.json").read_text())["models"]
    return next(m for m in models if m["name"] == name)


def launch(model: str, op: str, tokens: int) -> None:
    """One launch of one product, random routing, bf16."""
    facts = layer(model)
    experts, topk, hidden, intermediate = (facts[key] for key in ("experts", "topk", "hidden", "intermediate"))
    first = op.endswith("1")
    n, k = (2 * intermediate, hidden) if first else (hidden, intermediate)
    rows = tokens * topk
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)

    ids = torch.rand(tokens, experts, device="cuda", generator=generator).topk(topk, dim=1).indices
    m_sizes, indices = moegemm.route(ids, experts)[:2]
    permutation = {"permute_x": first, "permute_y": not first}
    if op.startswith("fwd"):
        weights = None if first else torch.rand(rows, device="cuda", generator=generator)
        x, w = randn(tokens if first else rows, k), randn(experts, n, k)
        moegemm.grouped_gemm_forward(
            x, w, topk, m_sizes, indices, topk_weights=weights, fuse_mul_post=not first, **permutation
        )
    elif op.startswith("dx"):
        moegemm.grouped_gemm_dX(randn(rows, n), randn(experts, n, k), indices, m_sizes, topk, **permutation)
    else:
        x = randn(tokens if first else rows, k)
        moegemm.grouped_gemm_dW(x, randn(rows, n), m_sizes, indices, topk, **permutation)
    torch.cuda.synchronize()


def profile(models: list[str], ops: list[str], tokens: int) -> list[dict]:
    command = ["ncu", "--csv", "--clock-control", "none", "-k", KERNELS, "--metrics", ",".join(COUNTERS.values())]
    command += [sys.executable, __file__, "--launch", "--tokens", str(tokens), "--models", *models, "--ops", *ops]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    table = done.stdout[done.stdout.index('"ID"') :]
    launches: dict[int, dict] = {}
    titles = {counter: title for title, counter in COUNTERS.items()}
    for row in csv.DictReader(io.StringIO(table)):
        values = launches.setdefault(int(row["ID"]), {})
        scale = {"us": 1e3, "ms": 1e6, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}.get(row["Metric Unit"], 1.0)
        values[titles[row["Metric Name"]]] = float(row["Metric Value"].replace(",", "")) * scale
    cells = [(model, op) for model in models for op in ops]
    if len(launches) != len(cells):
        raise SystemExit(f"ncu reported {len(launches)} launches, expected {len(cells)}")
    return [{"model": model, "op": op, **launches[i]} for (model, op), i in zip(cells, sorted(launches), strict=True)]


def markdown(results: list[dict], tokens: int, commit: str) -> str:
    lines = [
        "# What limits the grouped products on a Hopper GPU",
        "",
        f"{torch.cuda.get_device_name()}, bf16, {tokens} tokens, random routing, commit {commit}; one launch of each "
        "product under Nsight Compute, written by `benchmarks/counters.py`. Percentages are of the unit's peak over "
        "the whole launch; bytes per clock are what one multiprocessor receives from L2. Tensor cores: the "
        "counter's peak counts sparse products, so its reading is doubled here.",
        "",
        "| model | op | tensor cores % | L2 % | DRAM % | L2 to SM, B/clk | DRAM read, MB | DRAM written, MB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in results:
        per_clock = r["L2 to SM, bytes"] / r["clocks"] / torch.cuda.get_device_properties(0).multi_processor_count
        figures = [2 * r["sparse tensor %"], r["L2 %"], r["DRAM %"], per_clock]
        figures += [r["DRAM read, bytes"] / 1e6, r["DRAM written, bytes"] / 1e6]
        lines.append(" | ".join([f"| {r['model']}", r["op"], *(f"{figure:.0f}" for figure in figures)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--commit", default="unknown", help="recorded with the figures")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "hopper")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device")
    if options.launch:
        for model in options.models:
            for op in options.ops:
                launch(model, op, options.tokens)
        return 0
    results = profile(options.models, options.ops, options.tokens)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "counters.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "counters.md").write_text(markdown(results, options.tokens, options.commit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
