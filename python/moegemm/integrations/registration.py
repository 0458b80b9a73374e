"""The name "moegemm" in transformers' experts interface."""

import importlib
from typing import Any

from moegemm.integrations.expert_modules import llama4
from moegemm.integrations.expert_modules.experts import experts_forward
from moegemm.integrations.peft_adapters import NAME, follow_peft
from moegemm.integrations.quantizers import follow_quantizers

# Before, transformers accepts the names on a list of its own and no others.
MINIMUM = (5, 7)


_NEEDED = f"moegemm.transformers needs transformers {MINIMUM[0]}.{MINIMUM[1]} or newer"


def require_supported(version: str) -> None:
    """Refuses a transformers that is too old."""
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM:
        raise ImportError(f"{_NEEDED}, whose experts interface takes names from others; this one is {version}")


def _interface() -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"{_NEEDED}; none can be imported: {error}") from error
    require_supported(transformers.__version__)
    moe: Any = importlib.import_module("transformers.integrations.moe")
    return moe.ALL_EXPERTS_FUNCTIONS


def register() -> None:
    """Puts "moegemm" into transformers' experts interface; importing moegemm.transformers does it."""
    interface = _interface()
    if NAME not in interface:
        interface.register(NAME, experts_forward)
        llama4.follow_config(NAME)
        follow_peft()
        follow_quantizers()
