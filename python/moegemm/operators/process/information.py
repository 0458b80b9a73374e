"""What this installation is and can do."""

import json
from typing import Any

import torch

from moegemm.operators.loading import ops


def info() -> dict[str, Any]:
    """Version and build of the library, CPU and GPUs it sees, backends (and why one is not available), kernels.

    >>> import moegemm
    >>> sorted(moegemm.info())
    ['backends', 'build', 'cpu', 'gpus', 'kernels', 'torch', 'version', 'why_no_gpu']
    """
    described: dict[str, Any] = json.loads(ops.info())
    described["torch"] = torch.__version__
    return described
