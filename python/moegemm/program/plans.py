"""What `moegemm plan` says, as an object: printed it is the program's text, in a notebook a picture and tables."""

import ctypes
import json
import os
import re
from pathlib import Path
from typing import Any

import torch

from moegemm.formats import FORMATS
from moegemm.program import c_strings, entry
from moegemm.program.tables import html_table

_ERRORS = (ValueError, TypeError, NotImplementedError, RuntimeError)  # moegemm::ErrorKind, in its order
_TAKE = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class LayerPlan:
    """The plans of a layer's six products (forward, dX and dW of the first and of the second).

    `layer` are its sizes, `plans` the products: each a dict of op, problem, plan (its steps, with reasons), limit,
    cost, candidates and not_available, as `moegemm plan --json` prints them. `str` is what the program prints.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self.layer: dict[str, Any] = document["layer"]
        self.plans: list[dict[str, Any]] = document["plans"]
        self.svg: str = document["svg"]
        self._text: str = document["text"]

    def __str__(self) -> str:
        return self._text.rstrip("\n")

    def __repr__(self) -> str:
        return str(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture of `moegemm plan --plot` as an SVG file."""
        if Path(path).suffix not in ("", ".svg"):
            raise ValueError(f"path is '{path}'; the picture is an SVG, and a name that ends in .svg is accepted")
        Path(path).write_text(self.svg)

    def _repr_html_(self) -> str:
        rows = []
        for product in self.plans:
            steps = [step for step in product["plan"]["steps"] if not step.get("first_feature")]  # one for all cuts
            launches = " + ".join(step.get("kernel", step["kind"]) for step in steps)
            rows.append((product["op"], launches, product["limit"], "; ".join(step["reason"] for step in steps)))
        table = html_table(("product", "launches", "limit", "why"), rows)
        return f"{self.svg}\n{table}"


def plan(
    model: str | None = None, *, tokens: int | None = None, experts: int | None = None, topk: int | None = None,
    hidden: int | None = None, intermediate: int | None = None, dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None, gpu: str | None = None, backend: str | None = None,
    autotune: bool = False, weights: str | None = None,
) -> LayerPlan:  # fmt: skip
    """Which kernel each product of an expert layer would get, what limits it, and why. Nothing is run.

    The arguments are those of the program: `model` is one of its presets, and sizes that are given are put over it.
    `gpu` names a GPU that need not be here ("h200", "a100", ...), `device` one that is ("cpu", "cuda", "cuda:1"). dtype
    is "bf16", "fp16" or "fp32", or torch's. `backend` forces one ("sm90", "sm80", "cpu" or "reference"). `autotune`
    plans as calls with autotune=True do. `weights` is the name of a format of quantised weights, as "mxfp4".

    >>> import moegemm
    >>> found = moegemm.plan(experts=8, topk=2, hidden=64, intermediate=32, tokens=16)
    >>> [p["op"] for p in found.plans]
    ['forward 1', 'dX 1', 'dW 1', 'forward 2', 'dX 2', 'dW 2']
    >>> print(str(found).splitlines()[0])
    demo: 8 experts, top 2, hidden 64, intermediate 32; 16 tokens, 4.0 rows per expert
    """
    word = FORMATS[dtype].name if isinstance(dtype, torch.dtype) and dtype in FORMATS else dtype
    given = {
        "tokens": tokens, "experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate,
        "dtype": word, "device": device, "gpu": gpu, "backend": backend, "weights": weights,
    }  # fmt: skip
    if model is not None and (not isinstance(model, str) or model.startswith("-")):
        raise ValueError(f"model is {model!r}; a name of the catalogue is accepted")
    words = [] if model is None else [model]
    words += [f"--{name}={value}" for name, value in given.items() if value is not None]
    return LayerPlan(json.loads(_answer([*words, "--autotune"] if autotune else words)))


def _answer(words: list[str]) -> str:
    """What the program's `plan` says to these arguments; raises what it refuses."""
    taken: list[bytes] = []
    kind = entry("moegemm_plan")(len(words), c_strings(words), _TAKE(taken.append))
    text = taken[0].decode(errors="replace")
    if kind >= 0:
        # A flag of the program is an argument here.
        raise _ERRORS[kind](re.sub(r"(?<!\w)--(?=\w)", "", text).replace("preset:", "model:"))
    return text
