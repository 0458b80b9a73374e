"""Hardware counters of the grouped products on a Hopper GPU: what each one is limited by.

Runs every product of a model's layer once under Nsight Compute (`ncu`, which must be on the PATH and allowed to read
counters), the forward ones with few tokens too, and writes tables. Times under a profiler are not benchmark figures.
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
from moegemm.bench.record import write_json

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "llama4-scout", "gpt-oss-120b", "qwen3-next-80b-a3b", "deepseek-v3")
OPS = ("fwd1", "fwd2", "dx1", "dx2", "dw1", "dw2")
DECODE_OPS = ("fwd1", "fwd2")
DECODE_TOKENS = (1, 16, 64)
GATHER = "gather_kernel"
KERNELS = f"regex:row_gemm|weight_gemm|{GATHER}"
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
# Sampled while the kernel runs, and the time from one sample to the next.
READ_RATE = "FBSP.TriageCompute.dramc__read_throughput.avg.pct_of_peak_sustained_elapsed"
ACTIVE_CLOCKS = "TPC.TriageCompute.sm__cycles_active.avg"
SAMPLE_INTERVAL = "profiler__pmsampler_interval_time"
UNITS = {"us": 1e3, "ms": 1e6, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


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


def number(text: str) -> float:
    return float(text.replace(",", "").split()[0])


def instances(text: str) -> list[float]:
    """The values of a sampled metric, which ncu writes as `total (value; value; ...)`."""
    return [number(value) for value in text[text.index("(") + 1 : text.rindex(")")].split(";")]


def read_launch(row: dict[str, str], units: dict[str, str], sampled: bool) -> dict:
    """The counters of one launch, from its line of ncu's raw page."""
    values: dict = {title: number(row[counter]) * UNITS.get(units[counter], 1.0) for title, counter in COUNTERS.items()}
    if sampled:
        samples = zip(instances(row[READ_RATE]), instances(row[ACTIVE_CLOCKS]), strict=True)
        values["DRAM read %, sampled"] = [rate for rate, clocks in samples if clocks > 0]
        values["sample, us"] = instances(row[SAMPLE_INTERVAL])[0] / 1e3
    return values


def profile(models: list[str], ops: list[str], tokens: int, sampled: bool) -> list[dict]:
    command = ["ncu", "--csv", "--page", "raw", "--clock-control", "none", "-k", KERNELS]
    command += ["--metrics", ",".join(COUNTERS.values())]
    if sampled:
        command += ["--section", "PmSampling", "--pm-sampling-interval", "1000"]
        command += ["--print-metric-instances", "values"]
    command += [sys.executable, __file__, "--launch", "--tokens", str(tokens), "--models", *models, "--ops", *ops]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or '"ID"' not in done.stdout:
        raise SystemExit(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    units, *launches = csv.DictReader(io.StringIO(done.stdout[done.stdout.index('"ID"') :]))
    cells = [(model, op) for model in models for op in ops]
    results: list[dict] = []
    done_cells = 0
    for row in launches:
        model, op = cells[min(done_cells, len(cells) - 1)]
        gathers = GATHER in row["Kernel Name"]
        results.append({"model": model, "op": f"gather of {op}" if gathers else op, "tokens": tokens})
        results[-1].update(read_launch(row, units, sampled))
        done_cells += not gathers
    if done_cells != len(cells):
        raise SystemExit(f"ncu reported {done_cells} products, expected {len(cells)}")
    return results


def reading(result: dict) -> tuple[float, float, float, float]:
    """Microseconds that blocks run before, while and after DRAM reads at over half of its peak; its mean meanwhile."""
    rates, sample = result["DRAM read %, sampled"], result["sample, us"]
    busy = [i for i, rate in enumerate(rates) if rate > 50]
    if not busy:
        return len(rates) * sample, 0.0, 0.0, 0.0
    first, end = busy[0], busy[-1] + 1
    mean = sum(rates[first:end]) / (end - first)
    return first * sample, (end - first) * sample, (len(rates) - end) * sample, mean


def products_table(results: list[dict]) -> list[str]:
    lines = [
        "| model | op | tensor cores % | L2 % | DRAM % | L2 to SM, B/clk | DRAM read, MB | DRAM written, MB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for r in results:
        per_clock = r["L2 to SM, bytes"] / r["clocks"] / multiprocessors
        figures = [2 * r["sparse tensor %"], r["L2 %"], r["DRAM %"], per_clock]
        figures += [r["DRAM read, bytes"] / 1e6, r["DRAM written, bytes"] / 1e6]
        lines.append(" | ".join([f"| {r['model']}", r["op"], *(f"{figure:.0f}" for figure in figures)]) + " |")
    return lines


def decode_table(results: list[dict]) -> list[str]:
    lines = [
        "| model | op | tokens | DRAM read, MB | DRAM % | before, us | reading, us | after, us | DRAM % reading |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in results:
        figures = [r["DRAM read, bytes"] / 1e6, r["DRAM %"], *reading(r)]
        lines.append(
            " | ".join([f"| {r['model']}", r["op"], str(r["tokens"]), *(f"{figure:.0f}" for figure in figures)]) + " |"
        )
    return lines


def markdown(results: list[dict], decode: list[dict], tokens: int, commit: str) -> str:
    lines = [
        "# What limits the grouped products on a Hopper GPU",
        "",
        f"{torch.cuda.get_device_name()}, bf16, random routing, commit {commit}; one launch of each product under "
        "Nsight Compute, with caches emptied before it, written by `benchmarks/counters.py`. Percentages are of the "
        "unit's peak over the whole launch.",
        "",
        f"## {tokens} tokens",
        "",
        "Bytes per clock are what one multiprocessor receives from L2. Tensor cores: the counter's peak counts sparse "
        "products, so its reading is doubled here. *gather of* a product: the pass before it that brings its rows "
        "into order.",
        "",
        *products_table(results),
        "",
        "## Decode",
        "",
        "DRAM's read rate, sampled while blocks run: *reading* is from the first sample above half of the peak to the "
        "last one, at the mean rate in the last column; *before* and *after* are what blocks run besides. From one "
        f"sample to the next: {' or '.join(sorted({format(r['sample, us'], 'g') for r in decode}))} us.",
        "",
        *decode_table(decode),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--commit", default="unknown", help="recorded with the figures")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "hopper")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device")
    if options.launch:
        for model in options.models:
            for op in options.ops:
                launch(model, op, options.tokens)
        return 0
    results = profile(options.models, options.ops, options.tokens, sampled=False)
    decode_ops = [op for op in DECODE_OPS if op in options.ops]
    decode: list[dict] = []
    for tokens in DECODE_TOKENS if decode_ops else ():
        print(f"decode, {tokens} tokens", file=sys.stderr, flush=True)
        decode += profile(options.models, decode_ops, tokens, sampled=True)
    write_json({"products": results, "decode": decode}, options.out, "counters")
    (options.out / "counters.md").write_text(markdown(results, decode, options.tokens, options.commit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
