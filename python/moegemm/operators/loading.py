"""Finds the compiled operators and hands them to torch, or says in one sentence why it cannot. `ops` has them."""

import os
import re
from pathlib import Path
from typing import Any

import torch

from moegemm._ops import NAMESPACE

OLDEST_TORCH = (2, 10)
LIBRARY_NAME = "libmoegemm_torch.so"
PATH_VARIABLE = "MOEGEMM_TORCH_LIBRARY"


def candidates() -> list[Path]:
    """Where the operators may be: named by hand, installed with the package, built in a checkout."""
    package = Path(__file__).parents[1]
    named = os.environ.get(PATH_VARIABLE)
    if named:
        return [Path(named)]
    return [package / LIBRARY_NAME, package / "lib" / LIBRARY_NAME]


def found_library() -> Path | None:
    """The first of them that is there."""
    return next((path for path in candidates() if path.is_file()), None)


def torch_release(version: str) -> tuple[int, int]:
    """The first two numbers of a version like "2.11.0+cu130"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def load() -> Any:
    """Loads the operators and returns them; ImportError says what was found and what is needed."""
    needed = ".".join(map(str, OLDEST_TORCH))
    if torch_release(torch.__version__) < OLDEST_TORCH:
        found = f"moegemm found torch {torch.__version__}"
        raise ImportError(f"{found}; torch {needed} or newer is needed: pip install --upgrade torch")
    library = found_library()
    if library is None:
        looked = " nor ".join(map(str, candidates()))
        raise ImportError(
            f"moegemm found no compiled operators (neither {looked}); install the wheel, or in a checkout "
            f"build with -DMOEGEMM_BUILD_TORCH=ON, or set {PATH_VARIABLE} to the path of {LIBRARY_NAME}"
        )
    operators: Any = torch.ops
    try:
        operators.load_library(library)
    except (OSError, RuntimeError) as error:
        # torch keeps what the linker said as the cause.
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ImportError(
            f"moegemm found {library}, which does not load with torch {torch.__version__} ({reason}); needed "
            f"are torch {needed} or newer and a build of moegemm for this system"
        ) from None
    return getattr(operators, NAMESPACE)


ops: Any = load()
